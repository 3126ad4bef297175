"""A process for a host, started before one is lost: interpreter and libraries take most of what its start takes."""

from __future__ import annotations

import asyncio
import logging

from ...system.supervised import ChildProcess
from ...system.tasks import cancel_all

log = logging.getLogger("disco.fleet")

MODULE = "disco_daemon.engine.hosts.process"
AFTER_S = 2.0  # behind the start of a host: by then that has its layers, and answers go on


async def start_host() -> ChildProcess:
    """Start a host's process, with home's end of the socket to it. Raises OSError."""
    return await ChildProcess.start(MODULE, n_sockets=1)


class SpareHost:
    """One such process that nobody has taken yet, and the task that starts the next one."""

    def __init__(self) -> None:
        self._started: ChildProcess | None = None
        self._starting: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Start one soon, if there is none."""
        if self._started is None and (self._starting is None or self._starting.done()):
            self._starting = asyncio.create_task(self._start(), name="spare host")

    async def _start(self) -> None:
        await asyncio.sleep(AFTER_S)
        try:
            self._started = await start_host()
        except OSError as e:
            log.warning("no host of the fleet is started in advance: %s", e)

    async def take(self) -> ChildProcess | None:
        """Return it, once; None if there is none, or if it has ended."""
        started, self._started = self._started, None
        if started is not None and not started.is_alive:
            await started.discard()
            return None
        return started

    async def close(self) -> None:
        """End a process that nobody has taken; idempotent."""
        await cancel_all(self._starting)
        if (started := await self.take()) is not None:
            await started.discard()
