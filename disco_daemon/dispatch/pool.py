"""Which of several servers is asked, and which one next where it stays silent. Pure; times in s.

Of each the distribution of its TTFT is learned from what it was asked (`estimation.server_ttft`). The one with the
least expected wait, its tail and its price is asked: E[T] + kappa * CVaR(T) as in `optimal`, and what the answer costs
there, in the seconds that this money buys back. What is not chosen is looked at again now and then, and what is unknown
is looked at first; both together are a bounded share of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..estimation.server_ttft import ServerTtft
from .optimal import KAPPA, TAIL_SHARE
from .share import WindowShare

USD_PER_HOUR_WAITED = 30.0  # about what an hour of work costs in the EU (Eurostat, 2023: 31.8 euro)
HEDGE_SHARE = 0.05  # of the requests and of their prompt tokens, over any 200
LOOK_SHARE = 0.1  # of the requests that go to what is unknown, or was not asked for long
KNOWN = 3  # first tokens after which a server is judged by its own times
LOOK_AFTER = 40  # requests after which a server that is as good as the best is asked again
HEDGE_SAMPLES = 20  # of the chosen one: of fewer, no slow one among 20 was seen
MOST_SAVED = 100  # members, the latest asked: each has some 20 KB of JSON

HOUR_S = 3600.0  # of one hour


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member of the pool that can serve this request: NAME/MODEL, what the answer is expected to cost there, $.

    `usd` is None where nobody knows the price; `down_s` is how long it must not be asked.
    """

    name: str
    usd: float | None = 0.0
    down_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """The member to ask, and perhaps another one with the silence after which it is asked as well, s.

    With `is_look` the member is asked to learn of it, not because it is thought to be the best.
    """

    name: str
    hedge: tuple[str, float] | None = None
    is_look: bool = False


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is thought of one candidate: its expected wait, its tail, and both with its price, s; None if unknown."""

    name: str
    mean_s: float | None
    tail_s: float | None
    cost_s: float | None
    p50_s: float | None = None
    p99_s: float | None = None


class _Member:
    """What is known of one member."""

    __slots__ = ("_figures", "n_asked", "n_hedges", "n_known", "seen_at", "times")

    def __init__(self, times: ServerTtft | None = None) -> None:
        self.times = times or ServerTtft()
        self.n_known = 0  # first tokens, and failures to show one
        self.n_asked = 0
        self.n_hedges = 0
        self.seen_at = 0  # the number of the request with which it was last asked
        self._figures: tuple[float, float, float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        return self.n_known >= KNOWN

    def to_json(self, n_requests: int) -> dict[str, Any]:
        """The state in plain lists and numbers; when it was asked last, in requests before the latest."""
        counts = {"known": self.n_known, "asked": self.n_asked, "hedges": self.n_hedges}
        return {**counts, "unasked": n_requests - self.seen_at, "times": self.times.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], n_requests: int) -> _Member:
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

    def learn(self, ttft_s: float, *, censored: bool) -> None:
        self.times.add(ttft_s, censored)
        self.n_known += 1
        self._figures = None

    def figures(self) -> tuple[float, float, float, float, float]:
        """Mean, CVaR, median, P95 and P99, s."""
        if self._figures is None:
            curve = self.times.curve()
            start = curve.quantile(1 - TAIL_SHARE)
            mean = curve.mean_below(math.inf)
            tail = start + (mean - curve.mean_below(start)) / TAIL_SHARE
            low, high, last = (float(curve.quantile(p)) for p in (0.5, 0.95, 0.99))
            self._figures = (float(mean), float(tail), low, high, last)
        return self._figures


class Pool:
    """Chooses among the members of a pool, and learns how fast each is. All methods are quick; no clock is read."""

    def __init__(
        self,
        *,
        usd_per_hour_waited: float = USD_PER_HOUR_WAITED,
        hedge_share: float = HEDGE_SHARE,
        kappa: float = KAPPA,
    ) -> None:
        self.usd_per_hour_waited = usd_per_hour_waited
        self.kappa = kappa
        self.hedges = WindowShare(hedge_share)
        self.looks = WindowShare(LOOK_SHARE)
        self._members: dict[str, _Member] = {}

    def choose(self, candidates: Sequence[Candidate], now: float, tokens: int = 1) -> ServerChoice:
        """Return which candidate to ask for a prompt of `tokens` tokens. Raises ValueError where there is none."""
        if not candidates:
            raise ValueError("there is no server to choose from")
        self.hedges.count(tokens)
        self.looks.count()
        up = [c for c in candidates if c.down_s <= 0]
        if not up:
            return self._asked(ServerChoice(min(candidates, key=lambda c: c.down_s).name))
        if len(up) == 1:
            return self._asked(ServerChoice(up[0].name))
        known = sorted((self._cost_s(c, up), i) for i, c in enumerate(up) if self._is_known(c.name))
        if not known:
            return self._asked(
                ServerChoice(min(up, key=lambda c: (self._n_asked(c.name), c.usd or 0.0)).name, is_look=True)
            )
        ranked = [up[i].name for _, i in known]
        look = self._look(up, known)
        if look is not None and self.looks.take():
            return self._asked(ServerChoice(look, self._hedge(ranked[0], ranked[0]), is_look=True))
        return self._asked(ServerChoice(ranked[0], self._hedge(ranked[0], ranked[1]) if len(ranked) > 1 else None))

    def take_hedge(self, name: str, tokens: int = 1) -> bool:
        """Whether `name` may be asked as well, now that the hedge is due; counts it."""
        if not self.hedges.take(tokens):
            return False
        self._member(name).n_hedges += 1
        return True

    def observe(self, name: str, ttft_s: float, now: float, censored: bool = False) -> None:
        """Learn a TTFT of `name`; `censored`: it was given up after that time. Raises ValueError unless it is > 0."""
        self._member(name).learn(ttft_s, censored=censored)

    def fail(self, name: str, now: float) -> None:
        """Learn that `name` gave no answer: it is no longer unknown, and its breaker says for how long it is down."""
        member = self._member(name)
        member.times.add_failure(None)
        member.n_known += 1

    def weigh(self, candidates: Sequence[Candidate]) -> list[Weighed]:
        """Return what is thought of each candidate, in the same order; changes nothing."""
        return [self._weighed(c, candidates) for c in candidates]

    def to_json(self) -> dict[str, Any]:
        """What was learned of the members asked last, in plain lists and numbers."""
        latest = sorted(self._members.items(), key=lambda item: item[1].seen_at)[-MOST_SAVED:]
        return {"members": {name: member.to_json(self.looks.n_requests) for name, member in latest}}

    def learned(self, data: Mapping[str, Any]) -> None:
        """Take what `to_json` wrote. Raises ValueError, and takes nothing, where nothing of the kind can be in it."""
        try:
            stored = dict(data["members"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not what was learned of servers: {error!r}") from error
        members = {str(name): _Member.from_json(one, self.looks.n_requests) for name, one in stored.items()}
        self._members.update(members)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], **settings: float) -> Pool:
        """The pool that wrote `data`, with these settings. Raises ValueError where none can have written it."""
        new = cls(**settings)
        new.learned(data)
        return new

    def forget(self, names: Iterable[str]) -> None:
        """Drop what was learned of members that are no longer in the settings."""
        for name in names:
            self._members.pop(name, None)

    # --- choosing -------------------------------------------------------------------------------------------------

    def _member(self, name: str) -> _Member:
        return self._members.setdefault(name, _Member()) if name not in self._members else self._members[name]

    def _is_known(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.is_known

    def _n_asked(self, name: str) -> int:
        member = self._members.get(name)
        return 0 if member is None else member.n_asked

    def _asked(self, choice: ServerChoice) -> ServerChoice:
        member = self._member(choice.name)
        member.n_asked += 1
        member.seen_at = self.looks.n_requests
        return choice

    def _cost_s(self, candidate: Candidate, among: Sequence[Candidate]) -> float:
        mean_s, tail_s, *_ = self._members[candidate.name].figures()
        return mean_s + self.kappa * tail_s + self._price_s(candidate, among)

    def _price_s(self, candidate: Candidate, among: Sequence[Candidate]) -> float:
        """The price in s of waiting; what nobody knows counts as the dearest that is known."""
        usd = candidate.usd
        if usd is None:
            usd = max((c.usd for c in among if c.usd is not None), default=0.0)
        return usd * HOUR_S / self.usd_per_hour_waited if self.usd_per_hour_waited > 0 else usd * HOUR_S

    def _weighed(self, candidate: Candidate, among: Sequence[Candidate]) -> Weighed:
        if not self._is_known(candidate.name):
            return Weighed(candidate.name, None, None, None)
        mean_s, tail_s, p50_s, _, p99_s = self._members[candidate.name].figures()
        return Weighed(candidate.name, mean_s, tail_s, self._cost_s(candidate, among), p50_s, p99_s)

    def _look(self, up: Sequence[Candidate], known: Sequence[tuple[float, int]]) -> str | None:
        """Return the member to look at: an unknown one, or one that was not asked for long; None if there is none."""
        unknown = [c for c in up if not self._is_known(c.name)]
        if unknown:
            return min(unknown, key=lambda c: (self._n_asked(c.name), c.usd or 0.0)).name
        best_s, now = known[0][0], self.looks.n_requests
        for cost_s, i in known[1:]:
            if now - self._members[up[i].name].seen_at > LOOK_AFTER * cost_s / best_s:
                return up[i].name
        return None

    def _hedge(self, by: str, other: str) -> tuple[str, float] | None:
        """Return whom to ask as well, and after which silence: as long as in HEDGE_SHARE of the answers of `by`."""
        member = self._members[by]
        if self.hedges.left <= 0 or member.times.n < HEDGE_SAMPLES:
            return None
        return other, member.figures()[3]
