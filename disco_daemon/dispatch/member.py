"""What is known of one member of a pool of servers: how long it lets wait, alone or hedged. Pure; times in s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import FloatArray
from ..estimation.server_ttft import ServerTtft
from ..estimation.survival import Survival
from .optimal import CVAR_SHARE, TAIL_SHARE

KNOWN = 3  # first tokens or failures, after which a server is judged by its own record
HEDGE_SAMPLES = 20  # of fewer, no slow one among 20 was seen

# Chosen on the first halves of recorded traces, cut in two: docs/lab/evaluation.md#a-choice-among-servers.
SOONEST = 0.94  # quantile of the TTFT before which no other server is asked; of 0.93 to 0.95 little depends
HEDGE_PRICE = 0.1  # of the other one's median TTFT: what a hedge has to gain, in s, so that none is sent for nothing
STAYS = 0.985  # of a server's distance from its own mean, from one request to the pool to the next; 0.97 differs little
SWING = 0.3  # variance of that distance over the variance from request to request, log s

TAIL_WEIGHT = TAIL_SHARE / CVAR_SHARE  # of the worst TAIL_SHARE in place of the worst 1 %, as in `optimal`
_READ = np.array([0.5, 0.95, 1 - TAIL_SHARE, 0.99])
_MARGIN = 0.1  # log TTFTs beyond the 95 % quantile and so much more are cut: one stall says little of the next request
_MOST_LEVEL = 100.0  # no server is e^100 times as slow as it mostly is
_EXTREME = 3.0  # standard deviations below the mean, where they are cut as well


@dataclass(slots=True)
class ServerLevel:
    """How far a server is from its own mean lately, log s, by Kalman's filter of an autoregressive level.

    A server that was not asked for long may have become another one: then its next answer says more than one of many
    in a row. `expected` is the level, `doubt` its variance over that of a server of which nothing recent is known.
    """

    expected: float = 0.0
    doubt: float = 1.0
    at: int = 0  # the pool's request at which it was last heard of

    def now(self, n_requests: int) -> tuple[float, float]:
        """Return the level and its doubt at the pool's request `n_requests`."""
        stays = STAYS ** (n_requests - self.at)
        return stays * self.expected, 1.0 - stays * stays * (1.0 - self.doubt)

    def update(self, distance: float, n_requests: int) -> None:
        """Take the distance of one log TTFT from the mean, log s."""
        expected, doubt = self.now(max(n_requests, self.at + 1))
        gain = doubt / (doubt + 1.0 / SWING)
        self.expected, self.doubt, self.at = expected + gain * (distance - expected), (1.0 - gain) * doubt, n_requests


@dataclass(frozen=True, slots=True, eq=False)
class MemberFigures:
    """What is read off the distribution of one member once it has learned something, s."""

    curve: Survival
    p50_s: float
    p95_s: float
    p99_s: float
    mean_s: float
    tail_from_s: float  # where the worst TAIL_SHARE begins
    below_tail_s: float  # E[min(T, tail_from_s)]
    mean_log: float  # of the TTFT, log s, without the slowest
    spread_log: float  # standard deviation of the same
    waits_s: FloatArray  # silences after which another one might be asked
    left: FloatArray  # the chance of each of them

    @classmethod
    def of(cls, times: ServerTtft) -> MemberFigures:
        """Read them off. Raises ValueError without samples."""
        if (curve := times.product_limit()) is None:
            raise ValueError("nothing is known of it")
        low, high, start, last = curve.quantile(_READ).tolist()
        logs = np.minimum(times.logs, math.log(high) + _MARGIN)
        first = int((1.0 - curve.after).searchsorted(SOONEST - 1e-9))
        mean_s = float(curve.mean_below(float(curve.times[-1])))  # a censored tail may have no end: as far as is known
        return cls(
            curve, low, high, last, mean_s, start, float(curve.mean_below(start)),
            float(logs.mean()), float(logs.std()), curve.times[first:], curve.after[first:],
        )  # fmt: skip

    def distance(self, log_ttft: float) -> float:
        """Return how far a log TTFT is from the mean, without what is extreme of it."""
        most = math.log(self.p95_s) + _MARGIN - self.mean_log
        return max(min(log_ttft - self.mean_log, most), -_EXTREME * self.spread_log)

    def cost_s(self, cap_s: float, kappa: float) -> float:
        """E[X] + kappa * CVaR(X) of X = min(T, `cap_s`), s."""
        mean_s = self.mean_s if cap_s == math.inf else float(self.curve.mean_below(cap_s))
        tail_s = self.tail_from_s + (mean_s - self.below_tail_s) / TAIL_SHARE if cap_s > self.tail_from_s else cap_s
        return mean_s + kappa * TAIL_WEIGHT * tail_s

    def hedge_after_s(self, other_s: float, kappa: float) -> float | None:
        """Return the silence after which it pays to ask another one, whose median is `other_s`; None if it never does.

        That which has the least E[X] + kappa * CVaR(X), X = min(T, silence + other_s), with the price of the hedge
        where it is sent.
        """
        if not len(self.waits_s):
            return None
        mean_s = self.curve.mean_below(self.waits_s + other_s)
        tail_s = self.tail_from_s + (mean_s - self.below_tail_s) / TAIL_SHARE
        caps_s = self.waits_s + other_s
        cost_s = mean_s + kappa * TAIL_WEIGHT * np.where(caps_s > self.tail_from_s, tail_s, caps_s)
        cost_s = cost_s + HEDGE_PRICE * other_s * self.left
        best = int(cost_s.argmin())
        return float(self.waits_s[best]) if cost_s[best] < self.cost_s(math.inf, kappa) else None


