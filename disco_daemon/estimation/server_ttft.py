"""The distribution of the next TTFT of one server and model, learned online from censored samples. Pure.

Four questions, four answers: how TTFTs are distributed (`curve`), what the last few say about the next one
(`predictor`), how often the server answers at all (`availability`), and what silence is unlike all that (`silence_s`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import BoolArray, FloatArray
from .cusum import Cusum
from .silence import Silences
from .survival import Survival, complete, heavy_tail, kaplan_meier_of_window, mixture

# Requests that count. Fewer leave the 95 % quantile to a handful of samples, more outlive the server's habits.
WINDOW = 200
# Requests after which a sample weighs half: within the window the older samples fade rather than drop out at once.
HALF_LIFE = 150.0
# Requests the prior is worth: outvoted after the first few, and at a full window about 2 % that still price the tail.
PRIOR_STRENGTH = 3.0
# Requests a curve needs before it can be contradicted, and so the fewest that a regime shift leaves.
SHIFT_KEEP = 20

# Decay a request of the three means of log TTFT: the last one or two, the last five, the last twenty.
LEVELS = np.array([0.5, 0.8, 0.95])
_KEPT: list[float] = LEVELS.tolist()  # numpy takes three times as long for three numbers
# Log TTFTs are cut this far outside their 2 % and 95 % quantiles: one stall says little about the next request.
_MARGIN = 0.1
_LOW, _HIGH = 0.02, 0.95
# Below this many samples there is nothing to regress on, and the largest sample is its own 95 % quantile.
_MIN_FIT = 20
# R2 out of sample below which the last TTFTs say nothing: without memory it is 0 to within 0.05 in a window of 200.
_LEAST_FORETOLD = 0.05
_RIDGE = 2.0  # penalty in variances of a level, so that the unit of time does not matter

# Answered requests of the availability's prior, and failed ones: a server is good until it is seen to fail.
_PRIOR_ANSWERED, _PRIOR_FAILED = 9.5, 0.5

_MAX_WINDOW = 10_000  # larger windows are mistakes: `add` would take milliseconds
_MAX_LOG = 750.0  # no log of a positive float lies beyond
_TIME, _OBSERVED, _LOG, _BEFORE = range(4)  # rows of the window
_ROWS = _BEFORE + len(LEVELS)

_FADE = 0.5 ** (1.0 / HALF_LIFE)
_UNIT_PRIOR = heavy_tail(1.0)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A linear regression of log TTFT on the three `levels`. `mean` [3] are log s; `beta` [3] have no unit."""

    mean: FloatArray
    beta: FloatArray

    @cached_property
    def foretells(self) -> bool:
        """Whether the levels say anything of the next TTFT; else every score is 0."""
        return bool(self.beta.any())

    def score(self, levels: FloatArray) -> Any:
        """Return the expected distance of the next log TTFT from its mean, [...]; `levels` [..., 3] in log s."""
        return (levels - self.mean) @ self.beta


@dataclass(frozen=True, slots=True, eq=False)
class _Blend:
    """The product limit of the window and the prior around its median; no steps are merged before a curve is wanted.

    Where the longest samples are censored the product limit ends above 0 and says no more: from there on the prior
    takes over, in proportion. Left as it is that rest would never come (lognormal TTFT, half of it censored: the
    95 % quantile came out at 2.7 times its value instead of 1.1 times, E[min(T, x)] 6 % too long instead of 3 %).
    """

    own: Survival | None
    median_s: float
    prior_share: float

    def at(self, x: float) -> float:
        """The curve's S(x); `x` in s."""
        prior = float(_UNIT_PRIOR.at(x / self.median_s))
        if self.own is None:
            return prior
        own, last = float(self.own.at(x)), float(self.own.times[-1])
        if own > 0 and x > last and (prior_left := float(_UNIT_PRIOR.at(last / self.median_s))) > 0:
            own *= prior / prior_left
        return (1.0 - self.prior_share) * own + self.prior_share * prior

    def curve(self) -> Survival:
        """The whole distribution as one step function."""
        prior = Survival(_UNIT_PRIOR.times * self.median_s, _UNIT_PRIOR.after, 0.0, 0.0)
        if self.own is None:
            return prior
        return mixture([(1.0 - self.prior_share, complete(self.own, prior)), (self.prior_share, prior)])

    def median_beyond(self, x: float) -> float:
        """The median of T given T > `x`, s; among the samples the next one, so that no curve need be built for it."""
        base, left = x, self.at(x)
        half = left / 2.0
        if self.own is not None and x < (last := float(self.own.times[-1])):
            prior = self.prior_share * _UNIT_PRIOR.at(self.own.times / self.median_s)
            reached = (1.0 - self.prior_share) * self.own.after + prior <= half
            if reached[-1]:
                return float(self.own.times[reached.argmax()])
            base, left = last, self.at(last)
        if half <= 0:
            return base
        # Beyond the samples there is only the prior, a log-logistic of shape 2: where does it fall by the factor still
        # missing? Exactly, not by its steps: those end, the waiting does not.
        missing = left / half
        return math.hypot(math.sqrt(missing) * base, math.sqrt(missing - 1.0) * self.median_s)


