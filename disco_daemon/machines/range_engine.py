"""An engine that has a range of layers, and the way of its frames: to the relay, which alone touches the network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ..clock import Clock
from ..engine import wire
from ..engine.inbox import EngineGone
from ..engine.supervisor import LOAD_TIMEOUT_S, Engine
from ..link.relay.relay_process import RelayProcess
from ..system.tasks import cancel_all


class RangeEngine:
    """The supervised engine of a range. Each life of it or of `relay` has a socket; the relay gets it behind the load.

    `loaded` is called just before, with what the engine says of itself. All mutable state: the socket that waits for
    the load.
    """

    def __init__(
        self, config: wire.Load, clock: Clock, relay: RelayProcess, loaded: Callable[[wire.Loaded], None]
    ) -> None:
        self.engine = Engine(config, clock, attach=self._attach)
        self._relay, self._loaded = relay, loaded
        self._handing: asyncio.Task[None] | None = None

    def replace_socket(self) -> None:
        """Give the engine another socket: the relay has gone, and with it the other end of the one before."""
        self.engine.reattach()

    async def close(self) -> None:
        """Stop the engine and wait for it; idempotent. The relay is the caller's."""
        await self.engine.close()
        await cancel_all(self._handing)
        self._relay.give_engine(None)

    def _attach(self, sock: socket.socket) -> None:
        if self._handing is not None:
            self._handing.cancel()
        self._handing = asyncio.create_task(self._hand_over(sock), name="engine's socket to the relay")

    async def _hand_over(self, sock: socket.socket) -> None:
        """Give the relay the socket when the range is in memory: until then a link would be of no use."""
        with sock:
            try:
                info = await self.engine.ready(LOAD_TIMEOUT_S)
            except EngineGone:
                return
            self._loaded(info)
            self._relay.give_engine(sock)
