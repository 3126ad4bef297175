"""The requests under way: a bounded number of places, and what is done from outside to those that have one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..endpoints.base import Endpoint
from ..errors import RequestError, Unavailable
from ..types import OWNER, Caller, Delivery, Side
from .answer_run import AnswerRun
from .embedding import EmbeddingRun

RESTART_S = 10.0  # until a daemon that is being stopped is back, if somebody starts it again
GIVE_UP_S = 3.0  # for telling it to all readers; one that does not read is not waited for
MAX_IN_FLIGHT = 512  # answers; each holds a connection on either side, and file descriptors end near 1,024
FULL_S = 1.0  # the Retry-After where MAX_IN_FLIGHT are under way: one of them ends in a moment
CONFINE_S = 2.0  # for closing what the server is not to get any more; takes milliseconds


@dataclass(slots=True)
class InFlight:
    """The requests that are counted, answered or embedded; its length is the number of places taken.

    State besides: `answering` and `embedding`, those under way by request id; `n_served`; `closing`, which is set when
    no more are taken; and `revoked`, the ids of keys that nothing is answered any more.
    """

    answering: dict[str, AnswerRun] = field(default_factory=dict)
    embedding: dict[str, EmbeddingRun] = field(default_factory=dict)
    n_served: int = 0
    closing: bool = False
    revoked: set[str] = field(default_factory=set)
    _tasks: dict[str, asyncio.Task[object]] = field(default_factory=dict)
    _n_taken: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return self._n_taken

    # --- places --------------------------------------------------------------------------------------------------

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place, before any waiting. Raises Unavailable."""
        self.check_open()
        if self._n_taken >= MAX_IN_FLIGHT:
            msg = f"{MAX_IN_FLIGHT} requests are being answered already; try again later"
            raise Unavailable(msg, retry_after_s=FULL_S)
        self._n_taken += 1
        try:
            yield
        finally:
            self._n_taken -= 1
            self._ended.set()

    @contextmanager
    def running(self, request_id: str, answer_run: AnswerRun) -> Iterator[None]:
        """Let an answer be steered from outside until it has ended."""
        self.answering[request_id] = answer_run
        if (task := asyncio.current_task()) is not None:
            self._tasks[request_id] = task
        try:
            yield
        finally:
            del self.answering[request_id]
            self._tasks.pop(request_id, None)
            self.n_served += 1

    def check_open(self, caller: Caller = OWNER) -> None:
        """Raise Unavailable if the daemon is being stopped, RequestError (401) if the key that asks was revoked."""
        if self.closing:
            raise _stopping("the daemon is being stopped; ask again when it is back")
        if caller.key_id in self.revoked:
            raise _revoked(caller)

    # --- from outside --------------------------------------------------------------------------------------------

    async def drain(self, patience_s: float) -> int:
        """Take no more requests, and let running answers end, unpaced. Returns when nothing runs any more.

        The answers that had to be ended after `patience_s`, s, get an error in-band; return their number.
        """
        self.closing = True
        for answer_run in self.answering.values():
            answer_run.adjust(None, Delivery.OFF)
        if await self._emptied(patience_s, lambda: self._n_taken > 0):
            return 0
        late = self._works()
        for work in late:
            work.give_up(_stopping("the daemon was stopped before the answer was whole"))
        await self._emptied(GIVE_UP_S, lambda: self._n_taken > 0)
        return len(late)

    async def revoke(self, caller: Caller) -> int:
        """Answer nothing more that this key asks, and end what runs; return how much that was.

        What was delivered stands, and the reader gets the reason; one who does not read it is cut off.
        """
        self.revoked.add(caller.key_id)
        late = {name: work for name, work in (self.answering | self.embedding).items() if work.caller == caller}
        for work in late.values():
            work.give_up(_revoked(caller))
        if late and not await self._emptied(GIVE_UP_S, lambda: not late.keys().isdisjoint(self._tasks)):
            for name in late.keys() & self._tasks.keys():
                self._tasks[name].cancel()
        return len(late)

    async def confine(self) -> None:
        """`policy.private` is on: end what a server was asked for and has not begun, and wait until that is so.

        It is not known whether the text has left yet. What a server is already sending is taken to its end.
        """
        stopped = [task for answer_run in self.answering.values() for task in answer_run.confine()]
        if stopped:
            await asyncio.wait(stopped, timeout=CONFINE_S)

    def is_answering(self, request_id: str, caller: Caller | None = None) -> bool:
        """Whether an answer of that id runs, and is that caller's where one is given."""
        answer_run = self.answering.get(request_id)
        return answer_run is not None and (caller is None or answer_run.caller == caller)

    def adjust(
        self, request_id: str, pace_tps: float | None, delivery: Delivery | None, caller: Caller | None = None
    ) -> bool:
        """Deliver a running answer at another pace or in another mode; False if none of that id `is_answering`."""
        if is_there := self.is_answering(request_id, caller):
            self.answering[request_id].adjust(pace_tps, delivery)
        return is_there

    def still_s(self, device: Endpoint) -> float:
        """Return how long answers will still need another device than that one, s, as far as is known."""
        others = (work for work in self._works() if work.context.endpoints.get(Side.DEVICE) is not device)
        return max((work.left_s() for work in others), default=0.0)

    def _works(self) -> list[AnswerRun | EmbeddingRun]:
        return [*self.answering.values(), *self.embedding.values()]

    async def _emptied(self, patience_s: float, runs: Callable[[], bool]) -> bool:
        """Whether nothing runs any more of what `runs`; waits for that for `patience_s` at most."""
        try:
            async with asyncio.timeout(patience_s):
                while runs():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True


def _revoked(caller: Caller) -> RequestError:
    msg = f"The key '{caller.name}' was revoked: ask whoever gave it to you for another one."
    return RequestError(msg, status=401, code="invalid_api_key")


def _stopping(message: str) -> Unavailable:
    return Unavailable(message, retry_after_s=RESTART_S, code="stopping")
