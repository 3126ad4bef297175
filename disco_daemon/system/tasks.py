"""Tasks of asyncio that have one owner, who ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
