"""Clocks, passed in everywhere, so that the same code runs live and in a simulation; and a deadline for many waits."""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Protocol, Self


class Clock(Protocol):
    """A monotonic clock and the wall clock, both in s."""

    def now(self) -> float:
        """Monotonic time, s."""
        ...

    def wall(self) -> float:
        """Unix time, s."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        """Monotonic time, s."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix time, s."""
        return time.time()


def since_boot() -> float:
    """Return the time since this machine was started, s: nobody sets it, and it goes on while the machine sleeps."""
    # Linux's monotonic clock stands still in sleep, and macOS's does not if it is asked for by this name.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Deadline:
    """A time-out for one wait after the other, with one timer for all of them; `close` it.

    `with deadline.at(when): await …` raises TimeoutError at `when`, by the loop's clock, as `asyncio.timeout_at` does.
    That one makes and cancels a timer each time: with a wait for each token that is a third of what a token costs, and
    the cancelled timers are garbage. Here the timer stays when a wait ends in time, and is moved on when it rings too
    early. One wait at a time.
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
        """Set the end of the next wait."""
        self._until = when
        if self._timer is None or when < self._timer.when():
            self._set()
        return self

    def close(self) -> None:
        """Cancel the timer; no wait may follow."""
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
            return  # no wait is under way; the next one sets the timer
        if due < self._until:
            self._set()
        else:
            self._rang = True
            self._task.cancel()


class Deadlines:
    """Deadlines that are used one after the other, each for one work at a time, with their timers.

    A work that is over before its time-out has made no timer where the one before it did: requests that end in a second
    need one a second, however many they are.
    """

    def __init__(self, most: int = 64) -> None:
        """At `most` so many are kept while nobody has them."""
        self._most, self._idle = most, list[Deadline]()

    def take(self) -> Deadline:
        """Return one for a work; `give` it back."""
        return self._idle.pop() if self._idle else Deadline()

    def give(self, deadline: Deadline) -> None:
        """Take back one that nobody waits with."""
        if len(self._idle) >= self._most:
            deadline.close()
        else:
            self._idle.append(deadline)

    def close(self) -> None:
        """Cancel the timers of all that nobody has."""
        while self._idle:
            self._idle.pop().close()
