"""Where time comes from: passed in everywhere, so that the same code runs live and in a simulation."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timezone, tzinfo
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


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


def local_zone() -> tzinfo:
    """The user's time zone with its changes of the clock; that of now for ever, where only this is known."""
    try:
        if name := os.environ.get("TZ", "").removeprefix(":"):
            return ZoneInfo(name)
        with Path("/etc/localtime").open("rb") as f:
            return ZoneInfo.from_file(f, key="localtime")
    except (OSError, ValueError, ZoneInfoNotFoundError):
        offset = datetime.now(UTC).astimezone().utcoffset()
        return UTC if offset is None else timezone(offset)
