"""Where time comes from: passed in everywhere, so that the same code runs live and in a simulation."""

from __future__ import annotations

import time
from typing import Protocol


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
