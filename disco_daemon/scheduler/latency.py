"""How long one iteration takes: l = c0 + c1 * n_decode + c2 * n_prefill + c3 * n_context, learned while it runs. Pure.

Andes §4 needs the latency of an iteration as a function of the batch. Recursive least squares with an exponential
window (Ljung, System Identification, ch. 11), held as an information matrix. Forgotten samples give way to what is
believed now, not to the prior: an hour without a long prompt does not unlearn the speed of prefill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray

Coefficients = tuple[float, float, float, float]

FORGET = 0.995  # a window of about 200 iterations: some seconds on a laptop
# What is left of the prior's information for ever, in samples; it holds the directions that are never tried.
FLOOR = 0.5
# Samples that the prior is worth, for each coefficient in a batch that is wholly its own.
PRIOR_WEIGHT = 2.0
# A relative error beyond this counts in proportion only (Huber 1981): one iteration in which another process had the
# processor must not be learned as a speed. After STREAK in a row it is a new speed (heat, battery, a wrong prior).
HUBER, STREAK = 0.5, 8
MOVED_KEEP = 0.2  # of what is known, at a new speed
# The batch in which each of the four parts is thought to show, to weigh the prior.
TYPICAL = np.array([1.0, 4.0, 64.0, 2048.0])
LEAST_S = 1e-6  # no iteration is predicted shorter


@dataclass(frozen=True, slots=True)
class IterationLoad:
    """What one iteration computes.

    `n_decode` sequences get a token each and read `n_context` KV cells in all; `n_prefill` prompt tokens are computed.
    """

    n_decode: int
    n_prefill: int
    n_context: int


class IterationLatency:
    """Learns the four coefficients, in s and s per unit, all >= 0; `prior` is where they begin.

    A sample counts by its relative error, so that prefill iterations of a second do not drown decode iterations of
    ten milliseconds. The first one sets the scale of the prior. Raises ValueError unless the prior is finite, >= 0 and
    not all zero, and 0 < `forget` <= 1.
    """

    __slots__ = ("_dirty", "_forget", "_info", "_outliers", "_prior_info", "_theta", "_vector", "n")

    def __init__(self, prior: Coefficients, forget: float = FORGET) -> None:
        if not 0 < forget <= 1:
            msg = f"the share kept at each sample must be in (0, 1], not {forget!r}"
            raise ValueError(msg)
        self._forget = forget
        self.begin(prior)

    def begin(self, prior: Coefficients) -> None:
        """Begin anew from this prior; what was learned is forgotten. Raises ValueError."""
        theta = np.array(prior, float)
        if theta.shape != (4,) or not (np.isfinite(theta).all() and (theta >= 0).all() and theta.any()):
            msg = f"the prior must be four finite numbers >= 0, not all zero, not {prior!r}"
            raise ValueError(msg)
        self.n = 0  # samples seen
        self._outliers: list[float] = []  # the latest samples over what was believed, if all are outliers
        self._theta: list[float] = theta.tolist()
        # A typical batch of each part alone, in units of the time it would take.
        rows = np.diag(TYPICAL / max(float(TYPICAL @ theta), LEAST_S))
        self._prior_info: FloatArray = PRIOR_WEIGHT * rows * rows
        self._info: FloatArray = self._prior_info.copy()
        self._vector: FloatArray = self._info @ theta
        self._dirty = False

    @property
    def coefficients(self) -> Coefficients:
        """c0 (s), c1 (s per decoding sequence), c2 (s per prompt token), c3 (s per KV cell read)."""
        if self._dirty:
            self._theta = _non_negative(self._info, self._vector)
            self._dirty = False
        c0, c1, c2, c3 = self._theta
        return c0, c1, c2, c3

    def observe(self, load: IterationLoad, took_s: float) -> None:
        """Learn from an iteration that went through. Raises ValueError, and learns nothing, on a time not > 0."""
        if not 0 < took_s < math.inf:
            msg = f"an iteration of {took_s!r} s"
            raise ValueError(msg)
        believed = self.predict(load.n_decode, load.n_prefill, load.n_context)
        if not self.n:
            believed = self._rescale(took_s / believed, 1.0) * believed
        error = abs(took_s - believed) / believed
        self._outliers = [*self._outliers, took_s / believed] if error > HUBER else []
        if len(self._outliers) == STREAK:
            believed = self._rescale(sorted(self._outliers)[STREAK // 2], MOVED_KEEP) * believed
            self._outliers = []
        weight = 1.0 if error <= HUBER else HUBER / error
        row = np.array((1.0, load.n_decode, load.n_prefill, load.n_context), float)
        self._fade()
        weighted = weight / max(believed, took_s) ** 2 * row
        self._info += weighted[:, None] * row
        self._vector += weighted * took_s
        self._dirty = True
        self.n += 1

    def _rescale(self, factor: float, keep: float) -> float:
        """Make all parts slower by `factor`, in proportion; what is known of them counts `keep` as much."""
        theta = np.array(self.coefficients) * factor
        self._prior_info /= factor * factor
        self._info *= keep / (factor * factor)
        self._vector = self._info @ theta
        self._theta = theta.tolist()
        return factor

    def _fade(self) -> None:
        """Weaken what is known, down to a floor of information around what is believed now."""
        lost = (1.0 - self._forget) * FLOOR / PRIOR_WEIGHT * self._prior_info
        self._info *= self._forget
        self._vector *= self._forget
        self._info += lost
        self._vector += lost @ np.array(self._theta)

    @overload
    def predict(self, n_decode: float, n_prefill: float = 0, n_context: float = 0) -> float: ...
    @overload
    def predict(
        self, n_decode: NDArray[Any], n_prefill: float | NDArray[Any] = 0, n_context: float | NDArray[Any] = 0
    ) -> FloatArray: ...
    def predict(self, n_decode: Any, n_prefill: Any = 0, n_context: Any = 0) -> Any:
        """Predict how long an iteration takes, s > 0, in the (broadcast) shape of the arguments."""
        c0, c1, c2, c3 = self.coefficients
        took = c0 + c1 * n_decode + c2 * n_prefill + c3 * n_context
        return np.maximum(took, LEAST_S) if isinstance(took, np.ndarray) else max(took, LEAST_S)


def _non_negative(info: FloatArray, vector: FloatArray) -> list[float]:
    """Least squares from the normal equations with no negative coefficient: the worst ones are put to zero in turn.

    (Lawson & Hanson, Solving Least Squares Problems, ch. 23, without the way back: it is not needed for four.)
    """
    free: Sequence[int] = range(4)
    theta = np.zeros(4)
    # One scale for all four keeps the solution well conditioned: cells count in thousands, sequences in ones.
    scale = 1.0 / np.sqrt(np.diag(info))
    scaled, target = info * scale[:, None] * scale, vector * scale
    while free:
        part = np.linalg.solve(scaled[np.ix_(free, free)], target[list(free)])
        if (part >= 0).all():
            theta[list(free)] = part
            break
        worst = int(part.argmin())
        free = [i for k, i in enumerate(free) if k != worst]
    found: list[float] = (theta * scale).tolist()
    return found
