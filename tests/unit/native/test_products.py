"""Products of quantized weights as our build of llama.cpp has them (`native/products.h`), alone, and numpy's."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Protocol

import numpy as np
import pytest

from disco_daemon.arrays import FloatArray
from tests.unit.native.test_exact_attention import compiled_for
from tests.unit.native.test_llama_build import CI

CALLS = """
#if defined(DISCO_MULTIPLIES)
template <typename W>
static void multiply(
        const char * weights, int64_t m, const char * rows, int64_t n, int64_t n_blocks, float * to, int64_t stride) {
    std::vector<float> scales(2*n*n_blocks);
    disco_scales<W>(rows, n_blocks*W::ROW_BYTES, n, n_blocks, scales.data());
    disco_product of = {};
    of.weights = weights;
    of.n_weights = m;
    of.weights_bytes = n_blocks*W::BYTES;
    of.rows = rows;
    of.n_rows = n;
    of.row_bytes = n_blocks*W::ROW_BYTES;
    of.n_blocks = n_blocks;
    of.scales = scales.data();
    of.to = to;
    of.to_stride = stride;
    for (int64_t t = 0; t < of.n_tiles(); ++t) { disco_multiply_tile<W>(of, t); }
}
extern "C" void q4_1(const char * w, int64_t m, const char * r, int64_t n, int64_t k, float * to, int64_t stride) {
    multiply<disco_q4_1>(w, m, r, n, k, to, stride);
}
#if defined(DISCO_DOT)
extern "C" void q8_0(const char * w, int64_t m, const char * r, int64_t n, int64_t k, float * to, int64_t stride) {
    multiply<disco_q8_0>(w, m, r, n, k, to, stride);
}
#endif
#endif
"""
BLOCK = 32
KINDS = ["q4_1", "q8_0"]
SHAPES = [
    (1, 1, 1),
    (16, 1, 3),
    (33, 2, 4),
    (40, 3, 18),
    (48, 17, 13),
    (7, 40, 5),
    (64, 33, 48),
]  # weight rows, rows, blocks


def halves(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.uniform(0.001, 0.1, shape).astype(np.float16)


def packed(*parts: np.ndarray) -> np.ndarray:
    """The bytes of blocks, whose parts' last axis is a part's own."""
    return np.ascontiguousarray(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=-1))


class Case:
    """Random weights and rows of one kind, as bytes and as the numbers that they stand for."""

    def __init__(self, kind: str, seed: int, m: int, n: int, n_blocks: int) -> None:
        random = np.random.default_rng(seed)
        self.kind, self.m, self.n, self.n_blocks = kind, m, n, n_blocks
        scale, row_scale = halves(random, (m, n_blocks, 1)), halves(random, (n, n_blocks, 1))
        row = random.integers(-127, 128, (n, n_blocks, BLOCK), dtype=np.int8)
        row[0, 0] = 127  # as far as it goes
        self.numbers: FloatArray
        self.from_least: FloatArray = np.zeros((n, m))
        self.row_numbers = row_scale.astype(float) * row
        if kind == "q4_1":
            nibbles = random.integers(0, 16, (m, n_blocks, BLOCK), dtype=np.uint8)
            nibbles[0, 0] = 15
            least = -halves(random, (m, n_blocks, 1))
            total = self.row_numbers.sum(-1, keepdims=True).astype(np.float16)
            self.weights = packed(scale, least, nibbles[..., :16] | nibbles[..., 16:] << 4)
            self.rows = packed(row_scale, total, row)
            self.numbers = scale.astype(float) * nibbles
            self.from_least = np.einsum("mbi,nbi->nm", least.astype(float), total.astype(float))
        else:
            whole = random.integers(-128, 128, (m, n_blocks, BLOCK), dtype=np.int8)
            self.weights, self.rows = packed(scale, whole), packed(row_scale, row)
            self.numbers = scale.astype(float) * whole

    def by(self, library: ctypes.CDLL, rows: slice = slice(None), weights: slice = slice(None)) -> np.ndarray:
        """What the library computes of these rows and weights; what lies between results is left alone."""
        taken, by = np.ascontiguousarray(self.rows[rows]), np.ascontiguousarray(self.weights[weights])
        found = np.full((len(taken), len(by) + 5), np.nan, np.float32)
        multiply = getattr(library, self.kind)
        place, number = ctypes.c_void_p, ctypes.c_int64
        multiply.argtypes = (place, number, place, number, number, place, number)
        multiply.restype = None
        multiply(
            by.ctypes.data, len(by), taken.ctypes.data, len(taken), self.n_blocks, found.ctypes.data, found.shape[1]
        )
        assert np.isnan(found[:, len(by) :]).all()
        return found[:, : len(by)]

    def expected(self) -> FloatArray:
        """The same in 64 bits."""
        found: FloatArray = np.einsum("mbi,nbi->nm", self.numbers, self.row_numbers) + self.from_least
        return found


class Build(Protocol):
    """The header, compiled for a processor that this one can stand in for; skipped where it has no such products."""

    def __call__(self, processor: str, kind: str) -> ctypes.CDLL: ...


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiled once for each processor."""

    @cache
    def library(processor: str) -> ctypes.CDLL:
        text = f'#include "{CI / "products.h"}"\n{CALLS}'
        return compiled_for(processor, tmp_path_factory.mktemp("products"), text)

    def build(processor: str, kind: str) -> ctypes.CDLL:
        if not hasattr(library(processor), kind):
            pytest.skip(f"{processor} has none of the instructions that {kind} takes")
        return library(processor)

    return build


@pytest.mark.parametrize("processor", ["native", "haswell", "skylake-avx512", "cascadelake"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_products(built: Build, kind: str, processor: str) -> None:
    library = built(processor, kind)
    for seed, (m, n, n_blocks) in enumerate(SHAPES):
        one = Case(kind, seed, m, n, n_blocks)
        assert one.by(library) == pytest.approx(one.expected(), rel=1e-5, abs=1e-4 * n_blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_has_the_same_bits_however_many_rows_there_are(built: Build, kind: str) -> None:
    library = built("native", kind)
    for n_blocks in (1, 13, 48):
        whole = Case(kind, n_blocks, 50, 40, n_blocks)
        found = whole.by(library)
        for first, end in [(i, i + 1) for i in range(40)] + [(3, 5), (0, 16), (7, 24), (20, 40)]:
            assert np.array_equal(whole.by(library, slice(first, end)), found[first:end])
        for first, end in ((0, 1), (1, 17), (13, 50)):
            assert np.array_equal(whole.by(library, weights=slice(first, end)), found[:, first:end])


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "cascadelake"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_instructions_give_the_same_bits(built: Build, kind: str, processor: str) -> None:
    ours, other = built("native", kind), built(processor, kind)
    one = Case(kind, 1, 50, 19, 18)
    assert np.array_equal(one.by(ours), one.by(other))
