"""A second request for the same answer to a server that is silent for longer than usual: its token may come sooner.

Whoever listens sees one stream. The first request that shows a token goes on, the other one is closed, and both are
accounted for. Nothing that happens to the second one is an error of the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from ..clock import Clock
from ..errors import EndpointError
from ..system.tasks import all_ended, cancel_all
from ..types import Finish, Token, Usage

log = logging.getLogger("disco.server")

ServerEvents = AsyncGenerator[Token | Finish, None]
Ask = Callable[[Usage], ServerEvents]


@dataclass(slots=True, eq=False)
class RequestAccount:
    """What became of one of two requests: its usage, and the reason why it failed; it was over at `over_at`, s.

    `at_fault`: it failed by the request's own fault, which says nothing of the server.
    """

    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    at_fault: bool = False
    over_at: float | None = None


@dataclass(slots=True, eq=False)
class Hedge:
    """An order to ask again after a silence of `after_s`, s, and the account of both, which the endpoint keeps.

    `admit` is asked then, and reserves what the second request may cost; without it nothing is sent. `sent_at` is when
    that was, by the endpoint's clock, s. With `won` the answer is the second request's, which goes `elsewhere` where
    another server is to get it.
    """

    after_s: float
    admit: Callable[[], bool]
    sent_at: float | None = None
    won: bool = False
    first: RequestAccount = field(default_factory=RequestAccount)
    second: RequestAccount = field(default_factory=RequestAccount)
    elsewhere: Ask | None = None


async def hedged(ask: Ask, usage: Usage, hedge: Hedge, clock: Clock) -> ServerEvents:
    """Yield the events of a request, or of a second one that is quicker; `usage` is that of the one that is heard.

    Both are closed on the way out, however that is. Raises the first one's EndpointError where neither shows a token.
    """
    race = _TwoRequests(ask, usage, hedge, clock)
    try:
        winner = await race.run()
        if winner is None:
            raise race.failure()
        yield winner.begun.result()
        async for event in winner.events:
            race.count()
            yield event
    finally:
        await race.close()


async def _first_of(events: ServerEvents) -> Token | Finish:
    """The first event. By itself, since an error that its task keeps holds this frame: in no cycle with the request."""
    return await anext(events)


class _Begun:
    """One request. Up to its first event a task of its own waits for it."""

    def __init__(self, events: ServerEvents, account: RequestAccount) -> None:
        self.events, self.account = events, account
        self.begun = asyncio.create_task(_first_of(events), name="a request that may be asked again")

    @property
    def has_event(self) -> bool:
        """Whether its first event is there: its task has ended, and has nothing to say that somebody has to look at."""
        return self.begun.done() and not self.begun.cancelled() and self.begun.exception() is None

    async def close(self) -> None:
        """End it: what its task has raised was looked at already, or comes too late to matter."""
        await cancel_all(self.begun)
        await self.events.aclose()


class _TwoRequests:
    """Two requests for one answer, the second after a silence of the first. Owns both, and the closing of the loser."""

    def __init__(self, ask: Ask, usage: Usage, hedge: Hedge, clock: Clock) -> None:
        self._ask, self._usage, self._hedge, self._clock = ask, usage, hedge, clock
        hedge.first.usage = usage
        self._requests = [_Begun(ask(usage), hedge.first)]
        self._closing: list[asyncio.Task[None]] = []

    async def run(self) -> _Begun | None:
        """Return the request that shows an event first, None where all have failed."""
        hedge, first = self._hedge, self._requests[0]
        await asyncio.wait([first.begun], timeout=hedge.after_s)
        if first.has_event:  # nearly always
            return first
        if not first.begun.done() and hedge.admit():
            hedge.sent_at = self._clock.now()
            again = hedge.elsewhere or self._ask
            self._requests.append(_Begun(again(hedge.second.usage), hedge.second))
        waiting = list(self._requests)
        while True:
            await asyncio.wait([one.begun for one in waiting], return_when=asyncio.FIRST_COMPLETED)
            for one in [one for one in waiting if one.begun.done()]:
                if not isinstance(error := one.begun.exception(), EndpointError):
                    self._decide(one)
                    return one
                waiting.remove(one)
                self._note(one, error)
                if not waiting:
                    return None

    def failure(self) -> BaseException:
        """Return why the first one failed: without that nobody would have been asked again.

        It is raised where nothing else holds it: what its traceback holds would have to wait for the collector.
        """
        failure = self._requests[0].begun.exception()
        assert failure is not None
        return failure

    def _decide(self, winner: _Begun) -> None:
        """Let the other request go, without waiting for it: the reader waits for this one's token."""
        hedge = self._hedge
        losers = [one for one in self._requests if one is not winner]
        for one in losers:
            failed = one.account.error is None and one.begun.done() and one.begun.exception()
            if isinstance(failed, EndpointError):  # as the other one's token came: it has not lost, it has failed
                self._note(one, failed)
            if one.account.over_at is None:
                one.account.over_at = self._clock.now()
        self._requests = [winner]
        self._closing = [asyncio.create_task(one.close(), name="closing a request that lost") for one in losers]
        if winner.account is hedge.second:
            hedge.won, hedge.first.usage = True, replace(self._usage)
            self.count()

    def _note(self, one: _Begun, error: EndpointError) -> None:
        """A request has failed: another one may still answer."""
        one.account.error, one.account.over_at = error.reason, self._clock.now()
        one.account.at_fault = error.your_fault
        if self._hedge.sent_at is not None:
            which = "first" if one.account is self._hedge.first else "second"
            log.info("the %s of two requests for one answer failed (%s)", which, error.reason)

    def count(self) -> None:
        """Put what a second request that is heard has used where the first one's was."""
        if self._hedge.won:
            for f in fields(Usage):
                setattr(self._usage, f.name, getattr(self._hedge.second.usage, f.name))

    async def close(self) -> None:
        """Close what is open, and wait for it: not for long, as closing a stream has a limit of its own."""
        requests, self._requests = self._requests, []
        for one in requests:
            if one.account.over_at is None:
                one.account.over_at = self._clock.now()
        if not self._closing and len(requests) == 1 and requests[0].has_event:  # nearly always: it needs no task
            with suppress(Exception):
                await requests[0].events.aclose()
            return
        self._closing += [asyncio.create_task(one.close(), name="closing a request") for one in requests]
        try:
            await all_ended(*self._closing)
        finally:
            self.count()
