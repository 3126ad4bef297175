"""Monitors the event loop: how late it is, and when it stood still or the machine slept.

A time measured across a stall of our own says nothing about either endpoint, so it must never become a sample.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ...clock import Clock

INTERVAL_S = 0.02  # between two looks
WINDOW = 3000  # looks: the last minute
STALL_S = 0.1  # a lateness worth remembering: a tenth of the TTFTs we learn from
SLEPT_S = 1.0  # the wall clock ran that much further than the monotonic one, which stops while the machine sleeps
N_STALLS = 256  # stalls that are remembered, to keep their answers out of the samples


class LoopMonitor:
    """Looks at the clocks until cancelled. Owns `lateness`, s, and the stalls as (begin, end) in the clock's time.

    `observe` is called with the lateness of each look, s.
    """

    def __init__(self, clock: Clock, observe: Callable[[float], None] = lambda late_s: None) -> None:
        self.lateness: deque[float] = deque(maxlen=WINDOW)
        self._clock = clock
        self._observe = observe
        self._stalls: deque[tuple[float, float]] = deque(maxlen=N_STALLS)
        self._last = clock.now()
        self._offset = clock.wall() - clock.now()

    async def run(self) -> None:
        """Look at the clocks every `INTERVAL_S`, until cancelled."""
        self._last = self._clock.now()
        self._offset = self._clock.wall() - self._last
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Look at the clocks once, which is due every `INTERVAL_S`."""
        now, begin = self._clock.now(), self._last
        late = max(0.0, now - begin - INTERVAL_S)
        offset = self._clock.wall() - now
        self.lateness.append(late)
        self._observe(late)
        if late > STALL_S or abs(offset - self._offset) > SLEPT_S:
            self._stalls.append((begin, now))
        self._last, self._offset = now, offset

    def was_disturbed(self, begin: float, end: float) -> bool:
        """Whether the loop stood still, or the machine slept, at some time between `begin` and `end`."""
        overdue = self._clock.now() - self._last - INTERVAL_S > STALL_S  # this look itself is late just now
        if overdue and end > self._last:
            return True
        return any(first < end and last > begin for first, last in self._stalls)

    def quantile_ms(self, q: float) -> float | None:
        """Return the q-quantile of the lateness over the last minute, ms; None before the first look."""
        ordered = sorted(self.lateness)
        return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3) if ordered else None
