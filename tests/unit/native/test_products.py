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
        const char * weights, int64_t m, const char * rows, int64_t n, int64_t n_blocks, float * to, int64_t stride,
        int placed) {
    std::vector<float> scales(W::SCALES*n*n_blocks);
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
    std::vector<float *> places;
    for (int64_t row = 0; row < n; ++row) { places.push_back(to + (n - 1 - row)*stride); }
    if (placed) { // as experts' are: the last row first, and other weights behind these
        of.to = nullptr;
        of.places = places.data();
        of.after = weights;
    }
    for (int64_t t = 0; t < of.n_tiles(); ++t) { disco_multiply_tile<W>(of, t); }
}
#define CALL(kind) \\
    extern "C" void kind(                                                                           \\
            const char * w, int64_t m, const char * r, int64_t n, int64_t k, float * to, int64_t stride, int at) { \\
        multiply<disco_##kind>(w, m, r, n, k, to, stride, at); \\
    }
CALL(q4_0) CALL(q4_1) CALL(q8_0) CALL(iq4_nl) CALL(mxfp4) CALL(q4_k) CALL(q5_k) CALL(q6_k)
extern "C" void pack_k(const float * from, char * to, int64_t n) { disco_pack_k(from, to, n); }
#endif
"""
BLOCK = 32
KINDS = ["q4_0", "q4_1", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k"]
TABLES = {
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "q4_0": range(-8, 8),
}
SHAPES = [
    (1, 1, 1),
    (16, 1, 3),
    (33, 2, 4),
    (40, 3, 18),
    (48, 17, 13),
    (7, 40, 5),
    (64, 33, 48),
    (20, 1, 65),
    (33, 2, 150),
]  # weight rows, rows, blocks


def halves(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.uniform(0.001, 0.1, shape).astype(np.float16)


def packed(*parts: np.ndarray) -> np.ndarray:
    """The bytes of blocks, whose parts' last axis is a part's own."""
    return np.ascontiguousarray(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=-1))


def six_bits(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Eight numbers of six bits, and eight others, in twelve bytes."""
    ends = [each[..., :4] | each[..., 4:] >> 4 << 6 for each in (first, second)]
    return np.concatenate([*ends, first[..., 4:] & 15 | (second[..., 4:] & 15) << 4], axis=-1)


