"""Row grouping: whether an iteration's rows go to llama.cpp together or one by one, as measured. Pure.

Mostly together: the weights are read once for all of them. But where a row is bound by arithmetic, as a small model's
is on a CPU, there is nothing to share, and llama.cpp has other kernels for one row than for a few: with the default
model and one thread, two rows together take longer than one after the other (`benchmarks/engine/grouping.py`).

An iteration is compared only with the one just before it: a longer context or another process slows both ways.
"""

from __future__ import annotations

import statistics
from collections import deque

MOST = 7  # rows that may go one by one; with 8 llama.cpp's kernels are at their best
TRIES, NEWEST = 5, 9  # comparisons before one way is taken for the better one, and the newest that count
OTHER_EVERY = 61  # iterations; one of them goes the other way: either may have changed
FAR = 1.5  # a way that takes this many times as long is not tried again


class RowGrouping:
    """The ratios of times, one by one to together, for 2 .. MOST rows, whenever both ways followed each other."""

    __slots__ = ("_alone_s", "_last", "_n_asked", "_ratios")

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}
        self._last = (0, False, 0.0)  # rows of the iteration before, whether they went one by one, and what it took, s
        self._alone_s = 0.0  # the time of an iteration with a single row, s
        self._n_asked = 0

    def apart(self, n: int) -> bool:
        """Whether the `n` rows of the coming iteration go one by one."""
        ratios, (n_last, was_apart, last_s) = self._ratios.get(n, ()), self._last
        if len(ratios) < TRIES:
            worth_it = 1 < n <= MOST and self._alone_s and (ratios or n * self._alone_s < FAR * last_s)
            return bool(worth_it) and n_last == n and not was_apart
        ratio = statistics.median(ratios)
        self._n_asked += 1
        other = self._n_asked % OTHER_EVERY == 0 and 1 / FAR < ratio < FAR
        return (ratio < 1) is not other

    def observe(self, n: int, took_s: float, *, apart: bool) -> None:
        """Record how long the `n` rows of an iteration took in all, each of another answer."""
        n_last, was_apart, last_s = self._last
        self._last = n, apart, took_s
        if n == 1:
            self._alone_s = took_s
        elif n == n_last and apart is not was_apart:
            ratio = took_s / last_s if apart else last_s / took_s
            self._ratios.setdefault(n, deque(maxlen=NEWEST)).append(ratio)
