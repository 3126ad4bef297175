from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import read_gguf
from disco_daemon.models.model_shape import ModelShape
from tests.fixtures.gguf import array, header, number, pair, text

ROOT = Path(__file__).parent.parent.parent.parent
BLOOM_560M = ModelShape(24, 1024, 4096, 16, 16, 64, 250_880, gated=False)
BLOOM_1B1 = ModelShape(24, 1536, 6144, 16, 16, 96, 250_880, gated=False)
QWEN_05B = ModelShape(24, 1024, 2816, 16, 16, 64, 151_936, gated=True)
SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49_152, gated=True)

shapes = st.builds(
    ModelShape, *[st.integers(1, 64)] * 7, gated=st.booleans(), experts_used=st.integers(1, 4)
)  # fmt: skip


# Published parameters less what is no matrix: biases and norms (13 h a layer and 4 h for BLOOM, 5 h and h for Qwen).
@pytest.mark.parametrize(
    ("shape", "parameters", "vectors"),
    [
        (BLOOM_560M, 559_214_592, 24 * 13 * 1024 + 4 * 1024),
        (BLOOM_1B1, 1_065_314_304, 24 * 13 * 1536 + 4 * 1536),
        (QWEN_05B, 463_987_712, 24 * 5 * 1024 + 1024),
    ],
)
def test_a_token_without_context_takes_two_operations_a_parameter(
    shape: ModelShape, parameters: int, vectors: int
) -> None:
    token = shape.decode(0)
    seen_itself = 4 * shape.layers * shape.heads * shape.head_dim
    assert token.total - token.norm - seen_itself == 2 * (parameters - vectors)  # output and embedding are one matrix


def test_a_decode_token_of_bloom_by_hand() -> None:
    token = BLOOM_560M.decode(127)
    assert token.embedding == 0
    assert token.attention == 24 * (8 * 1024 * 1024 + 4 * 1024 * 128)
    assert token.ffn == 24 * 16 * 1024 * 1024
    assert token.norm == 49 * 5 * 1024
    assert token.output == 2 * 1024 * 250_880
    assert token.total == pytest.approx(1.1307e9, rel=1e-4)


def test_a_prompt_of_qwen_by_hand() -> None:
    prompt = QWEN_05B.prefill(128)
    assert prompt.attention == 24 * (128 * 8 * 1024**2 + 4 * 1024 * 128 * 129 / 2)
    assert prompt.ffn == 24 * 128 * 6 * 1024 * 2816
    assert prompt.output == 2 * 1024 * 151_936
    assert prompt.total == pytest.approx(80.10e9, rel=1e-3)


def test_shared_keys_and_experts() -> None:
    assert SMOLLM2.decode(0).attention == 30 * (2 * 576 * 64 * (9 + 3 + 3 + 9) + 4 * 9 * 64)
    assert replace(SMOLLM2, experts_used=2).decode(0).ffn == 2 * SMOLLM2.decode(0).ffn


def test_shares_add_up() -> None:
    assert sum(BLOOM_1B1.prefill(64).shares().values()) == pytest.approx(1)


@given(shapes, st.integers(0, 300), st.integers(0, 300))
def test_a_prompt_is_its_tokens(shape: ModelShape, cached: int, fresh: int) -> None:
    one_by_one = sum(shape.span(i, i + 1, outputs=0).total for i in range(cached, cached + fresh))
    asked = shape.span(0, 0, outputs=1).total if fresh else 0.0
    assert shape.prefill(cached + fresh, cached).total == pytest.approx(one_by_one + asked)


@given(shapes, st.integers(0, 10**5), st.integers(1, 10**5))
def test_a_longer_context_never_takes_less(shape: ModelShape, context: int, more: int) -> None:
    assert shape.decode(context + more).total > shape.decode(context).total > 0


def test_energy_goes_from_one_length_and_model_to_others() -> None:
    per_flop = flops.calibrate(BLOOM_560M, 0.5, 128)
    assert flops.joules_per_token(BLOOM_560M, per_flop, 128, 0)[0] == pytest.approx(0.5)
    larger = flops.joules_per_token(BLOOM_1B1, per_flop, 128, 128)
    assert larger[0] == pytest.approx(0.5 * BLOOM_1B1.prefill(128).total / BLOOM_560M.prefill(128).total)
    assert larger[1] > larger[0], "a decode token asks for its successor, most prompt tokens do not"


@pytest.mark.parametrize("span", [(-1, 2), (3, 2)])
def test_no_span_backwards(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no span"):
        SMOLLM2.span(*span, outputs=0)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers, vocab must"):
        replace(SMOLLM2, layers=0, vocab=-1)
    with pytest.raises(ValueError, match="at least one token"):
        flops.joules_per_token(SMOLLM2, 1e-9, 0, 0)


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
    assert flops.shape_of(read_gguf(header(*BLOOM_FILE))) == BLOOM_560M


def test_the_first_kilobytes_do() -> None:
    assert flops.shape_of(read_gguf(header(*BLOOM_FILE)[:4096])) == BLOOM_560M


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
def test_the_shape_of_the_embedded_model() -> None:
    with default_model_path().open("rb") as f:
        assert flops.shape_of(read_gguf(f.read(1 << 16))) == SMOLLM2


def test_layers_that_differ_count_by_their_mean() -> None:
    keys: dict[str, Any] = {
        "general.architecture": "x", "x.block_count": 2, "x.embedding_length": 64, "x.feed_forward_length": [100, 300],
        "x.attention.head_count": 4, "x.attention.head_count_kv": [1, 3], "x.vocab_size": 10,
        "x.expert_used_count": 2, "x.expert_feed_forward_length": 50,
    }  # fmt: skip
    assert flops.shape_of(keys) == ModelShape(2, 64, 50, 4, 2, 16, 10, gated=True, experts_used=2)
    assert flops.shape_of(keys | {"x.expert_used_count": 0}).ffn == 200


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("general.architecture", "general.architecture is missing"),
        ("bloom.block_count", "bloom.block_count is missing"),
        ("tokenizer.ggml.tokens.length", "neither bloom.vocab_size"),
    ],
)
def test_what_is_missing_is_named(missing: str, message: str) -> None:
    keys = read_gguf(header(*BLOOM_FILE))
    del keys[missing]
    with pytest.raises(ValueError, match=message):
        flops.shape_of(keys)


# --- profiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [("pixel7pro-bloom1.1b", BLOOM_1B1), ("pixel7pro-bloom560m", BLOOM_560M), ("xiaomi14-qwen0.5b", QWEN_05B)],
)
def test_the_papers_phones(name: str, shape: ModelShape) -> None:
    profile = tomllib.loads((ROOT / "profiles/devices" / f"{name}.toml").read_text("utf-8"))
    assert profile["ttft_fit"]["k_s_per_token"] == pytest.approx(1 / profile["speed"]["prefill_tps"], rel=1e-4)
    profile["shape"].pop("source")
    assert ModelShape(**profile["shape"]) == shape
