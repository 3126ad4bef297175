"""Debouncing: while values come in fast, only the latest is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Debounce(Generic[T]):
    """Calls `work` with the latest value given, one call at a time, and skips the values in between.

    It waits until no new value has come for `settle_s`, s. `work` must handle its own errors.
    """

    def __init__(self, work: Callable[[T], Awaitable[None]], settle_s: float = 0.0) -> None:
        self._work, self._settle_s = work, settle_s
        self._waiting: list[T] = []  # none or one
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    @property
    def waiting(self) -> bool:
        """Whether a value waits that `work` has not begun with."""
        return bool(self._waiting)

    def call(self, value: T) -> None:
        """Replace the value that waits."""
        self._waiting = [value]
        self._news.set()

    def forget(self) -> None:
        """Drop the value that waits; a call of `work` that has begun goes on."""
        self._waiting = []

    async def flush(self) -> None:
        """Work on what waits at once; return when nothing is left."""
        async with self._lock:
            while self._waiting:
                await self._work(self._waiting.pop())

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._wait_until_settled()
            await self.flush()

    async def _wait_until_settled(self) -> None:
        await self._news.wait()
        while self._settle_s > 0 and self._news.is_set():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._settle_s)
            except TimeoutError:
                return
        self._news.clear()