class ServerTtft:
    """The online estimator of one server and model: a window of (TTFT, censored), older samples fading.

    Times in s. It reads no clock: age is counted in requests.
    """

    def __init__(self, prior_median_s: float = 0.6, window: int = WINDOW, *, watchful: bool = True) -> None:
        """`prior_median_s` stands for the median TTFT until there are samples; `watchful` looks for regime shifts.

        Raises ValueError unless it is positive and `window` between 1 and 10,000.
        """
        if not (0 < prior_median_s < math.inf and 1 <= window <= _MAX_WINDOW):
            raise ValueError(f"the prior median must be positive and the window in 1..{_MAX_WINDOW}")
        self._prior_median_s = prior_median_s
        self._watchful = watchful
        self._window = window
        self._weights = 0.5 ** (np.arange(window - 1, -1, -1) / HALF_LIFE)
        # Columns are samples, oldest first; the window slides through a buffer of twice its length, so that a new
        # sample seldom moves the others.
        self._buffer = np.empty((_ROWS, 2 * window))
        self._begin = self._end = 0
        self._levels = [math.log(prior_median_s)] * len(LEVELS)
        self._cusum = Cusum()
        self._regime = 0  # samples since the present regime began
        self._shifts = 0
        self._answered = self._failed = 0.0
        self._silences = Silences()
        self._blend: _Blend | None = None
        self._curve: Survival | None = None
        self._predictor: Predictor | None = None

    def add(self, ttft_s: float, censored: bool) -> None:
        """Take the TTFT of one request or, with `censored`, the time after which it was given up.

        It counts as answered for the availability: a server that was cancelled had not failed till then. Raises
        ValueError unless the time is positive and finite.
        """
        self._learn(float(ttft_s), censored)
        if not censored:
            self._silences.add(float(ttft_s))
        self._count(answered=True)

    def add_failure(self, censored_at_s: float | None) -> None:
        """Count a failure or a time-out against the availability.

        Whether it also says something about the TTFT is the caller's choice: with a time it enters as a censored sample
        (the server was silent that long), with None (refused, broken, told to slow down) it does not. Raises ValueError
        as `add` does.
        """
        if censored_at_s is not None:
            self._learn(float(censored_at_s), censored=True)
        self._count(answered=False)

    def curve(self) -> Survival:
        """The distribution of the TTFT, s: the decayed product limit of the window and the fading prior."""
        if self._curve is None:
            self._curve = self._present_blend().curve()
        return self._curve

    def product_limit(self) -> Survival | None:
        """The decayed product limit of the window alone, s; the prior only where it is hidden. None without samples."""
        own = self._present_blend().own
        if own is None or own.after[-1] <= 0:
            return own
        prior = Survival(_UNIT_PRIOR.times * self._present_blend().median_s, _UNIT_PRIOR.after, 0.0, 0.0)
        return complete(own, prior)

    def predictor(self) -> Predictor:
        """The regression of the next log TTFT on the levels within the window; None below 20 samples."""
        if self._predictor is None:
            rows = self._rows()
            self._predictor = _regression(rows[_LOG], rows[_BEFORE:].T)
        return self._predictor

    def samples(self) -> tuple[FloatArray, BoolArray, FloatArray, FloatArray]:
        """The window, oldest first: times in s, observed flags, decay weights, the score of each before it was seen.

        Four arrays [n]; the scores are those of the present predictor.
        """
        rows = self._rows().copy()
        score: FloatArray = self.predictor().score(rows[_BEFORE:].T)
        return rows[_TIME], rows[_OBSERVED] > 0, self._weights[self._window - self.n :].copy(), score

    def availability(self) -> float:
        """The decayed share of requests that the server did not fail, in (0, 1)."""
        answered, failed = self._answered + _PRIOR_ANSWERED, self._failed + _PRIOR_FAILED
        return answered / (answered + failed)

    @property
    def silence_s(self) -> float:
        """A silence longer than this is unlike anything seen of the server, s; infinite while too little was."""
        return self._silences.bound_s

    @property
    def logs(self) -> FloatArray:
        """The log TTFTs of the window [n], log s, oldest first, a censored one's as expected. Only to read."""
        logs: FloatArray = self._rows()[_LOG]
        return logs

    @property
    def levels(self) -> FloatArray:
        """Three exponential means [3] of log TTFT, log s: what `Predictor.score` takes for the next request."""
        return np.array(self._levels)

    @property
    def n(self) -> int:
        """Samples in the window."""
        return self._end - self._begin

    @property
    def censored_share(self) -> float:
        """The share of the window's samples that are censored, whatever their age; 0 without samples."""
        return 1.0 - float(self._rows()[_OBSERVED].mean()) if self.n else 0.0

    @property
    def n_shifts(self) -> int:
        """Regime shifts found so far."""
        return self._shifts

    def to_json(self) -> dict[str, Any]:
        """The whole state in plain lists and numbers."""
        rows = self._rows()
        return {
            "prior_median_s": self._prior_median_s,
            "window": self._window,
            "ttft_s": rows[_TIME].tolist(),
            "observed": rows[_OBSERVED].astype(int).tolist(),
            "log_ttft": rows[_LOG].tolist(),
            "levels_before": rows[_BEFORE:].tolist(),
            "levels": list(self._levels),
            "cusum_sums": list(self._cusum.sums),
            "cusum_since": list(self._cusum.since),
            "regime": self._regime,
            "shifts": self._shifts,
            "answered": self._answered,
            "failed": self._failed,
            "seen_s": self._silences.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerTtft:
        """The estimator that wrote `data`. Raises ValueError where none can have written it."""
        try:
            return cls._restore(data)
        except (LookupError, TypeError) as error:
            raise ValueError(f"not the state of a TTFT estimator: {error!r}") from error

    @classmethod
    def _restore(cls, data: Mapping[str, Any]) -> ServerTtft:
        new = cls(_number(data["prior_median_s"]), _whole(data["window"]))
        new._end = n = len(data["ttft_s"])
        if n > new._window:
            raise ValueError("more samples than the window holds")
        rows = new._rows()
        rows[_TIME], rows[_OBSERVED] = _numbers(data["ttft_s"], n), _numbers(data["observed"], n)
        rows[_LOG], rows[_BEFORE:] = _numbers(data["log_ttft"], n), _numbers(data["levels_before"], len(LEVELS), n)
        new._levels = _numbers(data["levels"], len(LEVELS)).tolist()
        if np.any(rows[_TIME] <= 0) or not ((rows[_OBSERVED] == 0) | (rows[_OBSERVED] == 1)).all():
            raise ValueError("a sample is no positive time, or neither observed (1) nor censored (0)")
        if max(abs(rows[_LOG:]).max(initial=0.0), *map(abs, new._levels)) > _MAX_LOG:
            raise ValueError("no time has such a log")
        new._cusum = Cusum(_numbers(data["cusum_sums"], 2).tolist(), [_whole(data["cusum_since"][i]) for i in (0, 1)])
        new._regime, new._shifts = _whole(data["regime"]), _whole(data["shifts"])
        seen = data.get("seen_s", rows[_TIME][rows[_OBSERVED] > 0].tolist())  # older states have the window only
        new._silences = Silences(_numbers(seen, len(seen)).tolist())
        new._answered, new._failed = _number(data["answered"]), _number(data["failed"])
        if min(new._silences.to_json(), default=1.0) <= 0:
            raise ValueError("no first token comes before it is asked for")
        if min(*new._cusum.sums, new._answered, new._failed) < 0:
            raise ValueError("counts and sums must be >= 0")
        return new

    def _rows(self) -> FloatArray:
        """The window [6, n]: s, observed (0 or 1), log s as far as known, the three levels before; oldest first."""
        return self._buffer[:, self._begin : self._end]

    def _present_blend(self) -> _Blend:
        if self._blend is None:
            self._blend = self._fit()
        return self._blend

    def _fit(self) -> _Blend:
        if not self.n:
            return _Blend(None, self._prior_median_s, 1.0)
        time, observed = self._rows()[:2]
        own = kaplan_meier_of_window(time, observed, self._weights[self._window - self.n :])
        hidden = own.after[-1] > 0.5
        median = max(self._prior_median_s, own.times[-1]) if hidden else own.quantile(0.5)
        return _Blend(own, float(median), PRIOR_STRENGTH / (own.n + PRIOR_STRENGTH))

    def _learn(self, ttft_s: float, censored: bool) -> None:
        if not 0 < ttft_s < math.inf:
            raise ValueError(f"a TTFT must be positive and finite: {ttft_s!r}")
        u, log_ttft = self._judge(ttft_s, censored)
        levels = self._next_levels(log_ttft)
        self._store((ttft_s, not censored, log_ttft, *self._levels))
        self._levels = levels
        self._look_for_shift(u)
        self._blend = self._curve = self._predictor = None

    def _judge(self, ttft_s: float, censored: bool) -> tuple[float, float]:
        """Return the place of the sample in the curve so far, uniform on [0, 1] if nothing has changed; and its log."""
        blend = self._present_blend()
        left = blend.at(ttft_s)
        if censored:  # what is to come is uniform on [0, left]
            return left / 2.0, math.log(blend.median_beyond(ttft_s))
        # The middle of the step, if it fell on one: coarse clocks repeat themselves, and that is no shift.
        return (left + blend.at(math.nextafter(ttft_s, 0.0))) / 2.0, math.log(ttft_s)

    def _next_levels(self, log_ttft: float) -> list[float]:
        if not self.n:
            return [log_ttft] * len(LEVELS)
        if self.n >= _MIN_FIT and (own := self._present_blend().own) is not None:
            log_ttft = min(log_ttft, math.log(own.times[int(_HIGH * len(own.times))]) + _MARGIN)
        return [log_ttft + keep * (level - log_ttft) for keep, level in zip(_KEPT, self._levels, strict=True)]

    def _store(self, sample: tuple[float, ...]) -> None:
        if self._end == self._buffer.shape[1]:
            rows = self._rows().copy()
            self._begin, self._end = 0, rows.shape[1]
            self._rows()[:] = rows
        self._buffer[:, self._end] = sample
        self._end += 1

    def _look_for_shift(self, u: float) -> None:
        self._regime += 1
        if not self._watchful:
            self._begin = self._end - min(self.n, self._window)
            return
        # A regime must be known before it can end: its first samples are judged by a curve they are not in.
        began = self._cusum.update(u) if self._regime > SHIFT_KEEP else None
        if began is not None:
            self._regime = began
            self._shifts += 1
        # Old samples that fill up a short regime go as its own arrive.
        self._begin = self._end - min(self.n, self._window, max(SHIFT_KEEP, self._regime))

    def _count(self, *, answered: bool) -> None:
        self._answered = _FADE * self._answered + answered
        self._failed = _FADE * self._failed + (not answered)


def _regression(log_ttft: FloatArray, levels: FloatArray) -> Predictor:
    """Ridge regression of `log_ttft` [n], without its extremes, on `levels` [n, 3]; all in log s.

    It foretells nothing unless it would have done so for each sample when fitted to all others: where a server has no
    memory, what a few hundred samples seem to say makes plans worse than nothing would. These residuals are in closed
    form, r / (1 - h) with the leverage h of each sample (Allen's PRESS, Technometrics 16, 1974).
    """
    n = len(log_ttft)
    if n < _MIN_FIT:
        return Predictor(np.zeros(len(LEVELS)), np.zeros(len(LEVELS)))
    low, high = np.quantile(log_ttft, (_LOW, _HIGH))
    skipped = min(10, n // 4)  # the slow level has not settled there
    y = np.clip(log_ttft, low - _MARGIN, high + _MARGIN)[skipped:]
    mean = levels[skipped:].mean(axis=0)
    x, off = levels[skipped:] - mean, y - y.mean()
    ridge = _RIDGE * x.var(axis=0) + 1e-12  # a constant TTFT has no variance at all
    pull = np.linalg.solve(x.T @ x + np.diag(ridge), x.T)
    beta = pull @ off
    leverage = 1 / len(y) + np.einsum("ij,ji->i", x, pull)
    left, whole = (off - x @ beta) / (1 - leverage), off / (1 - 1 / len(y))
    foretold = 1 - float(left @ left) / max(float(whole @ whole), 1e-12)
    return Predictor(mean, beta if foretold > _LEAST_FORETOLD else np.zeros(len(LEVELS)))


def _numbers(value: Any, *shape: int) -> FloatArray:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"finite numbers of shape {shape} expected")
    return array.astype(np.float64)


def _number(value: Any) -> float:
    return float(_numbers(value))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a whole number >= 0 expected: {value!r}")
    return value
