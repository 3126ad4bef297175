"""What a row of a decode loses on cells that are not its own: attention looks at the mask of each cell in use."""

from __future__ import annotations

import ctypes

MARK = "disco_masked_cells"  # in a llama.cpp that passes them 32 at a time (.ci/masked_cells.h)
# With the default model and one thread; as llama.cpp comes it was 1 ns on an AMD Zen 5 and 2.6 ns on an Intel Xeon.
PASS_S = 2e-9  # of each head of each layer, to pass by one cell; s
MARKED_PASS_S = 1.5e-10  # the same where MARK is


def passes_quickly(library: ctypes.CDLL) -> bool:
    """Return whether this llama.cpp, with the libraries it needs, passes hidden cells 32 at a time."""
    try:
        ctypes.c_int.in_dll(library, MARK)
    except ValueError:
        return False
    return True


def skip_s(library: ctypes.CDLL, n_heads: int, n_threads: int) -> float:
    """Estimate what a row loses on one cell that is not its own, s, with `n_heads` heads in all layers together."""
    return (MARKED_PASS_S if passes_quickly(library) else PASS_S) * n_heads / n_threads
