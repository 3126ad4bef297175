"""Processes of this program that neither a cancellation nor our own end can leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
from pathlib import Path
from typing import Any, TypeVar

from .program import command, environment

Result = TypeVar("Result")

PAUSE_FIRST_S = 0.1  # a crash is mostly a one-off: be back before the next request
PAUSE_MAX_S = 30.0  # the longest pause between two starts
PAUSE_JITTER = 0.5  # of a pause: several daemons whose engines fell together do not load together
USEFUL_S = 10.0  # a life that worked for longer, and longer than it took to start, says nothing against the next one


class RestartPause:
    """How long to wait before a process that has ended is started again.

    Each life in a row that was of little use doubles the pause, so that starts do not take the machine; a useful one
    begins anew, however often that happens: whoever reads an answer waits for the restart.
    """

    def __init__(self) -> None:
        self._next_s = PAUSE_FIRST_S

    def after(self, start_s: float, worked_s: float) -> float:
        """Return the pause, s, behind a life that took `start_s` until it was ready, and worked for `worked_s`."""
        if worked_s > max(USEFUL_S, start_s):
            self._next_s = PAUSE_FIRST_S
        pause_s = self._next_s * random.uniform(1 - PAUSE_JITTER, 1)
        self._next_s = min(PAUSE_MAX_S, 2 * self._next_s)
        return pause_s


async def spawn(module: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module of this program; `options` as `asyncio.create_subprocess_exec` takes them. Raises OSError.

    A cancellation waits for the fork and takes it back: asyncio's own clean-up of a subprocess whose creation is
    cancelled can wait for ever (seen on CPython 3.11).
    """
    starting = asyncio.create_subprocess_exec(*command(module, *args), env=environment(module=module), **options)
    fork = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(fork)
    except asyncio.CancelledError:
        await end(await fork)
        raise


def start(module: str, *args: str, sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a module that is told the number of `sock` last, and ends with the other end of it. Raises OSError."""
    words = command(module, *args, str(sock.fileno()))
    return subprocess.Popen(words, pass_fds=[sock.fileno()], env=environment(module=module), stdin=subprocess.DEVNULL)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still lives, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def waited_s(task: Path) -> float:
    """Return how long a thread was ready to run and had no processor, s, since it began.

    `task` is its folder in /proc, or that of a process for its main thread. It is 0 where the kernel does not say, as
    Linux does, and for one that has ended.
    """
    try:
        return 1e-9 * int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
