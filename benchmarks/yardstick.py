"""A fixed piece of numpy's work, timed in the same run: what a time in microseconds is worth on this machine now."""

from __future__ import annotations

import statistics
import time

import numpy as np

N, N_REPEATS = 2_000, 301


def yardstick_us() -> float:
    """Return the median time of sorting and summing 2,000 random numbers, us: many small calls, as ours are."""
    given = np.random.default_rng(0).random(N)
    times = []
    for _ in range(N_REPEATS):
        began = time.perf_counter()
        ordered = np.sort(given)
        np.searchsorted(ordered.cumsum(), given[:64])
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
