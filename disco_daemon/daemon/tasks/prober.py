"""Finds out what the server says of itself, and once how it continues a partial answer, which is remembered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...clock import Clock
from ...endpoints.continuation import Profile
from ...endpoints.probe import probe
from ...endpoints.server import Server
from ...errors import DiscoError
from ...store import History
from ...system.tasks import cancel_all
from ...types import Outcome, Side, Usage

log = logging.getLogger("disco.prober")

FIRST_PAUSE, MAX_PAUSE = 8, 4096  # good answers to wait after a probe in vain, doubling: each costs the user's money
STOP_TIMEOUT_S = 5.0  # to close a question; takes a moment


class Prober:
    """Owns the probing task. The first good answer of the server starts a probe: one that is down cannot be asked.

    What the server tells without a question is asked for at the start, and after a good answer where it has not told
    it, or a day ago. `affordable` says whether a probe may cost something now; `book` is called with what a probe has
    used.
    """

    def __init__(
        self,
        server: Server,
        history: History,
        clock: Clock,
        *,
        enabled: bool,
        affordable: Callable[[], bool],
        book: Callable[[Usage], None],
    ) -> None:
        self._affordable, self._book = affordable, book
        self._server = server
        self._history = history
        self._clock = clock
        self._enabled = enabled
        self._answered = asyncio.Event()
        self._pause, self._n_waiting, self._may_probe = FIRST_PAUSE, 0, False
        self._probing: asyncio.Task[Profile | None] | None = None
        self._inquiring: asyncio.Task[None] | None = None

    def restore(self) -> None:
        """Use the verdict of an earlier probe; blocks on disk."""
        try:
            state = self._history.profile(self._server.name)
            if state is not None:
                self._server.adopt(Profile.from_json(state))
        except (DiscoError, ValueError) as e:
            log.warning("the server is probed again: %s", e)

    def observe(self, outcome: Outcome) -> None:
        """Take a finished answer; never blocks."""
        if not (self._enabled and (self._server.should_inquire or self._due)):
            return  # as after nearly all answers
        served = any(a.side is Side.SERVER and not a.censored and a.error is None for a in outcome.attempts)
        if not (served and self._affordable()):
            return
        if self._server.should_inquire:
            self._answered.set()
        if self._due:
            self._n_waiting -= 1
            if self._n_waiting <= 0:
                self._may_probe = True
                self._answered.set()

    @property
    def _due(self) -> bool:
        """Whether there is no verdict yet, or a better method could not be tried while the device was loading."""
        profile = self._server.profile
        return self._server.should_probe or (profile is not None and not profile.complete)

    async def run(self) -> None:
        """Inquire at once, and probe after good answers of the server, ever more rarely, until there is a verdict."""
        while True:
            if self._enabled and self._server.should_inquire and self._affordable():
                await self._inquire()
            if self._may_probe and self._affordable():  # checked once more: settings may have changed since
                await self._probe()
                self._n_waiting, self._pause = self._pause, min(MAX_PAUSE, 2 * self._pause)
            self._may_probe = False
            self._answered.clear()
            await self._answered.wait()

    async def stop(self) -> None:
        """End a question that is under way: when this returns, nothing more is sent."""
        for task in (self._inquiring, self._probing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task], timeout=STOP_TIMEOUT_S)

    async def _inquire(self) -> None:
        self._inquiring = asyncio.create_task(self._server.inquire(), name="inquiry")
        try:
            await asyncio.wait([self._inquiring])  # it bounds its own time
        finally:
            await cancel_all(self._inquiring)

    async def _probe(self) -> None:
        spent = Usage()
        self._probing = asyncio.create_task(probe(self._server, self._clock, spent=spent), name="probe")
        try:
            await asyncio.wait([self._probing])  # it bounds its own time
        finally:
            await cancel_all(self._probing)  # only then its whole cost is known
            self._book(spent)
        profile = None if self._probing.cancelled() else self._probing.result()
        if profile is not None:
            self._server.adopt(profile)
            self._history.save_profile(self._server.name, self._clock.wall(), profile.to_json())
