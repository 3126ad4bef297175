"""The connections of the API: whose each of them is, asked once, when it is made."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from aiohttp import web

from ..errors import RequestError
from .failures import SERVER, failure, log, of_http, plain, unexpected
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

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is answered to a request that cannot be read, or whose handling failed unexpectedly."""
        if status < 500:
            told = plain(message or exc)
            log.info("a request could not be read: %s", told)
            error = failure(RequestError(f"The request could not be read: {told}", status=status), {"Server": SERVER})
        else:
            error = failure(unexpected(exc or RuntimeError(message)), {"Server": SERVER})
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, and cannot be taken back")
        error.force_close()
        return error

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of a response. What aiohttp raised outside of all middleware gets its shape here."""
        if isinstance(resp, web.HTTPException):
            resp = of_http(resp, request)
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that cannot be read is its sender's fault, and one line; anything else is ours."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            log.info("a request's body could not be read: %s", plain(kw["exc_info"]))
        else:
            super().log_exception(*args, **kw)


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
