"""Attention as our build of llama.cpp has it (`native/exact_attention.h`), compiled alone and held against numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from disco_daemon.arrays import FloatArray
from disco_daemon.engine.llama.build_features import exact_attention
from tests.unit.native.test_llama_build import CI, HIDDEN, compiled

# What ggml has, as far as the header takes it.
GGML = """
#include <cmath>
#include <cstdint>
#include <immintrin.h>
enum ggml_type { GGML_TYPE_F32 = 0, GGML_TYPE_F16 = 1, GGML_TYPE_BF16 = 30 };
struct ggml_tensor {
    ggml_type type; int64_t ne[4]; size_t nb[4]; int32_t op_params[16]; ggml_tensor * src[10]; void * data;
};
typedef void (*ggml_from_float_t)(const float *, void *, int64_t);
static inline float GGML_CPU_FP16_TO_FP32(uint16_t x) { return _cvtsh_ss(x); }
#if defined(__AVX512F__)
static inline __m512 ggml_v_expf(__m512 x) {
    float all[16];
    _mm512_storeu_ps(all, x);
    for (float & one : all) { one = expf(one); }
    return _mm512_loadu_ps(all);
}
#elif defined(__AVX2__)
static inline __m256 ggml_v_expf(__m256 x) {
    float all[8];
    _mm256_storeu_ps(all, x);
    for (float & one : all) { one = expf(one); }
    return _mm256_loadu_ps(all);
}
#endif
"""
CALLS = """
#if defined(DISCO_ATTENDS)
static void to_bf16(const float * from, void * to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        static_cast<uint16_t *>(to)[i] = (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
extern "C" int attend(ggml_tensor * all, int64_t first, int64_t end) {
    for (int i = 0; i < 5; ++i) { all->src[i] = all[i + 1].data ? all + i + 1 : nullptr; }
    if (!disco_attends(all)) { return 0; }
    disco_begin_call();
    disco_attend_rows(all, first, end, to_bf16);
    return 1;
}
#endif
"""


TYPES = {
    np.float32: 0,
    np.float16: 1,
    np.uint16: 30,
}  # keys' bits of BF16 are numbers for numpy; of masks it is not asked


class Tensor(ctypes.Structure):
    """As GGML has it."""

    _fields_ = (
        ("type", ctypes.c_int), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op_params", ctypes.c_int32 * 16), ("src", ctypes.c_void_p * 10), ("data", ctypes.c_void_p),
    )  # fmt: skip


def tensor(values: np.ndarray | None) -> Tensor:
    """A tensor of an array whose first axes count least often."""
    if values is None:
        return Tensor()
    shape, strides = values.shape[::-1], values.strides[::-1]
    kind = TYPES[values.dtype.type]
    return Tensor(kind, (ctypes.c_int64 * 4)(*shape), (ctypes.c_size_t * 4)(*strides), data=values.ctypes.data)


@dataclass
class Case:
    """Heads with keys and values in cells, [cell, head, number], and rows that each see some cells."""

    asked: np.ndarray  # [token, head, number]
    keys: np.ndarray  # F16, or the bits of BF16
    values: np.ndarray
    mask: np.ndarray | None
    sinks: np.ndarray | None
    max_bias: float = 0.0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.asked.shape[-1] ** -0.5)

    def by(self, library: ctypes.CDLL, parts: int = 1) -> np.ndarray:
        """What the library computes, its rows divided among so many threads."""
        n_tokens, n_heads, _ = self.asked.shape
        found = np.full((1, n_tokens, n_heads, self.values.shape[-1]), np.nan, np.float32)
        mask = None if self.mask is None else np.ascontiguousarray(self.mask)[None, None]
        arrays = (
            found, np.moveaxis(self.asked, 0, 1)[None], np.moveaxis(self.keys, 0, 1)[None],
            np.moveaxis(self.values, 0, 1)[None], mask, None if self.sinks is None else self.sinks[None, None, None],
        )  # fmt: skip
        tensors = (Tensor * 6)(*map(tensor, arrays))
        scalars = np.array([self.scale, self.max_bias, self.softcap], np.float32).view(np.int32)
        tensors[0].op_params[:3] = scalars.tolist()
        bounds = np.linspace(0, n_tokens * n_heads, parts + 1).astype(int)
        for first, end in pairwise(bounds):
            assert library.attend(tensors, int(first), int(end))
        whole: np.ndarray = found[0]
        return whole

    def expected(self) -> FloatArray:
        """The same in 64 bits."""
        n_tokens, n_heads, _ = self.asked.shape
        share, n_log2 = n_heads // self.keys.shape[1], 1 << int(np.log2(n_heads))
        is_f16 = self.keys.dtype == np.float16
        keys = (self.keys if is_f16 else (self.keys.astype(np.uint32) << 16).view(np.float32)).astype(float)
        found = np.zeros((n_tokens, n_heads, self.values.shape[-1]))
        for token, head in np.ndindex(n_tokens, n_heads):
            shown = np.zeros(len(keys)) if self.mask is None else self.mask[token].view(np.float16).astype(float)
            m0, m1 = 2 ** (-self.max_bias / n_log2), 2 ** (-self.max_bias / 2 / n_log2)
            power = m0 ** (head + 1) if head < n_log2 else m1 ** (2 * (head - n_log2) + 1)
            slope = power if self.max_bias > 0 else 1.0
            scores = self.scale * keys[:, head // share] @ self.asked[token, head].astype(float)
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            seen = shown > -np.inf
            scores = scores[seen] + slope * shown[seen]
            sink = [] if self.sinks is None else [float(self.sinks[head])]
            top = max([*scores, *sink], default=0.0)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(np.array(sink) - top).sum()
            found[token, head] = weights @ self.values[seen, head // share].astype(float) / max(total, 1e-30)
        return found


def as_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def case(seed: int, n_tokens: int, n_cells: int, heads: tuple[int, int], numbers: int, kind: str, keys: str) -> Case:
    """Random texts, whose cells lie among each other's; some rows go on from others of their text."""
    random = np.random.default_rng(seed)
    n_heads, n_shared = heads
    owner = np.sort(random.integers(0, 4, n_cells)) if seed % 2 else random.integers(0, 4, n_cells)
    text, at = np.sort(random.integers(0, 4, n_tokens)), np.sort(random.integers(1, n_cells + 1, n_tokens))
    shown = (owner == text[:, None]) & (np.arange(n_cells) < at[:, None])
    mask = np.where(shown, 0, HIDDEN).astype(np.uint16)
    if kind == "bias":
        mask = np.where(
            shown, (-np.abs(random.standard_normal((n_tokens, n_cells)))).astype(np.float16).view(np.uint16), HIDDEN
        )
    asked = random.standard_normal((n_tokens, n_heads, numbers)).astype(np.float32)
    if keys == "BF16":
        asked = (as_bf16(asked).astype(np.uint32) << 16).view(np.float32)
    drawn = random.standard_normal((n_cells, n_shared, numbers))
    return Case(
        asked,
        as_bf16(drawn) if keys == "BF16" else drawn.astype(np.float16),
        random.standard_normal((n_cells, n_shared, numbers)).astype(np.float16),
        None if kind == "no mask" else np.ascontiguousarray(mask, np.uint16),
        random.standard_normal(n_heads).astype(np.float32) if kind == "sinks" else None,
        8.0 if kind == "bias" else 0.0,
        5.0 if kind == "softcap" else 0.0,
    )


@pytest.fixture(scope="module", params=["native", "haswell"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header, compiled for this processor, and for one without AVX-512."""
    text = f'{GGML}\n#include "{CI / "exact_attention.h"}"\n{CALLS}'
    found = compiled_for(request.param, tmp_path_factory.mktemp("attention"), text)
    if not exact_attention(found):
        pytest.skip("this processor has none of the instructions that it takes")
    found.attend.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return found


# What a processor has that code for others may lack, as the kernel names it.
FLAGS = {
    "native": {"avx2", "fma", "f16c"},
    "haswell": {"avx2", "fma", "f16c"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "cascadelake": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
}


def compiled_for(processor: str, folder: Path, text: str) -> ctypes.CDLL:
    """A library of this C++, for a processor with less than this one; skipped where this one is not such a one."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    if not FLAGS[processor] <= set(flags):
        pytest.skip(f"this processor has not what {processor} has, or it does not say so")
    return compiled(folder, text, f"-march={processor}", "-Wno-unused-function", "-Wno-uninitialized")


KINDS = ["plain", "no mask", "bias", "softcap", "sinks"]
KEYS = ["BF16", "F16"]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "numbers"), [((9, 3), 64), ((4, 4), 80), ((8, 1), 128), ((6, 2), 16)])
def test_it_is_attention(library: ctypes.CDLL, kind: str, heads: tuple[int, int], numbers: int, keys: str) -> None:
    for seed, n_tokens, n_cells in ((0, 1, 1), (1, 7, 40), (2, 5, 333), (3, 40, 200)):
        one = case(seed, n_tokens, n_cells, heads, numbers, kind, keys)
        np.testing.assert_allclose(one.by(library), one.expected(), rtol=0, atol=2e-5, equal_nan=False)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_however_many_there_are_and_wherever_its_cells_lie(
    library: ctypes.CDLL, kind: str, keys: str
) -> None:
    for seed in range(4):
        whole = case(seed, 23, 300, (9, 3), 64, kind, keys)
        found = whole.by(library)
        for parts in (2, 3, 8, 23 * 9):
            assert np.array_equal(whole.by(library, parts), found)
        for token in range(23):
            mask = None if whole.mask is None else whole.mask[token : token + 1]
            alone = Case(
                np.ascontiguousarray(whole.asked[token : token + 1]), whole.keys, whole.values, mask, whole.sinks,
                whole.max_bias, whole.softcap,
            )  # fmt: skip
            assert np.array_equal(alone.by(library)[0], found[token])
            if mask is None:
                continue
            own = mask[0] != HIDDEN  # its own cells alone, one behind the other
            packed = Case(
                alone.asked, np.ascontiguousarray(whole.keys[own]), np.ascontiguousarray(whole.values[own]),
                np.ascontiguousarray(mask[:, own]), whole.sinks, whole.max_bias, whole.softcap,
            )  # fmt: skip
            if own.any():
                assert np.array_equal(packed.by(library)[0], found[token])
            else:
                assert not found[token].any()


@pytest.mark.parametrize("keys", KEYS)
def test_heads_of_other_sizes_and_values_of_other_types_are_left_to_llama_cpp(library: ctypes.CDLL, keys: str) -> None:
    for numbers in (24, 528):
        with pytest.raises(AssertionError):
            case(1, 2, 20, (2, 2), numbers, "plain", keys).by(library)
    wide = case(1, 2, 20, (2, 2), 64, "plain", keys)
    wide.values = wide.values.astype(np.float32)
    with pytest.raises(AssertionError):
        wide.by(library)
