"""Work of an idle daemon: when it may begin, and how a request ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import psutil

from ..clock import Clock

Result = TypeVar("Result")

IDLE_S = 20.0  # without a request: a reader in the middle of a conversation asks again sooner
LOOK_S = 0.05  # between two looks for a request during the work: a request may be slowed down that long
QUIET = 0.2  # of the processor, at most taken by others: else their work would be measured, or slowed down


async def until_idle(busy: Callable[[], bool], undisturbed: Callable[[], bool], clock: Clock, idle_s: float) -> None:
    """Wait until there has been no request for a while, and the machine is undisturbed."""
    since = clock.now()
    while clock.now() - since < idle_s or not undisturbed():
        await asyncio.sleep(min(1.0, idle_s / 4))
        if busy():
            since = clock.now()


async def unless(work: Coroutine[Any, Any, Result], ended: Callable[[], bool], name: str) -> Result | None:
    """Return the result of the work, or None if `ended` said so before; then the work is cancelled."""
    task = asyncio.create_task(work, name=name)
    try:
        while not task.done():
            if ended():
                return None
            await asyncio.wait([task], timeout=LOOK_S)
        return await task
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_on_mains() -> bool:
    """Whether the machine is on mains, or has no battery."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is None or battery.power_plugged is not False


def is_machine_quiet() -> bool:
    """Whether the machine is on mains, or has no battery, and other programs were quiet since the last call."""
    return is_on_mains() and psutil.cpu_percent() <= 100 * QUIET
