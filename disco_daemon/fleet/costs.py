"""What the modules of a model cost, as measured: seconds of the reference machine by batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by rows in a batch: straight between the measured sizes, and beyond the last two as they go on."""

    batches: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, batch: float) -> float:
        """Return the seconds for a batch of this many rows, which need not be whole."""
        x, y = self.batches, self.seconds
        if batch > x[-1]:
            if len(x) == 1:
                return y[0]
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            return y[-1] + max(0.0, slope) * (batch - x[-1])
        if batch <= x[0]:
            return y[0]
        i = bisect_left(x, batch)
        return y[i - 1] + (y[i] - y[i - 1]) * (batch - x[i - 1]) / (x[i] - x[i - 1])


@dataclass(frozen=True, slots=True)
class ModuleCosts:
    """Curves of the embedding, of one layer and of the output head; `call` is what any segment takes on top of them."""

    embedding: CostCurve
    layer: CostCurve
    head: CostCurve
    call: CostCurve


@dataclass(frozen=True, slots=True)
class CostSample:
    """A measured run of a segment: what it has, rows in the batch, and how long it took, s."""

    has_embedding: bool
    n_layers: int
    has_head: bool
    batch: int
    seconds: float


def fit_costs(samples: Sequence[CostSample]) -> ModuleCosts:
    """Return the curves that fit measured segments best, by least squares for each batch size.

    Raises ValueError without samples. What the segments cannot tell apart is shared among its causes.
    """
    batches = sorted({sample.batch for sample in samples})
    if not batches:
        raise ValueError("costs need samples")
    fitted = []
    for batch in batches:
        own = [sample for sample in samples if sample.batch == batch]
        parts = np.array([[one.has_embedding, one.n_layers, one.has_head, 1] for one in own], float)
        found, *_ = np.linalg.lstsq(parts, np.array([one.seconds for one in own]))
        fitted.append(np.maximum(found, 0.0))
    sizes = tuple(float(batch) for batch in batches)
    embedding, layer, head, call = (CostCurve(sizes, tuple(map(float, column))) for column in np.array(fitted).T)
    return ModuleCosts(embedding, layer, head, call)
