"""Which of our changes a build of llama.cpp has, by its symbols, and what hidden cells cost there."""

from __future__ import annotations

import ctypes

MASKED_CELLS = "disco_masked_cells"  # in a llama.cpp that passes them 32 at a time (native/masked_cells.h)
EXACT_ATTENTION = "disco_exact_attention"  # the version of native/exact_attention.h; 0: not for this processor
PRODUCTS = "disco_products"  # likewise, of native/products.h
WRONG_PRODUCTS = 1  # the version that leaves numbers out where several threads compute rows of more than two dimensions
# With the default model and one thread; as llama.cpp comes it was 1 ns on an AMD Zen 5 and 2.6 ns on an Intel Xeon.
PASS_S = 2e-9  # of each head of each layer, to pass by one cell; s
MARKED_PASS_S = 1.5e-10  # the same where MASKED_CELLS is


def exact_attention(library: ctypes.CDLL) -> int:
    """Return the version of attention over many cells at a time, by which its bits may differ; 0: llama.cpp's own."""
    return _marked(library, EXACT_ATTENTION)


def changes(library: ctypes.CDLL) -> str:
    """Return what a build rounds otherwise than llama.cpp as it comes, each with its version; empty where nothing."""
    found = {"attention": exact_attention(library), "products": _marked(library, PRODUCTS)}
    return " ".join(f"{name} {version}" for name, version in found.items() if version)


def fault(library: ctypes.CDLL) -> str:
    """Return what a build computes wrong, and what is done about it; "" where it is right."""
    if _marked(library, PRODUCTS) != WRONG_PRODUCTS:
        return ""
    return "its products are from before a mend, and wrong with several threads: it computes with one"


def passes_quickly(library: ctypes.CDLL) -> bool:
    """Return whether this llama.cpp, with the libraries it needs, passes hidden cells 32 at a time."""
    return _marked(library, MASKED_CELLS) > 0


def skip_s(library: ctypes.CDLL, n_heads: int, n_threads: int) -> float:
    """Estimate what a row loses on one cell that is not its own, s, with `n_heads` heads in all layers together."""
    return (MARKED_PASS_S if passes_quickly(library) else PASS_S) * n_heads / n_threads


def _marked(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.c_int.in_dll(library, name).value
    except ValueError:
        return 0
