"""The inbox of one answer: events of its endpoints, its timers and its controls, in order."""

from __future__ import annotations

import asyncio
from collections import deque

from ..answer import Event
from .endpoint_run import EndpointRun

QUEUE_SIZE = 256  # events; a reader slower than the model pauses it through this


class EventInbox:
    """Events for one answer. Endpoints wait while it is full, and with them their streams; timers never do."""

    def __init__(self) -> None:
        self._items: deque[tuple[EndpointRun | None, Event]] = deque()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None  # of the one task that waits for an event
        self._room = asyncio.Event()
        self._room.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is waiting."""
        return not self._items

    def post(self, event: Event, run: EndpointRun | None = None) -> None:
        """Add an event of ours: a timer, or one in the place of a run."""
        self._items.append((run, event))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def put(self, run: EndpointRun, event: Event) -> bool:
        """Add an event of an endpoint; return whether it had to wait for a slow reader."""
        waits = not self._room.is_set()
        if waits:
            await self._room.wait()
        self.post(event, run)
        if len(self._items) >= QUEUE_SIZE:
            self._room.clear()
        return waits

    async def get(self) -> tuple[EndpointRun | None, Event]:
        """Return the next event, for the one reader."""
        while not self._items:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._items.popleft()
        if not self._room.is_set() and len(self._items) < QUEUE_SIZE // 2:
            self._room.set()
        return item
