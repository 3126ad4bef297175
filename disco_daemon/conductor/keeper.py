"""Opens and closes endpoints as `lifetimes` says, and knows the stage of the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..endpoints.base import Endpoint, Loader
from .lifetimes import Close, Lifetimes, Open, Phase
from .stage import Stage

log = logging.getLogger("disco.endpoints")

Effects = Sequence[Open[Endpoint] | Close[Endpoint]]


class Keeper:
    """The one owner of all endpoints' lives. `stage` is that of the next request; nothing is open before `start`."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._lives: Lifetimes[Stage, Endpoint] = Lifetimes(_alone)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the first stage's endpoints."""
        await self._carry_out(self._lives.put_on(self.stage, self.stage.endpoints.values()))

    async def put_on(self, stage: Stage, still_s: Callable[[Endpoint], float]) -> None:
        """Play on that stage from the next request on; the one before ends when the last who holds it has left.

        A model that has to wait until another one is gone from memory counts as loading; `still_s` says how long the
        others will need theirs, s. Where an endpoint cannot be opened, all stays as it was.
        """
        before = self.stage
        opening = self._lives.put_on(stage, stage.endpoints.values())
        try:
            await self._carry_out(opening)
        except BaseException:
            self._leave(stage)
            raise
        for endpoint in stage.endpoints.values():
            if self._lives.phase(endpoint) is Phase.WAITING and isinstance(endpoint, Loader):
                endpoint.expect(partial(still_s, endpoint))
        self.stage = stage
        self._leave(before)

    @contextmanager
    def held(self) -> Iterator[Stage]:
        """The stage of the next request, whose endpoints stay open until the end of this."""
        stage = self.stage
        self._lives.hold(stage)
        try:
            yield stage
        finally:
            self._leave(stage)

    async def end(self) -> None:
        """Close everything, and wait until it is."""
        self._do(self._lives.end())
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _leave(self, stage: Stage) -> None:
        self._do(self._lives.leave(stage))

    def _do(self, effects: Effects) -> None:
        """Carry them out beside what runs."""
        if effects:
            task = asyncio.create_task(self._carry_out(effects), name="endpoints")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an endpoint cannot be started", exc_info=error)

    async def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Open(endpoint=endpoint):
                    await endpoint.start()
                case Close(endpoint=endpoint):
                    await self._close(endpoint)

    async def _close(self, endpoint: Endpoint) -> None:
        """Close it; what waited for that is opened. One that fails to close is gone all the same: nobody has it."""
        try:
            await endpoint.close()
        except Exception:
            log.exception("closing the %s failed", endpoint.side)
        self._do(self._lives.closed(endpoint))


def _alone(endpoint: Endpoint) -> bool:
    """Whether it has a model in memory: two of them may not fit."""
    return isinstance(endpoint, Loader)
