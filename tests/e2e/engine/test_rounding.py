"""Exact rounding: a row has the same bits however many rows are computed with it, whatever packs the weights."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.wire import Load
from disco_daemon.models.files import whole_header
from disco_daemon.models.rounding import rounds_alike
from disco_daemon.system.processors import has_avx2
from disco_daemon.types import LayerRange
from tests.fixtures.weights import N_LAYERS, N_VOCAB, packed, random_llama

# llama.cpp's recipes, each of several packings.
RECIPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
    "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip
N_TOKENS = 70
SIZES = (1, 2, 3, 4, 8, 16, 64)  # of batches: kernels begin at two, four and eight rows


def differences(path: str) -> list[int]:
    """The sizes of batches in which a model's logits are not to the bit those of one token after the other."""
    quiet()
    load = Load(model_path=path, n_ctx=N_TOKENS, n_threads=2, n_threads_batch=2, exact=True, n_gpu_layers=0)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, N_TOKENS)
    logits = {}
    for size in SIZES:
        model = SegmentModel(load, LayerRange(0, N_LAYERS, N_LAYERS))
        rows = [(int(token), at, 0, True) for at, token in enumerate(tokens)]
        logits[size] = np.concatenate([model.run(rows[at : at + size]) for at in range(0, N_TOKENS, size)])
        model.close()
    return [size for size in SIZES if not np.array_equal(logits[size], logits[1])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], bool]]:
    """By recipe: the sizes of batches that change a bit, and whether none is said to."""
    folder = tmp_path_factory.mktemp("packed")
    whole = random_llama(folder / "whole.gguf")
    paths = {name: packed(whole, recipe, folder / f"{name}.gguf") for name, recipe in RECIPES.items()}
    # llama.cpp looks at its switch once a process, and other tests have computed in this one.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        changed = pool.map(differences, [str(path) for path in paths.values()])
    alike = [rounds_alike(whole_header(path), has_products=has_avx2()) for path in paths.values()]
    return {name: (sizes, said) for name, sizes, said in zip(paths, changed, alike, strict=True)}


def test_where_rows_are_said_to_round_alike_no_batch_changes_a_bit(
    found: dict[str, tuple[list[int], bool]],
) -> None:
    assert {name: sizes for name, (sizes, alike) in found.items() if alike and sizes} == {}
    assert {name for name, (_, alike) in found.items() if not alike} == (set() if has_avx2() else {"F16", "BF16"})
