"""Calls the outside with the latest of many wishes: while a slider moves, what was wanted before is of no interest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """`work` is called with the latest value told, one call at a time; values in between are skipped.

    It waits until nothing new was told for `settle_s`, s. Errors of `work` are its own business.
    """

    def __init__(self, work: Callable[[T], Awaitable[None]], settle_s: float = 0.0) -> None:
        self._work, self._settle_s = work, settle_s
        self._wanted: list[T] = []  # none or one
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    @property
    def waiting(self) -> bool:
        """Whether there is something that nobody has begun with."""
        return bool(self._wanted)

    def tell(self, value: T) -> None:
        """Want this from now on."""
        self._wanted = [value]
        self._news.set()

    def forget(self) -> None:
        """Want nothing any more; what has begun goes on."""
        self._wanted = []

    async def flush(self) -> None:
        """Do at once what waits; returns when nothing is left to do."""
        async with self._lock:
            while self._wanted:
                await self._work(self._wanted.pop())

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._settled()
            await self.flush()

    async def _settled(self) -> None:
        await self._news.wait()
        while self._settle_s > 0 and self._news.is_set():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._settle_s)
            except TimeoutError:
                return
        self._news.clear()
