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
RECENT = 0.3  # how much of the latest requests' distance from the mean is expected to last; 0.15 to 0.5 differ little
FADES = 0.97  # a request to others by which that distance fades

TAIL_WEIGHT = TAIL_SHARE / CVAR_SHARE  # of the worst TAIL_SHARE in place of the worst 1 %, as in `optimal`
_READ = np.array([0.5, 0.95, 1 - TAIL_SHARE, 0.99])
_LEVEL = 1  # of `ServerTtft.levels`: the last five requests or so


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
    deviation: float  # of the latest log TTFTs from their mean
    waits_s: FloatArray  # silences after which another one might be asked
    left: FloatArray  # the chance of each of them

    @classmethod
    def of(cls, times: ServerTtft) -> MemberFigures:
        """Read them off. Raises ValueError without samples."""
        if (curve := times.product_limit()) is None:
            raise ValueError("nothing is known of it")
        low, high, start, last = curve.quantile(_READ).tolist()
        before = np.empty(len(curve.after))
        before[0], before[1:] = 1.0, curve.after[:-1]
        mean_log = float((before - curve.after) @ np.log(np.minimum(curve.times, high)))
        first = int((1.0 - curve.after).searchsorted(SOONEST - 1e-9))
        return cls(
            curve, low, high, last, float(curve.mean_below(math.inf)), start, float(curve.mean_below(start)),
            float(times.levels[_LEVEL]) - mean_log, curve.times[first:], curve.after[first:],
        )  # fmt: skip

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

    __slots__ = ("_capped", "_figures", "n_asked", "n_hedges", "n_known", "seen_at", "times")

    def __init__(self, times: ServerTtft | None = None) -> None:
        self.times = times or ServerTtft()
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

    def learn(self, ttft_s: float, *, censored: bool) -> None:
        """Take one TTFT. Raises ValueError unless it is positive and finite."""
        self.times.add(ttft_s, censored)
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

    def wait_s(self, figures: MemberFigures, other_s: float | None, kappa: float, unasked: int) -> float:
        """Return what a request to it costs the reader, s: mean and tail by its `figures`, lately, and with failures.

        With `other_s` another one is asked after its P95, whose median that is. It was not asked for `unasked`
        requests.
        """
        cap_s = math.inf if other_s is None else figures.p95_s + other_s
        if self._capped[:2] != (cap_s, kappa):
            self._capped = (cap_s, kappa, figures.cost_s(cap_s, kappa))
        lately = math.exp(RECENT * figures.deviation * FADES**unasked)
        return self._capped[2] * lately / self.times.availability()

    def to_json(self, n_requests: int) -> dict[str, Any]:
        """The state in plain lists and numbers; when it was asked last, in requests before the latest."""
        counts = {"known": self.n_known, "asked": self.n_asked, "hedges": self.n_hedges}
        return {**counts, "unasked": n_requests - self.seen_at, "times": self.times.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], n_requests: int) -> PoolMember:
        """The member that wrote `data`. Raises ValueError where none can have written it."""
        try:
            new = cls(ServerTtft.from_json(data["times"]))
            counts = [data[name] for name in ("known", "asked", "hedges", "unasked")]
        except (LookupError, TypeError) as error:
            raise ValueError(f"not what was learned of a server: {error!r}") from error
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"whole numbers >= 0 expected: {counts!r}")
        new.n_known, new.n_asked, new.n_hedges, unasked = counts
        new.seen_at = n_requests - unasked
        return new
