"""The log-probabilities of a logits row: those of one token, and of the likeliest ones. Pure."""

from __future__ import annotations

import math

import numpy as np

from .hidden import FloatRows


def log_probabilities(logits: FloatRows) -> FloatRows:
    """Return the logarithm of the softmax of a row, [n_vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    found: FloatRows = (wide - math.log(np.exp(wide).sum())).astype(np.float32)
    return found


def likeliest(row: FloatRows, n: int) -> list[int]:
    """Return the places of the `n` largest values, largest first; of equal ones the lowest places."""
    if n <= 0:
        return []
    n = min(n, len(row))
    least = np.partition(row, len(row) - n)[len(row) - n]
    places = np.flatnonzero(row >= least)
    found: list[int] = places[np.argsort(-row[places], kind="stable")][:n].tolist()
    return found
