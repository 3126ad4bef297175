"""An engine's process that is started before the daemon has loaded its own modules.

Interpreter and libraries take a third of a second in either process. Which model the engine is to have is told it
later, over its socket, as it always is; the process ends with that socket, and so with ours, however we end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from ..system.supervised import ChildProcess

NICE = 5  # added to our niceness: the daemon comes first, also while both load their modules


async def start_worker(n_sockets: int = 1) -> ChildProcess:
    """Start an engine's process with so many sockets to it. Raises OSError.

    The first of them is for the daemon's messages, another one for a relay or a fleet's hosts.
    """
    child = await ChildProcess.start("disco_daemon.engine.worker", n_sockets=n_sockets)
    with contextlib.suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, child.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    return child


class EarlyEngine:
    """An engine's process that nobody has taken yet; the first engine that begins has it."""

    def __init__(self) -> None:
        self._started: ChildProcess | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError."""
        self._started = await start_worker()

    def take(self) -> ChildProcess | None:
        """Return the process, once; None if there is none."""
        started, self._started = self._started, None
        return started

    async def close(self) -> None:
        """End a process that nobody has taken; idempotent."""
        if (started := self.take()) is not None:
            await started.discard()


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
