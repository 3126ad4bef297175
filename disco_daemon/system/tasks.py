"""Tasks of asyncio that have one owner, who ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel those tasks that there are, and wait until they have ended."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)


async def all_ended(*tasks: asyncio.Task[Any]) -> None:
    """Wait until those tasks have ended, also if whoever waits is cancelled meanwhile; raises CancelledError then.

    For what has to be closed whatever happens: `gather` would cancel the closing itself.
    """
    left, cancelled = set(tasks), None
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError as e:
            cancelled, left = e, {task for task in left if not task.done()}
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        cancelled = None  # its traceback holds this frame, which would hold it


class TaskSet(set[asyncio.Task[Any]]):
    """Tasks that run beside each other, each until it has ended."""

    def begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start one more."""
        self.add(task := asyncio.create_task(work, name=name))
        task.add_done_callback(self.discard)
        return task
