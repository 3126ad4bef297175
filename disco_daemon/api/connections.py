"""The connections of the API: whose each of them is, asked once, when it is made."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from aiohttp import web

from .peers import Kernel, Peer, Whose


class Connection(web.RequestHandler):
    """One connection of a client; `peer` is who made it."""

    __slots__ = ("_house", "peer")

    def __init__(self, house: Connections, **handler_args: Any) -> None:
        super().__init__(house, **handler_args)
        self._house = house
        self.peer = Peer(Whose.NOBODY)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.peer = self._house.peer_of(transport)
        super().connection_made(transport)


class Connections(web.Server):
    """All connections, of every socket that is listened on. Without a `kernel` nobody is asked whose they are."""

    def __init__(self, plain: web.Server, kernel: Kernel | None, **handler_args: Any) -> None:
        cancels = plain.handler_cancellation
        super().__init__(plain.request_handler, request_factory=plain.request_factory, handler_cancellation=cancels)
        self._kernel = kernel
        self._handler_args = handler_args

    def __call__(self) -> Connection:
        """Make the protocol of a new connection."""
        return Connection(self, loop=asyncio.get_running_loop(), **self._handler_args)

    def peer_of(self, transport: asyncio.BaseTransport) -> Peer:
        """Who is at its other end."""
        end = transport.get_extra_info("socket")
        if end is not None and end.family == socket.AF_UNIX:
            return Peer(Whose.DOOR)
        if self._kernel is None:
            return Peer(Whose.UNTOLD)
        return self._kernel.whose(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


class Runner(web.AppRunner):
    """Runs an application whose connections know whose they are. Without a `kernel` nobody is asked."""

    def __init__(self, app: web.Application, kernel: Kernel | None, *, shutdown_timeout: float) -> None:
        # Without handler_cancellation a client's disconnect would go unnoticed until the next write.
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
        self._kernel = kernel

    async def _make_server(self) -> web.Server:
        return Connections(await super()._make_server(), self._kernel, access_log=None)


def peer_of(request: web.Request) -> Peer:
    """Who made the connection that a request came by."""
    return cast("Connection", request.protocol).peer
