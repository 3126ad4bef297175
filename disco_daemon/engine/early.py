"""An engine's process that is started before the daemon has loaded its own modules.

Interpreter and libraries take a third of a second in either process. Which model the engine is to have is told it
later, over its socket, as it always is; the process ends with that socket, and so with ours, however we end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

from ..system.process import end, spawn

NICE = 5  # added to our niceness: the daemon comes first, also while both load their modules

Started: TypeAlias = tuple[Process, socket.socket]


async def start_worker(doors: Sequence[socket.socket]) -> Process:
    """Start an engine's process with the ends of socket pairs that are its own, which are closed here.

    The first of them is for the daemon's messages, another one for a relay or a fleet's hosts. Raises OSError.
    """
    fds = [door.fileno() for door in doors]
    try:
        process = await spawn(
            "disco_daemon.engine.worker", *map(str, fds), pass_fds=fds, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
    finally:
        for door in doors:
            door.close()
    with contextlib.suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    return process


class EarlyEngine:
    """An engine's process that nobody has taken yet; the first engine that begins has it."""

    def __init__(self) -> None:
        self._started: Started | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            self._started = await start_worker([theirs]), ours
        except BaseException:
            ours.close()
            raise

    def take(self) -> Started | None:
        """Return the process with our end of its socket, once; None if there is none."""
        started, self._started = self._started, None
        return started

    async def close(self) -> None:
        """End a process that nobody has taken; idempotent."""
        if (started := self.take()) is not None:
            process, ours = started
            ours.close()
            await end(process)


@contextlib.asynccontextmanager
async def early_engine(*, wanted: bool) -> AsyncIterator[EarlyEngine]:
    """Start an engine's process if one is `wanted`; end it afterwards if nobody has taken it.

    Where it cannot be started, there is none: the engine tries again, and says what is wrong.
    """
    early = EarlyEngine()
    try:
        if wanted:
            with contextlib.suppress(OSError):
                await early.start()
        yield early
    finally:
        await early.close()
