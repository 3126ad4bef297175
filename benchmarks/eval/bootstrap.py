"""Intervals by resampling (Efron 1979): how far a mean would be elsewhere with other traces or other users. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disco_daemon.arrays import FloatArray

N_RESAMPLES = 2000  # enough for the ends of a 95 % interval
SHARE = 0.95
SEED = 20241126  # the same resamples each time, so that a table can be printed again


def interval(values: Sequence[float] | FloatArray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of `values` [n], one for each independent unit; NaN of none."""
    given = np.asarray(values, dtype=np.float64)
    if given.size == 0:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(SEED).integers(0, len(given), (N_RESAMPLES, len(given)))
    low, high = np.quantile(given[drawn].mean(axis=1), ((1 - SHARE) / 2, (1 + SHARE) / 2)).tolist()
    return low, high
