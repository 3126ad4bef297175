"""Whether a row of numbers gets the same bits however many rows are computed with it, by how weights are packed. Pure.

On a processor llama.cpp multiplies one row by one kernel and many rows by another. Of most packings both add up in the
same order; of the others a token that was guessed, or read again after a handoff, is not to the bit the token that was
drawn. Found with llama-cpp-python 0.3.36 on x86-64 with AVX-512, by models of each packing in batches of 1 to 70 rows;
`tests/e2e/engine/test_rounding.py` compares them on the processor at hand. `has_products` says whether llama.cpp was
compiled with our own products (`native/products.h`) and this processor has what they need: they round all rows alike,
and are the fastest for the packings that they take.
"""

from __future__ import annotations

from .gguf import Header

INTERLEAVES = "disco.segment.interleaves"  # key of a range of layers: whether the whole model's weights may be
_F32, _F16, _BF16 = 0, 1, 30
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL = 10, 11, 12, 13, 14, 20
# Matrices of them are multiplied by llamafile's kernels from two rows on; where our products are, so is a single row.
_FLOATS = frozenset({_F32, _F16, _BF16})
# Rows of these are interleaved for a kernel that takes four at a time, and rounds in another way than that for one.
_INTERLEAVED_APART = frozenset({_Q2_K, _Q4_K})
_PLAIN_APART = frozenset({_IQ4_NL})  # by llamafile's kernels, where they are not interleaved
# Of these llama.cpp multiplies eight rows and more in tiles, unless it is told not to: three to four times as fast.
TILED = frozenset({_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, 16, 17, 18, 19, 21, 22, 23, 29})
# What our products take: also Q4_0, Q4_1, Q8_0 and MXFP4.
_OURS = _FLOATS | {2, 3, 8, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL, 39}


def may_interleave(header: Header) -> bool:
    """Whether a model's weights may be interleaved where all rows are to round alike."""
    return _INTERLEAVED_APART.isdisjoint(_packings(header))


def rounds_alike(header: Header, *, has_products: bool = False) -> bool:
    """Whether there is a way to compute a model in which all rows round alike."""
    found = _packings(header, has_products=has_products)
    return not found & _FLOATS and (may_interleave(header) or not found & _PLAIN_APART)


def has_rivals(header: Header, *, has_products: bool = False) -> bool:
    """Whether llama.cpp has two fast ways to read prompts, interleaved rows and tiles: which wins, a processor says."""
    return not TILED.isdisjoint(_packings(header, "blk.", has_products=has_products))


def is_free(header: Header, *, has_products: bool = False) -> bool:
    """Whether that way reads prompts as fast as any other. Of a prompt just the last row passes the output matrix."""
    layers = _packings(header, "blk.", has_products=has_products)
    is_alike = rounds_alike(header, has_products=has_products)
    return is_alike and layers.isdisjoint(TILED | _INTERLEAVED_APART)


def _packings(header: Header, begin: str = "", *, has_products: bool = False) -> frozenset[int]:
    """Return the packings of weights that ggml's own products take, of those whose names begin so; vectors are none."""
    found = frozenset(t.packing for t in header.tensors if len(t.shape) > 1 and t.name.startswith(begin))
    return found - _OURS if has_products else found
