"""A child process of this program that no cancellation can leave behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from ..program import command


async def spawn(module: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module of this program; `options` as `asyncio.create_subprocess_exec` takes them. Raises OSError.

    A cancellation waits for the fork and takes it back: asyncio's own clean-up of a subprocess whose creation is
    cancelled can wait for ever (seen on CPython 3.11).
    """
    fork = asyncio.ensure_future(asyncio.create_subprocess_exec(*command(module, *args), **options))
    try:
        return await asyncio.shield(fork)
    except asyncio.CancelledError:
        await end(await fork)
        raise


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it, if it still lives, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def drain(stream: asyncio.StreamReader | None, lines: deque[str]) -> None:
    """Keep a child's last words, and its pipe empty."""
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:  # a line over the limit: skip it
            continue
        if not line:
            return
        lines.append(line.decode("utf-8", "replace").rstrip())
