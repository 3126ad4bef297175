"""Signs of life: what a stream sends while there is nothing else to send.

Node's fetch gives up after 300 s without a byte, proxies after 60 s, many users sooner; a prompt may take minutes to
be read, and a model to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...clock import Clock

SIGN_OF_LIFE_S = 10.0  # of silence, then a sign; a first one takes status and headers along, while a failure has none


async def _nothing() -> None:
    return


class SignsOfLife:
    """Calls `give` after each `interval_s` of silence by the clock, until it is closed.

    One timer for all of it: what is sent in time moves nothing but a number, and the timer is set anew when it rings
    too early. At most one sign is being given, by a task of its own; `closed()` ends it and waits for that.
    """

    __slots__ = ("_clock", "_give", "_heard_at", "_interval_s", "_loop", "_task", "_timer")

    def __init__(self, give: Callable[[], Awaitable[None]], clock: Clock, interval_s: float) -> None:
        self._give, self._clock, self._interval_s = give, clock, interval_s
        self._loop = asyncio.get_running_loop()
        self._heard_at = clock.now()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(interval_s, self._ring)

    @property
    def under_way(self) -> bool:
        """Whether one is being given now."""
        return self._task is not None

    def heard(self) -> None:
        """Note that something else was sent."""
        self._heard_at = self._clock.now()

    async def given(self) -> None:
        """Wait for the sign that is being given, if any; a cancellation ends it, too."""
        if self._task is not None:
            await self._task

    async def closed(self) -> None:
        """Give no more, and wait until nothing of it runs."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))  # ends at once: all that it awaits can be cancelled
        self._give = _nothing  # no cycle with whoever gives them

    def _ring(self) -> None:
        left_s = self._heard_at + self._interval_s - self._clock.now()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._ring)
            return
        self._task = self._loop.create_task(self._sign(), name="sign-of-life")

    async def _sign(self) -> None:
        try:
            await self._give()
        finally:
            self._task = None
            if self._timer is not None:
                self.heard()
                self._timer = self._loop.call_later(self._interval_s, self._ring)
