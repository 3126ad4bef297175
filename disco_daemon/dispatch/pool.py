"""Which of several servers is asked, and which one next where it stays silent. Pure; times in s.

Of each the distribution of its TTFT is learned from what it was asked (`estimation.server_ttft`). The one with the
least expected wait, tail and price is asked: E[T] + kappa * CVaR(T) as in `optimal`, and what the answer costs there,
in the seconds that this money is worth. While another server may be asked as well, T ends soon after that.

What is not chosen is looked at again now and then, and what is unknown is looked at first. Both together are a bounded
share of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .member import HEDGE_SAMPLES, PoolMember
from .optimal import KAPPA, TAIL_SHARE
from .share import WindowShare

USD_PER_HOUR_WAITED = 30.0  # about what an hour of work costs in the EU (Eurostat, 2023: 31.8 euro)
HEDGE_SHARE = 0.05  # of the requests and of their prompt tokens, over any 200
LOOK_SHARE = 0.1  # of the requests that go to what is unknown, or was not asked for long
LOOK_APART = 5  # requests at least between two of them
LOOK_AFTER = 40  # requests after which a server that is as good as the best is asked again …
LOOK_POWER = 3  # … and one that is twice as bad after eight times as many
LEFT_FOR_TAILS = 3  # hedges that no look takes away …
LEFT_FOR_SILENCE = 1  # … and those that are kept for a silence unlike anything seen
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
    mean_s: float | None = None
    tail_s: float | None = None
    cost_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class Pool:
    """Chooses among the members of a pool, and learns how fast each is. All methods are quick; no clock is read."""

    def __init__(
        self,
        *,
        usd_per_hour_waited: float = USD_PER_HOUR_WAITED,
        hedge_share: float = HEDGE_SHARE,
        kappa: float = KAPPA,
    ) -> None:
        if not 0 < usd_per_hour_waited < math.inf:
            raise ValueError(f"an hour of waiting is worth a positive sum, not {usd_per_hour_waited!r}")
        self.usd_per_hour_waited = usd_per_hour_waited
        self.kappa = kappa
        self.hedges = WindowShare(hedge_share)
        self.looks = WindowShare(LOOK_SHARE)
        self._members: dict[str, PoolMember] = {}
        self._looked_at = -LOOK_APART
        self._raced_at = -1  # hedges that were sent before the latest race: one more, unless nobody sends them

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
        ranked = self._ranked(up)
        if not ranked:
            return self._asked(ServerChoice(self._unknown(up) or up[0].name, is_look=True))
        look = self._look(up, ranked)
        return self._asked(look or ServerChoice(ranked[0][1].name, self._hedge(ranked)))

    def take_hedge(self, name: str, tokens: int = 1) -> bool:
        """Whether `name` may be asked as well, now that the hedge is due; counts it."""
        if not self.hedges.take(tokens):
            return False
        member = self._member(name)
        member.n_hedges += 1
        member.seen_at = self.looks.n_requests
        return True

    def observe(self, name: str, ttft_s: float, now: float, censored: bool = False) -> None:
        """Learn a TTFT of `name`; `censored`: it was given up after that time. Raises ValueError unless it is > 0."""
        self._member(name).learn(ttft_s, self.looks.n_requests, censored=censored)

    def fail(self, name: str, now: float) -> None:
        """Learn that `name` gave no answer: it is no longer unknown, and its breaker says for how long it is down."""
        self._member(name).fail()

    def weigh(self, candidates: Sequence[Candidate]) -> list[Weighed]:
        """Return what is thought of each candidate, in the same order; changes nothing."""
        costs = {candidate.name: (cost_s, member) for cost_s, candidate, member in self._ranked(candidates)}
        return [_weighed(c.name, *costs.get(c.name, (None, None))) for c in candidates]

    def to_json(self) -> dict[str, Any]:
        """What was learned of the members asked last, in plain lists and numbers."""
        latest = sorted(self._members.items(), key=lambda item: item[1].seen_at)[-MOST_SAVED:]
        return {"members": {name: member.to_json(self.looks.n_requests) for name, member in latest}}

    def state_of(self, name: str) -> dict[str, Any] | None:
        """What was learned of one member, as it stands in `to_json`; None where nothing was."""
        member = self._members.get(name)
        return None if member is None else member.to_json(self.looks.n_requests)

    def extent_of(self, name: str) -> tuple[int, ...] | None:
        """What was learned of a member, in counts: they change whenever `state_of` does. None where nothing was."""
        member = self._members.get(name)
        return None if member is None else (member.n_known, member.n_asked, member.n_hedges)

    @property
    def names(self) -> tuple[str, ...]:
        """The members of which something is known."""
        return tuple(self._members)

    def __contains__(self, name: str) -> bool:
        """Whether something is known of a member."""
        return name in self._members

    def adopt(self, other: Pool) -> None:
        """Take of another pool, which is used no more, what is known there of members that are unknown here."""
        for name, member in other._members.items():
            if name not in self._members:
                member.shift(self.looks.n_requests - other.looks.n_requests)
                self._members[name] = member

    def learned(self, data: Mapping[str, Any]) -> None:
        """Take what `to_json` wrote. Raises ValueError, and takes nothing, where nothing of the kind can be in it."""
        try:
            stored = dict(data["members"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not what was learned of servers: {error!r}") from error
        members = {str(name): PoolMember.from_json(one, self.looks.n_requests) for name, one in stored.items()}
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

    def _member(self, name: str) -> PoolMember:
        if (member := self._members.get(name)) is None:
            member = self._members[name] = PoolMember()
        return member

    def _is_known(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.is_known

    def _asked(self, choice: ServerChoice) -> ServerChoice:
        member = self._member(choice.name)
        member.n_asked += 1
        member.seen_at = self.looks.n_requests
        return choice

    def _ranked(self, up: Sequence[Candidate]) -> list[tuple[float, Candidate, PoolMember]]:
        """The known ones with their costs in s, best first.

        What another server would save is counted only while one may be asked: without hedges a tail is the reader's.
        """
        found = [(c, self._members.get(c.name)) for c in up]
        known = [(c, member, member.figures()) for c, member in found if member is not None and member.is_known]
        medians = sorted([figures.p50_s for _, _, figures in known])
        spare = medians[:2] if len(medians) > 1 and self.hedges.left > LEFT_FOR_SILENCE else None
        dearest = max([c.usd for c in up if c.usd is not None], default=0.0)
        ranked, n = [], self.looks.n_requests
        for candidate, member, figures in known:
            other_s = None if spare is None else spare[figures.p50_s == spare[0]]
            wait_s = member.wait_s(figures, other_s, self.kappa, n)
            ranked.append((wait_s + self._price_s(candidate, dearest), candidate, member))
        ranked.sort(key=_cost)
        return ranked

    def _price_s(self, candidate: Candidate, dearest: float) -> float:
        """The price in s of waiting; what nobody knows counts as the dearest that is known, $."""
        usd = dearest if candidate.usd is None else candidate.usd
        return usd * HOUR_S / self.usd_per_hour_waited

    def _unknown(self, up: Sequence[Candidate]) -> str | None:
        """The unknown one that was asked least, of these the cheapest; None if all are known."""
        unknown = [(c, self._members.get(c.name)) for c in up if not self._is_known(c.name)]
        if not unknown:
            return None
        order = [(0 if m is None else m.n_asked, math.inf if c.usd is None else c.usd) for c, m in unknown]
        return unknown[order.index(min(order))][0].name

    def _stale(self, ranked: Sequence[tuple[float, Candidate, PoolMember]]) -> str | None:
        """A server that was not asked for long; for longer, the worse it was."""
        best_s, n = ranked[0][0], self.looks.n_requests
        for cost_s, candidate, member in ranked[1:]:
            if n - member.seen_at > LOOK_AFTER * (cost_s / best_s) ** LOOK_POWER:
                return candidate.name
        return None

    def _look(
        self, up: Sequence[Candidate], ranked: Sequence[tuple[float, Candidate, PoolMember]]
    ) -> ServerChoice | None:
        """Return a choice that tells something of another server, if it is time for one.

        An unknown one answers itself, and the best one is asked where that takes too long. One that was not asked for
        long races the best one: that costs a hedge, and no time.
        """
        if self.looks.n_requests - self._looked_at < LOOK_APART:
            return None
        best = ranked[0][1].name
        if (unknown := self._unknown(up) if len(ranked) < len(up) else None) is not None and self.looks.take():
            self._looked_at = self.looks.n_requests
            return ServerChoice(unknown, self._insured(ranked[0][2], best), is_look=True)
        if (stale := self._stale(ranked)) is not None and self.looks.take():
            self._looked_at = self.looks.n_requests
            if self.hedges.left > LEFT_FOR_TAILS and self.hedges.n_taken != self._raced_at:
                self._raced_at = self.hedges.n_taken
                return ServerChoice(best, (stale, 0.0), is_look=True)
            self._raced_at = -1
            return ServerChoice(stale, self._insured(ranked[0][2], best), is_look=True)
        return None

    def _insured(self, member: PoolMember, name: str) -> tuple[str, float] | None:
        """The best one as the second, after the time that it mostly takes itself."""
        return (name, member.figures().p95_s) if self.hedges.left > 0 else None

    def _hedge(self, ranked: Sequence[tuple[float, Candidate, PoolMember]]) -> tuple[str, float] | None:
        """Whom to ask as well, and after which silence; None where that gains nothing, or none is left.

        Samples say where a tail is; what lies beyond them they do not price. So the other one is asked at the latest
        after a silence that one request in a hundred has, where it mostly takes no longer itself (of a heavy tail, what
        is to come is about what was waited); and without hedges to spare, after one unlike anything seen.
        """
        if len(ranked) < 2 or self.hedges.left <= 0:
            return None
        (_, _, chosen), (_, other, second) = ranked[:2]
        after_s = chosen.times.silence_s
        if self.hedges.left > LEFT_FOR_SILENCE and chosen.times.n >= HEDGE_SAMPLES:
            mine, other_s = chosen.figures(), second.figures().p50_s
            gains_s = mine.hedge_after_s(other_s, self.kappa)
            after_s = min(after_s, max(mine.p99_s, other_s), math.inf if gains_s is None else gains_s)
        return (other.name, after_s) if after_s < math.inf else None


def _cost(ranked: tuple[float, Candidate, PoolMember]) -> float:
    return ranked[0]


def _weighed(name: str, cost_s: float | None, member: PoolMember | None) -> Weighed:
    if cost_s is None or member is None:
        return Weighed(name)
    figures = member.figures()
    tail_s = figures.tail_from_s + (figures.mean_s - figures.below_tail_s) / TAIL_SHARE
    return Weighed(name, figures.mean_s, tail_s, cost_s, figures.p50_s, figures.p99_s)
