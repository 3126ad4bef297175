"""What is known of the members of several servers by their answers: how fast they are, and what each has cost today.

Kept on disk for those that the settings name, each under the address of its server: times of one machine say nothing
of another that has got its name. Of models that callers name there is no end; of those the pool keeps the latest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import date

from ..clock import Clock
from ..dispatch.pool import Pool
from ..errors import DiscoError
from ..store import History
from ..system.net import without_credentials
from ..types import Attempt

log = logging.getLogger("disco.servers")

SAVE_EVERY = 20  # answers; a crash forgets no more of what was learned


class LearnedServers:
    """One for all pools that follow each other; members are `SERVER/MODEL`. All state is written on the loop."""

    def __init__(self, history: History, clock: Clock) -> None:
        self.choice = Pool()
        self._history, self._clock = history, clock
        self._addresses: Mapping[str, str] = {}  # of servers by name
        self._named: tuple[str, ...] = ()  # the members that the settings name
        self._day, self._usd_today = date.min, dict[str, float]()
        self._n_asked, self._n_hedges = Counter[str](), Counter[str]()
        self._n_recorded = 0
        self._saved: dict[str, tuple[int, ...]] = {}  # how far what is known of a member was when it was saved
        self._due = asyncio.Event()

    def restored(self, addresses: Mapping[str, str], named: Collection[str]) -> tuple[Pool, dict[str, float]]:
        """Return what is kept of members that are new here, and what each has cost today, $; blocks on disk.

        Nothing changes by it: see `follow`.
        """
        found, usd_today = Pool(), dict[str, float]()
        try:
            for key in named:
                is_known = key in self.choice and self._is_at(key, addresses)
                state = None if is_known else self._history.learned(_kept_as(addresses, key))
                if state is not None:
                    found.learned({"members": {key: state}})
            if self._day == date.min:
                usd_today = self._history.usd_of_servers(self._today())
        except (DiscoError, ValueError) as e:
            log.warning("starting without some of what was learned of servers: %s", e)
        return found, usd_today

    def follow(
        self, addresses: Mapping[str, str], named: Collection[str], kept: tuple[Pool, Mapping[str, float]]
    ) -> None:
        """Go by the servers of other settings from now on, with what was `restored` for them."""
        self.keep([key for key in named if self._is_at(key, addresses)])
        self._addresses, self._named, self._saved = dict(addresses), tuple(named), {}
        found, usd_today = kept
        self.choice.adopt(found)
        if self._day == date.min:
            self._day, self._usd_today = self._today(), dict(usd_today)

    def keep(self, members: Collection[str]) -> None:
        """Forget the times of all other members, and the counts of those that no settings name."""
        kept = set(members)
        self.choice.forget([key for key in self.choice.names if key not in kept])
        kept.update(self._named)
        for counted in (self._n_asked, self._n_hedges, self._usd_today):
            for key in [key for key in counted if key not in kept]:
                del counted[key]

    def learn(self, attempt: Attempt, address: str) -> bool:
        """Learn from one start at a server that has that address; return whether it has shown a first token."""
        key = f"{attempt.server}/{attempt.model}"
        if not self._is_at(key, {str(attempt.server): address}):
            return False  # it began before a change of the settings, at another server
        if (today := self._today()) != self._day:
            self._day, self._usd_today = today, {}
        self._n_asked[key] += 1
        self._n_hedges[key] += attempt.hedge is not None
        self._usd_today[key] = self._usd_today.get(key, 0.0) + attempt.bill_usd
        is_said = attempt.error is not None and attempt.censored  # by `AnswerServer`, when it happened
        if is_said or attempt.continued or attempt.disturbed or not attempt.ttft_s > 0:
            return False
        self.choice.observe(key, attempt.ttft_s, self._clock.now(), attempt.censored)
        return not attempt.censored

    def recorded(self) -> None:
        """Count one answer, after some of which all is saved."""
        self._n_recorded += 1
        if self._n_recorded % SAVE_EVERY == 0:
            self._due.set()

    def counts(self, key: str) -> dict[str, float]:
        """Return a member's part of all starts, its second requests, and what it has cost today."""
        n_all = self._n_asked.total()
        usd = self._usd_today.get(key, 0.0) if self._day == self._today() else 0.0
        return {
            "share": self._n_asked[key] / n_all if n_all else 0.0,
            "hedges": self._n_hedges[key],
            "usd_today": usd,
        }

    async def run(self) -> None:
        """Save now and then, until cancelled; then once more."""
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                await self.save()
        finally:
            self._saved.clear()  # of those that nobody asked, for how long that was is saved now
            await self.save()

    async def save(self) -> None:
        """Hand what was learned since to the history's writer, one member at a time: each takes the loop for a while.

        Of ten members most were asked nothing meanwhile.
        """
        for key in self._named:
            if (extent := self.choice.extent_of(key)) is None or self._saved.get(key) == extent:
                continue
            if (state := self.choice.state_of(key)) is not None:
                self._saved[key] = extent
                self._history.save_learned(_kept_as(self._addresses, key), self._clock.wall(), state)
                await asyncio.sleep(0)

    def _is_at(self, key: str, addresses: Mapping[str, str]) -> bool:
        """Whether the server of a member has the address there that it has here."""
        name = key.partition("/")[0]
        return name in self._addresses and self._addresses[name] == addresses.get(name)

    def _today(self) -> date:
        return date.fromtimestamp(self._clock.wall())  # noqa: DTZ012 - the user's own day is wanted


def _kept_as(addresses: Mapping[str, str], key: str) -> str:
    """Return the name under which the history keeps a member's times."""
    name, _, model = key.partition("/")
    return f"one of several: {without_credentials(addresses[name])} {model}"
