"""What a model keeps of a text, by its header, held against models of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.models.kept_numbers import MOST_LAYERS, KeptNumbers, kept_numbers


def keys(architecture: str, **numbers: Any) -> dict[str, Any]:
    found = {f"{architecture}.{key.replace('__', '.')}": value for key, value in numbers.items()}
    return {"general.architecture": architecture, **found}


SHAPES = {
    "SmolLM2 135M": (
        keys("llama", block_count=30, embedding_length=576, attention__head_count=9, attention__head_count_kv=3),
        KeptNumbers(30 * 3 * 2 * 64),
    ),
    "Gemma 3 4B": (
        keys("gemma3", block_count=34, embedding_length=2560, attention__head_count=8, attention__head_count_kv=4,
             attention__key_length=256, attention__value_length=256, attention__sliding_window=1024),
        KeptNumbers(5 * 4 * 512, 1024, 29 * 4 * 512),
    ),
    "gpt-oss 20B": (
        keys("gpt-oss", block_count=24, embedding_length=2880, attention__head_count=64, attention__head_count_kv=8,
             attention__key_length=64, attention__value_length=64, attention__sliding_window=128),
        KeptNumbers(12 * 8 * 128, 128, 12 * 8 * 128),
    ),
    "one whose file says which layers see a window, with heads of two sizes, and the last cells are shared": (
        keys("gemma4", block_count=6, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
             attention__key_length=32, attention__value_length=32, attention__key_length_swa=16,
             attention__value_length_swa=16, attention__sliding_window=512, attention__shared_kv_layers=2,
             attention__sliding_window_pattern=[True, True, False, True, True, False]),
        KeptNumbers(2 * 64, 512, 3 * 2 * 32),
    ),
    "LFM2 1.2B": (
        keys("lfm2", block_count=16, embedding_length=2048, attention__head_count=32, shortconv__l_cache=3,
             attention__head_count_kv=[0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]),
        KeptNumbers(6 * 8 * 2 * 64, state_bytes=4 * 10 * 2 * 2048),
    ),
    "Qwen3-Next 80B": (
        keys("qwen3next", block_count=48, embedding_length=2048, attention__head_count=16, attention__head_count_kv=2,
             attention__key_length=256, attention__value_length=256, ssm__conv_kernel=4, ssm__inner_size=4096,
             ssm__state_size=128, ssm__group_count=16),
        KeptNumbers(12 * 2 * 512, state_bytes=4 * 36 * (3 * (4096 + 2 * 16 * 128) + 4096 * 128)),
    ),
    "Falcon-H1, each of whose layers has both": (
        keys("falcon-h1", block_count=2, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
             ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16, ssm__group_count=1),
        KeptNumbers(2 * 2 * 32, state_bytes=4 * 2 * (3 * (128 + 32) + 128 * 16)),
    ),
    "Kimi-Linear": (
        keys("kimi-linear", block_count=4, embedding_length=64, attention__head_count=[4, 4, 4, 4],
             attention__head_count_kv=[0, 0, 0, 1], attention__key_length=24, attention__value_length=16,
             kda__head_dim=8, ssm__conv_kernel=4),
        KeptNumbers(40, state_bytes=4 * 3 * (3 * 3 * 32 + 4 * 64)),
    ),
    "a window that all layers see": (
        keys("llama", block_count=2, embedding_length=64, attention__head_count=4, attention__sliding_window=64),
        KeptNumbers(2 * 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_layers_with_cells_with_a_window_and_with_a_state_are_told_apart(name: str) -> None:
    header, expected = SHAPES[name]
    assert kept_numbers(header) == expected


def test_a_header_of_more_layers_than_there_are_is_refused_before_they_are_counted() -> None:
    with pytest.raises(ValueError, match="no model has"):
        kept_numbers(keys("llama", block_count=MOST_LAYERS + 1))
