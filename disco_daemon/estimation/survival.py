"""Distributions of times of which some are only known to be longer than what was waited. Pure.

A request cancelled at t says `TTFT > t` and no more. The product-limit estimator (Kaplan and Meier, JASA 53, 1958)
gives such samples their due: each stays "at risk" until it was lost and then hands its weight to the times beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import BoolArray, FloatArray, distinct

# Sums of weights carry rounding: a quantile must not jump to the next step for the last bits of 1 - S.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """S(x) = P(T > x) as a right-continuous step function of x in s (or tokens: any unit of the samples).

    `times` [n] are the steps, strictly ascending and >= 0, n >= 1; `after` [n] is S from each step on, non-increasing
    in [0, 1]. S is 1 before the first step and stays at `after[-1]` beyond the last one: where the longest samples are
    censored no drop is made up. `n` is the effective sample size, the sum of the weights; 0 for a prior.
    """

    times: FloatArray
    after: FloatArray
    n: float
    censored_share: float
    # Of the pieces between the steps, with the one before the first: S on each; and, from the first question on that
    # needs them, where each begins and the integral up to it. Most curves judge one sample and go.
    _level: FloatArray = field(init=False, repr=False)
    _integral: tuple[FloatArray, FloatArray] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        level = np.empty(len(self.times) + 1)
        level[0] = 1.0
        level[1:] = self.after
        object.__setattr__(self, "_level", level)

    def _pieces(self) -> tuple[FloatArray, FloatArray]:
        if self._integral is None:
            begin, area = np.zeros((2, len(self.times) + 1))
            begin[1:] = self.times
            np.cumsum((begin[1:] - begin[:-1]) * self._level[:-1], out=area[1:])
            object.__setattr__(self, "_integral", (begin, area))
        assert self._integral is not None
        return self._integral

    @overload
    def at(self, x: float) -> float: ...
    @overload
    def at(self, x: FloatArray) -> FloatArray: ...
    def at(self, x: Any) -> Any:
        """S(x), the probability of more than `x`; of the shape of `x`."""
        return self._level[self.times.searchsorted(x, "right")]

    @overload
    def mean_below(self, x: float) -> float: ...
    @overload
    def mean_below(self, x: FloatArray) -> FloatArray: ...
    def mean_below(self, x: Any) -> Any:
        """E[min(T, x)], the integral of S from 0 to `x`; of the shape of `x`, which may be infinite."""
        piece = self.times.searchsorted(x, "right")
        begin, area = self._pieces()
        level = self._level[piece]
        if isinstance(x, float):
            return area[piece] + level * (x - begin[piece]) if level > 0 else area[piece]
        # Where S is 0 nothing is added, not 0 * inf.
        rest = np.multiply(level, np.subtract(x, begin[piece]), out=np.zeros_like(level), where=level > 0)
        return area[piece] + rest

    @overload
    def quantile(self, p: float) -> float: ...
    @overload
    def quantile(self, p: FloatArray) -> FloatArray: ...
    def quantile(self, p: Any) -> Any:
        """The first step t with P(T <= t) >= `p`, of the shape of `p`; the last step where a censored tail hides it."""
        step = (1.0 - self.after).searchsorted(p - _ROUNDING)
        last = len(self.times) - 1
        return self.times[min(int(step), last) if isinstance(p, float) else np.minimum(step, last)]

    def given_beyond(self, x: float) -> Survival:
        """The distribution of T given T > `x`; times still count from 0.

        Beyond the last step nothing is known: what comes back then stays at 1, with its one step at `x`.
        """
        first = int(self.times.searchsorted(x, "right"))
        left = float(self._level[first])
        if first == len(self.times) or left <= 0:
            return Survival(np.array([x]), np.ones(1), 0.0, self.censored_share)
        return Survival(self.times[first:], self.after[first:] / left, self.n * left, self.censored_share)

    def expected_remaining(self, x: float) -> float:
        """E[T - x | T > x] with T cut at the last step; 0 from there on, where the samples know nothing."""
        left = self.at(x)
        if left <= 0 or x >= self.times[-1]:
            return 0.0
        return float(self._pieces()[1][-1] - self.mean_below(float(x))) / left


def kaplan_meier(times: ArrayLike, observed: ArrayLike, weights: ArrayLike | None = None) -> Survival:
    """The product-limit estimate of weighted samples.

    `times` [n] >= 0; `observed` [n] is False where T is only known to exceed the time; `weights` [n] >= 0, by default
    1; samples of weight 0 are left out. A censoring at the same time as an event counts as later. Every distinct time
    is a step, also where only a censoring lies and S does not change: so the last step is the longest time seen. Raises
    ValueError on empty, negative or non-finite input and where the lengths differ.
    """
    time, event = np.asarray(times, np.float64), np.asarray(observed, np.bool_)
    weight = np.ones(time.shape) if weights is None else np.asarray(weights, np.float64)
    _check_samples(time, event, weight)
    order = np.lexsort((~event, time))
    if not (time[order[0]] >= 0 and time[order[-1]] < np.inf):  # sorted: NaN comes last
        raise ValueError("times must be finite and >= 0")
    if weights is not None:
        order = _positive(weight, order)
    return _product_limit(time[order], event[order], weight[order])


def kaplan_meier_of_window(times: FloatArray, observed: FloatArray, weights: FloatArray) -> Survival:
    """`kaplan_meier` of arrays [n] that are known to be right, `observed` being 0 or 1; n >= 1."""
    order = times.argsort()
    time = times[order]
    if not (time[1:] > time[:-1]).all():  # ties: the slow way knows which comes first
        return kaplan_meier(times, observed > 0, weights)
    return _product_limit(time, observed[order], weights[order], distinct=True)


def _product_limit(time: FloatArray, event: NDArray[Any], weight: FloatArray, *, distinct: bool = False) -> Survival:
    """The estimate of ascending `time`."""
    # One factor a sample: over a tie they multiply to the usual (risk - deaths) / risk. Summed from the end, the last
    # sample's risk is its own weight, so S ends at exactly 0 where that one was observed.
    at_risk = weight[::-1].cumsum()[::-1]
    lost = weight * event
    after = np.multiply.accumulate(1.0 - lost / at_risk)
    total = float(at_risk[0])
    censored_share = 1.0 - float(np.add.reduce(lost)) / total
    if not distinct and not (ascending := time[1:] > time[:-1]).all():
        last_of_tie = np.append(ascending, True)
        time, after = time[last_of_tie], after[last_of_tie]
    return Survival(time, after, total, max(censored_share, 0.0))


def complete(own: Survival, prior: Survival) -> Survival:
    """`own`, and beyond its last step `prior` in proportion where `own` has not ended at 0."""
    last, left = own.times[-1], own.after[-1]
    tail = prior.given_beyond(float(last))
    if left <= 0 or tail.times[0] <= last:  # the prior has ended as well
        return own
    times, after = np.concatenate([own.times, tail.times]), np.concatenate([own.after, left * tail.after])
    return Survival(times, after, own.n, own.censored_share)


def mixture(parts: Sequence[tuple[float, Survival]]) -> Survival:
    """The distribution that follows each part with its weight (>= 0, normalised here); it has all their steps.

    Its `n` is the sum over the parts of weight > 0: a prior adds none. Raises ValueError where no weight is positive.
    """
    used = [(weight, part) for weight, part in parts if weight != 0]
    total = sum(weight for weight, _ in used)
    if not (0 < total < np.inf) or min(weight for weight, _ in used) < 0:
        raise ValueError("a mixture needs finite weights >= 0, one of them positive")
    times = distinct(np.concatenate([part.times for _, part in used]))
    after = np.zeros(len(times))
    for weight, part in used:
        after += weight / total * part.at(times)
    n = sum(part.n for _, part in used)
    censored = sum(part.n * part.censored_share for _, part in used)
    return Survival(times, np.minimum(after, 1.0), n, censored / n if n > 0 else 0.0)


def asked_twice(curve: Survival, after_s: float) -> Survival:
    """The distribution of min(T, after_s + T') for independent T and T' of the same curve: the sooner of two requests.

    The second one is asked `after_s` after the first, which is silent until then.
    """
    times = distinct(np.concatenate([curve.times, curve.times + after_s]))
    after = curve.at(times) * np.where(times < after_s, 1.0, curve.at(np.maximum(times - after_s, 0.0)))
    return Survival(times, after, curve.n, curve.censored_share)


def heavy_tail(median: float, shape: float = 2.0, n: int = 64) -> Survival:
    """A prior of that median: log-logistic, S = 1 / (1 + (x / median)^shape), as `n` steps of equal probability.

    Its tail (the last of 64 steps lies at 11 medians) makes every further second of waiting cost something, so that a
    budget binds even where no sample says so. Raises ValueError unless all three are positive.
    """
    if not (0 < median < np.inf and 0 < shape < np.inf and n > 0):
        raise ValueError("median, shape and n must be positive")
    below = (np.arange(n) + 0.5) / n
    times = median * (below / (1.0 - below)) ** (1.0 / shape)
    return Survival(times, 1.0 - np.arange(1, n + 1) / n, 0.0, 0.0)


def _check_samples(times: FloatArray, observed: BoolArray, weights: FloatArray) -> None:
    if times.ndim != 1 or times.shape != observed.shape or times.shape != weights.shape:
        raise ValueError(f"times, flags and weights differ in shape: {times.shape}, {observed.shape}, {weights.shape}")
    if not len(times):
        raise ValueError("no samples")


def _positive(weights: FloatArray, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """`order` without the samples of weight 0."""
    lightest, total = np.minimum.reduce(weights), np.add.reduce(weights)
    if not (lightest >= 0 and 0 < total < np.inf):
        raise ValueError("weights must be finite and >= 0, one of them positive")
    return order if lightest > 0 else order[weights[order] > 0]