class Case:
    """Random weights and rows of one kind, as bytes and as the numbers that they stand for."""

    def __init__(self, kind: str, seed: int, m: int, n: int, n_blocks: int) -> None:
        self.kind, self.m, self.n, self.n_blocks = kind, m, n, n_blocks
        self._random = np.random.default_rng(seed)
        self.from_least: FloatArray = np.zeros((n, m))
        self.numbers: FloatArray
        block = 256 if kind.endswith("_k") else BLOCK
        self._row = self._random.integers(-127, 128, (n, n_blocks, block), dtype=np.int8)
        self._row[0, 0], self._row[-1, -1] = 127, -127  # as far as it goes
        self._row_scale = halves(self._random, (n, n_blocks, 1))
        self._scale = halves(self._random, (m, n_blocks, 1))
        self.row_numbers = self._row_scale.astype(float) * self._row
        self.rows = packed(self._row_scale, self._row)
        if block == 256:
            self._of_256()
        else:
            self._of_32()

    def _whole(self, end: int) -> np.ndarray:
        """Whole numbers of weights below `end`; a block each as far as it goes."""
        found = self._random.integers(0, end, (self.m, self.n_blocks, self._row.shape[-1]), dtype=np.uint8)
        found[0, 0], found[-1, -1] = end - 1, 0
        return found

    def _of_32(self) -> None:
        scale = self._scale.astype(float)
        if self.kind == "q8_0":
            whole = self._whole(256).view(np.int8)
            self.weights, self.numbers = packed(self._scale, whole), scale * whole
            return
        nibbles = self._whole(16)
        both = nibbles[..., :16] | nibbles[..., 16:] << 4
        if self.kind == "q4_1":
            least = -halves(self._random, scale.shape)
            total = self.row_numbers.sum(-1, keepdims=True).astype(np.float16)
            self.weights = packed(self._scale, least, both)
            self.rows = packed(self._row_scale, total, self._row)
            self.numbers = scale * nibbles
            self.from_least = np.einsum("mbi,nbi->nm", least.astype(float), total.astype(float))
            return
        parts = self._scale
        if self.kind == "mxfp4":
            parts = self._random.integers(0, 128, scale.shape, dtype=np.uint8)
            parts[0, 0] = 1  # less than 32 bits say with all their precision
            scale = 2.0 ** (parts.astype(float) - 128)
        self.weights, self.numbers = packed(parts, both), scale * np.array(TABLES[self.kind])[nibbles]

    def _of_256(self) -> None:
        self._scale = (self._scale / np.float16(64)).astype(np.float16)
        each = self._row.reshape(self.n, self.n_blocks, 16, 16).sum(-1, dtype=np.int16)
        self.rows = packed(self._row_scale.astype(np.float32), self._row, each)
        scale, shape = self._scale.astype(float), (self.m, self.n_blocks, 8)
        if self.kind == "q6_k":
            whole = self._whole(64)
            signed = self._random.integers(-128, 128, (self.m, self.n_blocks, 16), dtype=np.int8)
            by = whole.reshape(self.m, self.n_blocks, 2, 4, 32)
            lower = by[..., :2, :] & 15 | (by[..., 2:, :] & 15) << 4
            upper = np.asarray(np.sum([by[..., i, :] >> 4 << 2 * i for i in range(4)], 0, np.uint8))
            flat = (self.m, self.n_blocks, -1)
            self.weights = packed(lower.reshape(flat), upper.reshape(flat), signed, self._scale)
            self.numbers = scale * np.repeat(signed, 16, -1) * (whole.astype(float) - 32)
            return
        scales, leasts = (self._random.integers(0, 64, shape, dtype=np.uint8) for _ in range(2))
        scale_of_leasts = (halves(self._random, (self.m, self.n_blocks, 1)) / np.float16(8)).astype(np.float16)
        whole = self._whole(32 if self.kind == "q5_k" else 16)
        by = whole.reshape(self.m, self.n_blocks, 4, 2, 32)
        lower = (by[..., 0, :] & 15 | (by[..., 1, :] & 15) << 4).reshape(self.m, self.n_blocks, 128)
        fifth = np.asarray(np.sum([by[..., i // 2, i % 2, :] >> 4 << i for i in range(8)], 0, np.uint8))
        begin = (self._scale, scale_of_leasts, six_bits(scales, leasts))
        self.weights = packed(*begin, fifth, lower) if self.kind == "q5_k" else packed(*begin, lower)
        least = scale_of_leasts.astype(float) * leasts
        self.numbers = scale * np.repeat(scales, 32, -1) * whole - np.repeat(least, 32, -1)

    def allowance(self) -> FloatArray:
        """What rounding may do: so much of all amounts together."""
        found: FloatArray = np.einsum("mbi,nbi->nm", abs(self.numbers), abs(self.row_numbers)) + abs(self.from_least)
        return 1e-6 * found + 1e-30

    def by(
        self, library: ctypes.CDLL, rows: slice = slice(None), weights: slice = slice(None), *, is_placed: bool = False
    ) -> np.ndarray:
        """What the library computes of these rows and weights; what lies between results is left alone.

        With `is_placed` each row's place is named, and the last row's comes first.
        """
        taken, by = np.ascontiguousarray(self.rows[rows]), np.ascontiguousarray(self.weights[weights])
        found = np.full((len(taken), len(by) + 5), np.nan, np.float32)
        multiply = getattr(library, self.kind)
        place, number = ctypes.c_void_p, ctypes.c_int64
        multiply.argtypes = (place, number, place, number, number, place, number, ctypes.c_int)
        multiply.restype = None
        multiply(
            by.ctypes.data, len(by), taken.ctypes.data, len(taken), self.n_blocks, found.ctypes.data, found.shape[1],
            is_placed,
        )  # fmt: skip
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
        text = f'#include "{CI / "k_products.h"}"\n{CALLS}'
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
        assert (abs(one.by(library) - one.expected()) <= one.allowance()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_has_the_same_bits_however_many_rows_there_are(built: Build, kind: str) -> None:
    library = built("native", kind)
    for n_blocks in (1, 13, 48, 150):
        n = 40 if n_blocks < 100 else 6  # 150 are taken in stretches where there is a single row
        whole = Case(kind, n_blocks, 50, n, n_blocks)
        found = whole.by(library)
        for first, end in [(i, i + 1) for i in range(n)] + [(3, 5), (0, 16), (7, 24), (20, 40)]:
            assert np.array_equal(whole.by(library, slice(first, end)), found[first:end])
        for first, end in ((0, 1), (1, 17), (13, 50)):
            assert np.array_equal(whole.by(library, weights=slice(first, end)), found[:, first:end])


@pytest.mark.parametrize("processor", ["native", "haswell"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_wherever_they_are_written_and_whatever_is_read_next(
    built: Build, kind: str, processor: str
) -> None:
    library = built(processor, kind)
    for seed, (m, n, n_blocks) in enumerate([(100, 1, 2), (33, 2, 4), (40, 7, 3), (40, 1, 150)]):
        one = Case(kind, seed, m, n, n_blocks)
        assert np.array_equal(one.by(library, is_placed=True)[::-1], one.by(library))


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "cascadelake"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_instructions_give_the_same_bits(built: Build, kind: str, processor: str) -> None:
    ours, other = built("native", kind), built(processor, kind)
    for m, n, n_blocks in ((50, 19, 18), (20, 1, 150)):
        one = Case(kind, 1, m, n, n_blocks)
        assert np.array_equal(one.by(ours), one.by(other))


@pytest.mark.parametrize("processor", ["native", "haswell", "skylake-avx512"])
def test_rows_for_k_weights_are_packed_to_the_bits_of_one_number_after_the_other(built: Build, processor: str) -> None:
    library, random = built(processor, "pack_k"), np.random.default_rng(3)
    rows = random.normal(0, 1, (40, 256)).astype(np.float32)
    rows[1], rows[2], rows[3] = 0, np.round(rows[2], 1), rows[3] * np.float32(1e-40)
    rows[4] = np.resize([0.5, -1.5, 2.5, -63.5, 64.5, 127, -127], 256)  # halves, and two that are farthest from 0
    rows[5] = -rows[4]
    rows[6:20] *= np.exp2(random.integers(-60, 60, (14, 1))).astype(np.float32)
    found = np.full((len(rows), 292), 0xAA, np.uint8)
    library.pack_k.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    library.pack_k.restype = None
    library.pack_k(rows.ctypes.data, found.ctypes.data, rows.size)
    with np.errstate(all="ignore"):
        farthest = rows[np.arange(len(rows)), abs(rows).argmax(1)][:, None]
        factor = np.float32(-127) / farthest
        whole = np.where(np.isfinite(factor), np.rint(factor * rows), 0).astype(np.int8)
        scale = np.where(farthest == 0, np.float32(0), np.float32(1) / factor)
    expected = packed(scale, whole, whole.reshape(len(rows), 16, 16).sum(-1, dtype=np.int16))
    assert np.array_equal(found, expected)
