"""The models that `benchmarks.engine --shape` makes: packed as llama.cpp packs them, and their figures' JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import limits, shapes
from benchmarks.engine.shapes import QUANTS, SHAPES
from disco_daemon.engine.llama.ggml import Ggml
from disco_daemon.models.gguf import HEADER_BYTES, read_header
from tests.fixtures.weights import packed, random_bytes_speaker

# As in the list, but as small as their packings allow; with eight layers and more some have more bits than others.
SMALL: dict[str, Any] = {
    "n_embd": 256,
    "n_ff": 256,
    "n_heads": 4,
    "n_kv_heads": 1,
    "head": 64,
    "n_words": 0,
    "n_layers": 9,
}
KINDS = {
    "dense": replace(SHAPES["8b"], **SMALL),
    "tied": replace(SHAPES["1.7b"], **SMALL | {"n_kv_heads": 4}),
    "moe": replace(SHAPES["moe"], **SMALL | {"n_layers": 3, "n_experts": 4, "n_used": 2}),
    "hybrid": replace(SHAPES["hybrid"], **SMALL | {"attention": (2, 5, 8)}),
}
MIXED = ("q5_k_m", "q4_k_m", "iq4_nl", "mxfp4")  # whose tensors are packed in several ways


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bytes_speaker(tmp_path_factory.mktemp("speaker") / "speaker.gguf", 256)


def packings(path: Path) -> dict[str, int]:
    header = read_header(path.read_bytes()[:HEADER_BYTES])
    return {tensor.name: tensor.packing for tensor in header.tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_packed_as_llama_cpp_packs_it(kind: str, speaker: Path, tmp_path: Path) -> None:
    shape = KINDS[kind]
    plain = shapes.make(tmp_path / "plain.gguf", shape, "f32", Ggml.installed(), speaker)
    for quant, (recipe, _) in QUANTS.items():
        if quant == "f32" or (quant == "mxfp4" and not shape.n_experts) or (kind != "dense" and quant not in MIXED):
            continue
        theirs = packings(packed(plain, recipe, tmp_path / "theirs.gguf"))
        ours = {name: shapes.packing_of(name, dims, shape, quant) for name, dims in shape.tensors(260)}
        assert ours == theirs, quant


@pytest.mark.parametrize("quant", QUANTS)
def test_a_file_is_whole_and_says_how_it_is_packed(quant: str, speaker: Path, tmp_path: Path) -> None:
    shape = KINDS["dense"]
    path = shapes.make(tmp_path / "m.gguf", shape, quant, Ggml.installed(), speaker)
    header = read_header(path.read_bytes()[:HEADER_BYTES])
    assert (header.packing.lower(), header.least_bytes) == (quant, path.stat().st_size)
    assert packings(path) == {name: shapes.packing_of(name, dims, shape, quant) for name, dims in shape.tensors(260)}


def test_a_dense_model_has_mxfp4_in_its_feed_forward_part(speaker: Path, tmp_path: Path) -> None:
    found = packings(shapes.make(tmp_path / "m.gguf", KINDS["dense"], "mxfp4", Ggml.installed(), speaker))
    assert {name for name, packing in found.items() if packing == shapes.MXFP4} == {
        name for name in found if ".ffn_" in name and "norm" not in name
    }


def test_the_work_of_a_token_is_that_of_its_weights(speaker: Path, tmp_path: Path) -> None:
    shape, ggml = KINDS["moe"], Ggml.installed()
    n, n_ff, at = shape.n_embd, shape.n_ff, shape.n_heads * shape.head
    attention = 2 * n * at + 2 * n * shape.n_kv_heads * shape.head
    used = 3 * n * n_ff * shape.n_used
    work = limits.work_of(shapes.make(tmp_path / "m.gguf", shape, "q8_0", ggml, speaker))
    assert work.multiply_adds == shape.n_layers * (attention + used)
    assert work.float_multiply_adds == shape.n_layers * n * shape.n_experts, "routers are floats"
    n_words = 260
    of_bytes = (work.multiply_adds + n * n_words) * 34 // 32
    assert work.n_bytes == of_bytes + 4 * work.float_multiply_adds, "the head is read, too"
    least = limits.Bounds(1e9, 1e8, 1e8, 1e10, 1)
    assert work.prompt_s(least) == pytest.approx(work.multiply_adds / 1e9 + work.float_multiply_adds / 1e8)
    assert work.one_s(least) == pytest.approx(work.n_bytes / 1e10)
    assert (least.multiply_adds_per_cycle, limits.Bounds(1e9, 0, 0, 0, 1).multiply_adds_per_cycle) == (10.0, None)
    assert work.prompt_s(replace(least, float_multiply_adds_per_s=0)) is None
    assert work.one_s(replace(least, bytes_per_s=0)) is None


def test_a_larger_vocabulary_is_the_speakers_and_more(speaker: Path, tmp_path: Path) -> None:
    from llama_cpp import Llama

    wide = replace(KINDS["tied"], n_words=1000)
    model = Llama(
        str(shapes.make(tmp_path / "m.gguf", wide, "q8_0", Ggml.installed(), speaker)), n_ctx=64, verbose=False
    )
    assert model.n_vocab() == 1000
    assert model.detokenize([999]) == b"[999]"
    assert model.detokenize(model.tokenize(b"hello", add_bos=False)) == b"hello"
    model.close()
