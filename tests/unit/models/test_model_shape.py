from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import read_header
from disco_daemon.models.model_shape import ModelShape, expert_bytes, shape_of
from tests.fixtures.gguf import Q8_0, array, header, number, pair, tensor, text

ROOT = Path(__file__).parent.parent.parent.parent
BLOOM_560M = ModelShape(24, 1024, 16, 16, 64, 250_880)
BLOOM_1B1 = ModelShape(24, 1536, 16, 16, 96, 250_880)
QWEN_05B = ModelShape(24, 1024, 16, 16, 64, 151_936)
SMOLLM2 = ModelShape(30, 576, 9, 3, 64, 49_152)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers, vocab must"):
        replace(SMOLLM2, layers=0, vocab=-1)


# --- the shape that a GGUF header tells -------------------------------------------------------------------------------


BLOOM_FILE = (
    pair("general.architecture", 8, text("bloom")),
    number("bloom.block_count", 24),
    number("bloom.embedding_length", 1024),
    number("bloom.feed_forward_length", 4096),
    number("bloom.attention.head_count", 16),
    pair("tokenizer.ggml.tokens", 9, array(8, 250_880, text("<unk>") * 250_880)),
)


def test_the_shape_out_of_a_file() -> None:
    assert shape_of(read_header(header(*BLOOM_FILE)).keys) == BLOOM_560M


def test_the_first_kilobytes_do() -> None:
    assert shape_of(read_header(header(*BLOOM_FILE)[:4096]).keys) == BLOOM_560M


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
def test_the_shape_of_the_embedded_model() -> None:
    with default_model_path().open("rb") as f:
        assert shape_of(read_header(f.read(1 << 16)).keys) == SMOLLM2


def test_layers_that_differ_count_by_their_mean() -> None:
    keys: dict[str, Any] = {
        "general.architecture": "x", "x.block_count": 2, "x.embedding_length": 64,
        "x.attention.head_count": 4, "x.attention.head_count_kv": [1, 3], "x.vocab_size": 10,
    }  # fmt: skip
    assert shape_of(keys) == ModelShape(2, 64, 4, 2, 16, 10)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("general.architecture", "general.architecture is missing"),
        ("bloom.block_count", "bloom.block_count is missing"),
        ("tokenizer.ggml.tokens.length", "neither bloom.vocab_size"),
    ],
)
def test_what_is_missing_is_named(missing: str, message: str) -> None:
    keys = read_header(header(*BLOOM_FILE)).keys
    del keys[missing]
    with pytest.raises(ValueError, match=message):
        shape_of(keys)


# --- profiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [("pixel7pro-bloom1.1b", BLOOM_1B1), ("pixel7pro-bloom560m", BLOOM_560M), ("xiaomi14-qwen0.5b", QWEN_05B)],
)
def test_the_papers_phones(name: str, shape: ModelShape) -> None:
    profile = tomllib.loads((ROOT / "profiles/devices" / f"{name}.toml").read_text("utf-8"))
    assert profile["ttft_fit"]["k_s_per_token"] == pytest.approx(1 / profile["speed"]["prefill_tps"], rel=1e-4)
    assert ModelShape(**{field.name: profile["shape"][field.name] for field in fields(ModelShape)}) == shape


def test_experts_are_weighed_layer_by_layer() -> None:
    names = (
        ("blk.0.ffn_up_exps.weight", 64), ("blk.0.ffn_gate_up_exps.weight", 32), ("blk.1.ffn_down_chexps.weight", 96),
        ("blk.1.ffn_up_shexp.weight", 64), ("blk.1.ffn_up.weight", 64), ("blk.7.ffn_up_exps.weight", 64),
        ("v.blk.0.ffn_up_exps.weight", 64),
    )  # fmt: skip
    told = read_header(header(tensors=[tensor(name, (n, 4), Q8_0) for name, n in names]))
    assert expert_bytes(told, 2) == (4 * 34 * (64 + 32) // 32, 4 * 34 * 96 // 32), "no layer that a model has not"
    assert expert_bytes(read_header(header(tensors=[tensor("blk.0.ffn_up.weight", (64, 4))])), 2) == ()
    unknown = read_header(header(tensors=[tensor("blk.0.ffn_up_exps.weight", (64, 4), 99)]))
    assert expert_bytes(unknown, 2) == (), "a packing newer than this program"


def test_a_recurrent_model_without_heads_has_a_shape() -> None:
    keys: dict[str, Any] = {"block_count": 3, "embedding_length": 64, "vocab_size": 100, "ssm.state_size": 16}
    for heads in ({}, {"attention.head_count": 0, "attention.head_count_kv": 0}):
        header = {"general.architecture": "mamba2"} | {f"mamba2.{key}": n for key, n in (keys | heads).items()}
        assert shape_of(header) == ModelShape(3, 64, 1, 1, 64, 100)
