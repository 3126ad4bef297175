"""Several servers, played request by request: which is asked, and which as well where it stays silent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..dispatch.pool import Candidate, Pool
from ..estimation.knowledge import LEAST_S

SECONDS_APART = 10.0  # between requests, for rules that look at a clock


class ServerRule(Protocol):
    """Chooses servers by their number, and learns from what it asked."""

    def choose(self, i: int) -> tuple[int, tuple[int, float] | None]:
        """Return whom to ask request `i`, and whom as well after which silence, s."""
        ...

    def take_hedge(self, server: int) -> bool:
        """Whether that one may be asked as well, now that it is time."""
        ...

    def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
        """Learn a TTFT, or that it is longer."""
        ...


@dataclass(slots=True)
class Played:
    """What a rule made of some requests: the wait of each, s, which servers were asked, and who answered first."""

    waits_s: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    beside: list[int | None] = field(default_factory=list)  # the server that was asked as well
    answered: list[int] = field(default_factory=list)

    @property
    def hedged(self) -> list[bool]:
        """Whether a second server was asked, of each request."""
        return [other is not None for other in self.beside]


def serve(rule: ServerRule, times_s: Sequence[float], i: int, played: Played) -> None:
    """Play one request: the first token wins, and of the other server only a bound is known."""
    server, hedge = rule.choose(i)
    wait_s, answered = times_s[server], server
    hedged = hedge is not None and wait_s > hedge[1] and rule.take_hedge(hedge[0])
    if hedged and hedge is not None:
        other, after_s = hedge
        second_s = after_s + times_s[other]
        rule.observe(server, min(wait_s, second_s), i, censored=second_s < wait_s)
        ran_s = min(wait_s, second_s) - after_s
        if ran_s > LEAST_S:
            rule.observe(other, ran_s, i, censored=second_s >= wait_s)
        if second_s < wait_s:
            wait_s, answered = second_s, other
    else:
        rule.observe(server, wait_s, i, censored=False)
    played.waits_s.append(wait_s)
    played.asked.append(server)
    played.beside.append(hedge[0] if hedged and hedge is not None else None)
    played.answered.append(answered)


class PoolRule:
    """`Pool`, as the daemon runs it.

    `offers` says what request i is expected to cost at each server, $ (None: nobody knows), and how long its prompt is.
    """

    def __init__(
        self,
        n_servers: int,
        pool: Pool | None = None,
        offers: Callable[[int], tuple[Sequence[float | None], int]] | None = None,
    ) -> None:
        self.pool = pool or Pool()
        self._free = [0.0] * n_servers
        self._offers = offers
        self._tokens = 1  # of the prompt that was chosen for last

    def choose(self, i: int) -> tuple[int, tuple[int, float] | None]:
        """Ask the pool. Nobody is asked as well whose price is not known."""
        usd, self._tokens = (self._free, 1) if self._offers is None else self._offers(i)
        candidates = [Candidate(str(server), price) for server, price in enumerate(usd)]
        choice = self.pool.choose(candidates, i * SECONDS_APART, self._tokens)
        hedge = None if choice.hedge is None else (int(choice.hedge[0]), choice.hedge[1])
        return int(choice.name), None if hedge is None or usd[hedge[0]] is None else hedge

    def take_hedge(self, server: int) -> bool:
        """Ask the pool."""
        return self.pool.take_hedge(str(server), self._tokens)

    def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
        """Tell the pool."""
        self.pool.observe(str(server), ttft_s, i * SECONDS_APART, censored)
