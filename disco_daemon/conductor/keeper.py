"""Opens and closes endpoints as `lifetimes` says, and knows the context of the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..endpoints.base import Endpoint, Loader
from .context import AnswerContext
from .lifetimes import Close, Lifetimes, Open, Phase

log = logging.getLogger("disco.endpoints")

Effects = Sequence[Open[Endpoint] | Close[Endpoint]]


class Keeper:
    """The one owner of all endpoints' lives. `context` is that of the next request; nothing is open before `start`."""

    def __init__(self, context: AnswerContext) -> None:
        self.context = context
        self._lives: Lifetimes[AnswerContext, Endpoint] = Lifetimes(_alone)
        self._tasks: set[asyncio.Task[None]] = set()

    def loaders(self) -> list[tuple[Loader, bool]]:
        """Return all that have a model in memory, and whether each still waits for that; after a reload several."""
        return [(e, phase is Phase.WAITING) for e, phase in self._lives.phases.items() if isinstance(e, Loader)]

    async def start(self) -> None:
        """Open the first context's endpoints."""
        await self._carry_out(self._lives.use(self.context, self.context.endpoints.values()))

    async def use(
        self,
        context: AnswerContext,
        still_s: Callable[[Endpoint], float],
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Use this context from the next request on; the one before ends when its last answer has.

        A model that has to wait until another one is gone from memory counts as loading; `still_s` says how long the
        others will need theirs, s. Where an endpoint cannot be opened, all stays as it was. `commit` sets what changes
        with the context, in the moment in which that does.
        """
        before = self.context
        opening = self._lives.use(context, context.endpoints.values())
        try:
            await self._carry_out(opening)
        except BaseException:  # a cancellation too; it is raised again
            self._leave(context)
            raise
        for endpoint in context.endpoints.values():
            if self._lives.phase(endpoint) is Phase.WAITING and isinstance(endpoint, Loader):
                endpoint.expect(partial(still_s, endpoint))
        commit()
        self.context = context
        self._leave(before)

    @contextmanager
    def held(self) -> Iterator[AnswerContext]:
        """Give the context of the next request; its endpoints stay open until the end of this."""
        context = self.context
        self._lives.hold(context)
        try:
            yield context
        finally:
            self._leave(context)

    async def end(self) -> None:
        """Close everything, and wait until it is."""
        self._do(self._lives.end())
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _leave(self, context: AnswerContext) -> None:
        self._do(self._lives.leave(context))

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
        """Close an endpoint, and open the one that waited for it. One that fails to close is given up all the same."""
        try:
            await endpoint.close()
        except Exception:  # whatever it was: the next one waits for its memory
            log.exception("closing the %s failed", endpoint.side)
        self._do(self._lives.closed(endpoint))


def _alone(endpoint: Endpoint) -> bool:
    """Whether it has a model in memory: two of them may not fit."""
    return isinstance(endpoint, Loader)