class PoolMember:
    """One server and model, as its own requests have shown it."""

    __slots__ = ("_capped", "_figures", "level", "n_asked", "n_hedges", "n_known", "seen_at", "times")

    def __init__(self, times: ServerTtft | None = None) -> None:
        self.times = times or ServerTtft()
        self.level = ServerLevel()
        self.n_known = 0  # first tokens, and failures to show one
        self.n_asked = 0
        self.n_hedges = 0
        self.seen_at = 0  # the number of the request with which it was last asked
        self._figures: MemberFigures | None = None
        self._capped = (0.0, 0.0, 0.0)  # the cost for one cap and kappa, which is asked for again and again

    @property
    def is_known(self) -> bool:
        """Whether it is judged by its own record."""
        return self.n_known >= KNOWN and self.times.n > 0

    def learn(self, ttft_s: float, n_requests: int, *, censored: bool) -> None:
        """Take one TTFT at the pool's request `n_requests`. Raises ValueError unless it is positive and finite."""
        before = self._figures or (self.figures() if self.times.n else None)
        self.times.add(ttft_s, censored)
        if before is not None:
            self.level.update(before.distance(float(self.times.logs[-1])), n_requests)
        self.n_known += 1
        self._figures = MemberFigures.of(self.times)  # here, where nobody waits for it
        self._capped = (-1.0, 0.0, 0.0)

    def fail(self) -> None:
        """Count a request without an answer."""
        self.times.add_failure(None)
        self.n_known += 1

    def figures(self) -> MemberFigures:
        """What is known of it. Raises ValueError without samples."""
        if self._figures is None:
            self._figures = MemberFigures.of(self.times)
        return self._figures

    def wait_s(self, figures: MemberFigures, other_s: float | None, kappa: float, n_requests: int) -> float:
        """Return what a request to it costs the reader, s: mean and tail by its `figures`, lately, and with failures.

        With `other_s` another one is asked after its P95, whose median that is. The pool is at request `n_requests`.
        """
        cap_s = math.inf if other_s is None else figures.p95_s + other_s
        if self._capped[:2] != (cap_s, kappa):
            self._capped = (cap_s, kappa, figures.cost_s(cap_s, kappa))
        return self._capped[2] * math.exp(self.level.now(n_requests)[0]) / self.times.availability()

    def shift(self, n_requests: int) -> None:
        """Count in a pool that is `n_requests` requests further on."""
        self.seen_at += n_requests
        self.level.at += n_requests

    def to_json(self, n_requests: int) -> dict[str, Any]:
        """The state in plain lists and numbers; when it was asked last, in requests before the latest."""
        counts = {"known": self.n_known, "asked": self.n_asked, "hedges": self.n_hedges}
        level = [self.level.expected, self.level.doubt, n_requests - self.level.at]
        return {**counts, "unasked": n_requests - self.seen_at, "level": level, "times": self.times.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], n_requests: int) -> PoolMember:
        """The member that wrote `data`. Raises ValueError where none can have written it."""
        try:
            new = cls(ServerTtft.from_json(data["times"]))
            counts = [data[name] for name in ("known", "asked", "hedges", "unasked")]
            expected, doubt, unheard = data.get("level", (0.0, 1.0, 0))  # older states have none
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"not what was learned of a server: {error!r}") from error
        if any(type(count) is not int or count < 0 for count in (*counts, unheard)):
            raise ValueError(f"whole numbers >= 0 expected: {counts!r}, {unheard!r}")
        if not (type(expected) is type(doubt) is float and abs(expected) < _MOST_LEVEL and 0 <= doubt <= 1):
            raise ValueError(f"no level of a server: {expected!r}, {doubt!r}")
        new.level = ServerLevel(expected, doubt, n_requests - unheard)
        new.n_known, new.n_asked, new.n_hedges, unasked = counts
        new.seen_at = n_requests - unasked
        return new
