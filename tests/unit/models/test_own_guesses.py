"""Whether a model has a layer that guesses: what llama.cpp would end the process at is not tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_daemon.models.gguf import Header, Tensor
from disco_daemon.models.gguf_file import read_file_header
from disco_daemon.models.own_guesses import why_no_guesses
from tests.fixtures.tiny_models import tiny_model


def header_of(kind: str, folder: Path) -> Header:
    with tiny_model(folder / "m.gguf", kind).open("rb") as file:
        return read_file_header(file)[1]


def changed(header: Header, missing: str = "", **keys: float | str) -> Header:
    tensors = tuple(one for one in header.tensors if not missing or missing not in one.name)
    arch = header.architecture
    named = {name if name.startswith("general.") else f"{arch}.{name}": value for name, value in keys.items()}
    return Header(len(tensors), {**header.keys, **named}, tensors, header.whole)


@pytest.mark.parametrize("kind", ["nextn", "mla-nextn"])
def test_it_is_used_where_all_of_it_is_there(kind: str, tmp_path: Path) -> None:
    header = header_of(kind, tmp_path)
    assert why_no_guesses(header) == ""
    needed = [one.name for one in header.tensors if one.name.startswith("blk.3.") and "norm" not in one.name]
    lost = [name for name in needed if why_no_guesses(changed(header, name)) == ""]
    # llama.cpp does not load a layer without these: then the model is refused as a whole
    assert all(
        part in "attn_q attn_k attn_v attn_output attn_v_b ffn_gate_exps ffn_up_exps exp_probs_b"
        for part in (name.split(".")[2] for name in lost)
    ), lost


def test_why_it_is_not_used(tmp_path: Path) -> None:
    header = header_of("mla-nextn", tmp_path)
    assert why_no_guesses(changed(header, "nextn.")) == "the file was written without it"
    assert "one such layer" in str(why_no_guesses(changed(header, nextn_predict_layers=2)))
    shape = "it is not of the shape that llama.cpp computes"
    assert why_no_guesses(changed(header, "", **{"attention.temperature_scale": 0.1})) == shape
    assert why_no_guesses(changed(header, "blk.3.attn_k_b")) == shape
    assert why_no_guesses(changed(header, leading_dense_block_count=4)) == shape
    assert why_no_guesses(changed(header, "", **{"attention.q_lora_rank": 0})) == shape
    other = Header(
        1,
        {"general.architecture": "qwen35", "qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1},
        (Tensor("blk.2.nextn.eh_proj.weight", (2, 1), 0, 0),),
    )
    assert "architecture qwen35" in str(why_no_guesses(other))


@pytest.mark.parametrize("kind", ["moe", "mla", "hybrid"])
def test_most_models_have_none(kind: str, tmp_path: Path) -> None:
    assert why_no_guesses(header_of(kind, tmp_path)) is None
