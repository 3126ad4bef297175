"""A time-out for one wait after the other, at the price of one timer for all of them.

`asyncio.timeout` makes and cancels a timer each time; where each token is waited for, and each is written, that is a
third of what a token costs, and the cancelled timers are what the garbage collector finds.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Self


class Deadline:
    """`with deadline.at(when): await …` raises TimeoutError at `when`, by the loop's clock: `asyncio.timeout_at`.

    Its timer stays when a wait ends in time, and is moved on when it rings too early. One wait at a time. `close` it.
    """

    __slots__ = ("_before", "_loop", "_rang", "_task", "_timer", "_until")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._until = math.inf
        self._task: asyncio.Task[object] | None = None
        self._before = 0  # cancellations of the task that were there already
        self._rang = False

    def at(self, when: float) -> Self:
        """The end of the next wait."""
        self._until = when
        if self._timer is None or when < self._timer.when():
            self._set()
        return self

    def close(self) -> None:
        """No more waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._before, self._rang = task, task.cancelling(), False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._rang and task is not None and task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _set(self) -> None:
        self.close()
        if self._until < math.inf:
            self._timer = self._loop.call_at(self._until, self._ring)

    def _ring(self) -> None:
        assert self._timer is not None
        due, self._timer = self._timer.when(), None
        if self._task is None:
            return  # nobody waits; the next one sets it
        if due < self._until:
            self._set()
        else:
            self._rang = True
            self._task.cancel()
