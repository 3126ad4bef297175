"""A linear map in closed form (ridge), from sums that any number of tokens streams into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .head import Floats

Doubles = NDArray[np.float64]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # of the mean square of a feature; the best is picked on rows kept apart


@dataclass(slots=True)
class RidgeSums:
    """The sums A'A and A'B over `n` rows of features A and targets B, d x d each."""

    aa: Doubles
    ab: Doubles
    n: int = 0

    @classmethod
    def empty(cls, d: int) -> RidgeSums:
        """Return the sums of no rows."""
        return cls(np.zeros((d, d)), np.zeros((d, d)))

    def add(self, features: Floats, targets: Floats) -> None:
        """Add rows, n x d each."""
        self.aa += features.T @ features
        self.ab += features.T @ targets
        self.n += len(features)

    def map(self, ridge: float) -> Floats:
        """Return M, d x d, that minimizes |A M' - B|^2 + ridge * mean square of A * n * |M|^2.

        Raises ValueError if there are no rows.
        """
        if not self.n:
            raise ValueError("there are no rows to fit a map to")
        d = len(self.aa)
        weight = ridge * float(np.trace(self.aa)) / d
        found = np.linalg.solve(self.aa + weight * np.eye(d), self.ab)
        return np.ascontiguousarray(found.T, np.float32)


def best_map(
    sums: RidgeSums, features: Floats, labels: NDArray[np.int64], output: Floats, ridges: Sequence[float] = RIDGES
) -> tuple[Floats, float]:
    """Return the map that agrees with most `labels` of rows kept apart, and the share of them."""
    found = [
        (float(np.mean((features @ m.T @ output.T).argmax(1) == labels)), i, m)
        for i, m in enumerate(sums.map(ridge) for ridge in ridges)
    ]
    share, _, chosen = max(found, key=lambda one: one[:2])
    return chosen, share
