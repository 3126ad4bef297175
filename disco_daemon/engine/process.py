"""A child process of this program that no cancellation can leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from typing import Any

from ..program import command

# llama.cpp's threads meet hundreds of times a token. GNU's OpenMP lets those who have come spin there for milliseconds:
# as long as another program has one of the cores, the thread that all wait for does not run, and nothing gets done.
# After so many turns, its own number for too few cores, they sleep instead; on a quiet machine few wait for as long.
# `benchmarks/busy_core.py` measures both.
SPINS = 1000


def environment() -> dict[str, str]:
    """The environment of a child: ours, and how long its threads spin, unless the user has said how they wait."""
    if "OMP_WAIT_POLICY" in os.environ:
        return dict(os.environ)
    return {"GOMP_SPINCOUNT": str(SPINS)} | os.environ


async def spawn(module: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module of this program; `options` as `asyncio.create_subprocess_exec` takes them. Raises OSError.

    A cancellation waits for the fork and takes it back: asyncio's own clean-up of a subprocess whose creation is
    cancelled can wait for ever (seen on CPython 3.11).
    """
    starting = asyncio.create_subprocess_exec(*command(module, *args), env=environment(), **options)
    fork = asyncio.ensure_future(starting)
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
