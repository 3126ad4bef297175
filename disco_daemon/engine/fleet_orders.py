"""Orders to an engine that is a fleet's home: where layers lie, and how many answers run at a time."""

from __future__ import annotations

import asyncio

from . import wire
from .channel import RequestChannel
from .inbox import EngineGone

MOVE_TIMEOUT_S = 120.0  # for a move: hosts have to start, and to load what may be gigabytes from a disk
BREAK_OFF_TIMEOUT_S = 10.0  # for the report of one that was broken off: an iteration may be under way


class FleetOrders:
    """The orders in force, for all lives of the engine: the next one begins with the latest `ranges`, and the limit.

    All mutable state: these two.
    """

    def __init__(self, channel: RequestChannel, ranges: tuple[wire.RangeFile, ...]) -> None:
        self._channel = channel
        self.ranges = ranges
        self._limit: wire.LimitAnswers | None = None

    def begin(self) -> None:
        """Let a new life of the engine have the limit. Raises EngineGone."""
        if self._limit is not None:
            self._channel.write(self._limit)

    async def move(self, ranges: tuple[wire.RangeFile, ...]) -> wire.LayersMoved:
        """Let the layers lie as in `ranges`, whose files are there; return what came of it.

        Raises EngineGone if the engine ends meanwhile, and then layers lie as before.
        """
        with self._channel.inbox() as (request_id, inbox):
            inbox.idle = True  # silence is no hang: a host may be loading for long
            self._channel.write(wire.MoveLayers(id=request_id, ranges=ranges))
            try:
                async with asyncio.timeout(MOVE_TIMEOUT_S):
                    reply = await inbox.replies.get()
            except TimeoutError:
                reason = f"it took more than {MOVE_TIMEOUT_S:g} s"
                self._channel.write(wire.BreakOffMove(id=request_id, reason=reason))
                try:
                    async with asyncio.timeout(BREAK_OFF_TIMEOUT_S):
                        reply = await inbox.replies.get()
                except TimeoutError:
                    raise EngineGone("the engine does not say what became of a move of layers") from None
        match reply:
            case EngineGone():
                raise EngineGone(str(reply))
            case wire.LayersMoved(error=error):
                if not error:
                    self.ranges = ranges
                return reply
            case wire.Failed(message=message):
                return wire.LayersMoved(id=request_id, error=message)
            case other:
                raise TypeError(f"unexpected {type(other).__name__}")

    def limit_answers(self, n_answers: int, *, offload: bool, is_ready: bool) -> None:
        """Let so many answers generate at a time, 0 = as many as fit; those that wait may leave the KV cache.

        An engine that is not ready goes by it from its next life on. Raises EngineGone.
        """
        self._limit = wire.LimitAnswers(id="limit", n_answers=n_answers, offload=offload)
        if is_ready:
            self._channel.write(self._limit)
