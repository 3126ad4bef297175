"""The connections of the API: the owner of each, how long each may wait, and how many there may be.

The owner is asked for once, when a connection is made. A wait for a client ends in time, and everything that clients
cause is bounded: connections, bodies, headers (aiohttp's own bounds), and output that a reader does not take.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

from ...clock import Deadline
from ...errors import RequestError, Unavailable
from ..control.scrape import Handler
from .failures import MAX_BODY, SERVER, error_shape, failure, log, of_http, plain, too_large, unexpected
from .peers import Kernel, Peer, Whose
from .sse import READER_TIMEOUT_S

MAX_CONNECTIONS = 1024  # of clients that may ask for answers; twice as many as answers, for idle ones
MAX_STRANGERS = 32  # of other users, for /health and /metrics only
MAX_DOORS = 256  # over the Unix socket: full or not, the controls can be reached
MAX_SURPLUS = 64  # that are being refused with a response; more are cut
MAX_BODIES_BYTES = 128 * 1024 * 1024  # of all requests under way
LINGER_S = 2.0  # a refused body is read on for this long, or its sender would see a reset in place of the answer
SURPLUS = "surplus"
TOLD_S = 1.0  # for a client to take the refusal of a connection too many


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a connection may wait for its client, and how many connections and bytes there may be."""

    receive_timeout_s: float = 30.0
    connections: int = MAX_CONNECTIONS
    strangers: int = MAX_STRANGERS
    doors: int = MAX_DOORS
    body_bytes: int = MAX_BODIES_BYTES
    reader_timeout_s: float = READER_TIMEOUT_S

    def of(self, peer: Peer) -> int:
        """Return how many connections of a kind there may be."""
        return self.doors if peer.whose is Whose.DOOR else self.strangers if peer.stranger else self.connections


class Connection(web.RequestHandler):
    """One connection of a client; `peer` is its owner, `held` the bytes of the body of its present request."""

    __slots__ = ("_deadline", "_house", "_kind", "held", "peer")

    def __init__(self, house: Connections, **handler_args: Any) -> None:
        super().__init__(house, **handler_args)
        self._house = house
        self._deadline = Deadline()  # of each wait for the client, one after the other
        self._kind = ""
        self.peer = Peer(Whose.NOBODY)
        self.held = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`. One too many is refused, and never read from."""
        self.peer = self._house.peer_of(transport)
        self._kind = self._house.enter(self.peer)
        if self._kind != SURPLUS:
            super().connection_made(transport)
            return
        self.force_close()
        surplus = cast("asyncio.Transport", transport)
        if self._house.n[SURPLUS] > MAX_SURPLUS:
            surplus.abort()
            return
        surplus.write(_FULL)
        with suppress(OSError):  # it has gone already
            surplus.write_eof()
        self._loop.call_later(TOLD_S, surplus.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._house.leave(self._kind)
        self._deadline.close()
        super().connection_lost(exc)

    async def start(self) -> None:
        """Take one request after the other. Unread input is kept for a while at the end, not for ever."""
        transport = self.transport
        try:
            await super().start()
        finally:
            if transport is not None and transport.get_write_buffer_size():
                self._loop.call_later(self._house.limits.receive_timeout_s, transport.abort)

    async def receive(self, request: web.BaseRequest) -> bytes:
        """Return the whole body of a request. Raises RequestError if it is late or too large, Unavailable."""
        parts: list[bytes] = []
        length = 0
        try:
            with self._deadline.at(self._loop.time() + self._house.limits.receive_timeout_s):
                while part := await request.content.readany():
                    self._house.hold(self, len(part))
                    length += len(part)
                    if length > MAX_BODY:
                        raise too_large()
                    parts.append(part)
        except TimeoutError as e:
            msg = f"The request body did not come within {self._house.limits.receive_timeout_s:g} s."
            raise RequestError(msg, status=408, code="timeout") from e
        return b"".join(parts)

    def release(self) -> None:
        """Let go of the body of the present request."""
        self._house.hold(self, -self.held)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that cannot be read, or whose handling failed unexpectedly."""
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
        """Send the rest of a response. Errors of aiohttp outside of all middleware get their shape here."""
        if isinstance(resp, web.HTTPException):
            resp = of_http(resp, request)
        try:
            with self._deadline.at(self._loop.time() + self._house.limits.reader_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.force_close()
            return resp, True

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a body that cannot be read in one line, as its sender's fault; anything else is a fault of ours."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            log.info("a request's body could not be read: %s", plain(kw["exc_info"]))
        else:
            super().log_exception(*args, **kw)


class Connections(web.Server):
    """All connections, of every socket that is listened on. Without a `kernel` their owners are not asked for.

    It changes `n`, the connections of each kind, and `held`, the bytes of all requests' bodies.
    """

    def __init__(self, plain: web.Server, kernel: Kernel | None, limits: ConnectionLimits, **handler_args: Any) -> None:
        cancels = plain.handler_cancellation
        super().__init__(plain.request_handler, request_factory=plain.request_factory, handler_cancellation=cancels)
        self._kernel = kernel
        timeout_s = limits.receive_timeout_s
        self._handler_args = handler_args | {"keepalive_timeout": timeout_s, "lingering_time": min(LINGER_S, timeout_s)}
        self.limits = limits
        self.n: Counter[str] = Counter()
        self.held = 0

    def __call__(self) -> Connection:
        """Make the protocol of a new connection."""
        return Connection(self, loop=asyncio.get_running_loop(), **self._handler_args)

    def peer_of(self, transport: asyncio.BaseTransport) -> Peer:
        """Return the peer at the other end of a connection."""
        end = transport.get_extra_info("socket")
        if end is not None and end.family == socket.AF_UNIX:
            return Peer(Whose.DOOR)
        if self._kernel is None:
            return Peer(Whose.UNTOLD)
        return self._kernel.whose(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))

    def enter(self, peer: Peer) -> str:
        """Count a new connection; return what it counts as, SURPLUS if there are enough of its kind."""
        kind = "door" if peer.whose is Whose.DOOR else "stranger" if peer.stranger else "client"
        if self.n[kind] >= self.limits.of(peer):
            kind = SURPLUS
        self.n[kind] += 1
        return kind

    def leave(self, kind: str) -> None:
        """Count the end of a connection."""
        self.n[kind] -= 1

    def hold(self, connection: Connection, n_bytes: int) -> None:
        """Count bytes of a body that arrived, or were let go (negative). Raises Unavailable if they are too many."""
        self.held += n_bytes
        connection.held += n_bytes
        if n_bytes > 0 and self.held > self.limits.body_bytes:
            msg = f"Requests under way hold {self.limits.body_bytes} bytes already; try again later."
            raise Unavailable(msg, code="overloaded")


class Runner(web.AppRunner):
    """Runs an application whose connections know their owners. Without a `kernel` those are not asked for."""

    def __init__(
        self,
        app: web.Application,
        kernel: Kernel | None,
        limits: ConnectionLimits | None = None,
        *,
        shutdown_timeout: float,
    ) -> None:
        # Without handler_cancellation a client's disconnect would go unnoticed until the next write.
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
        self._kernel = kernel
        self._limits = limits or ConnectionLimits()

    async def _make_server(self) -> web.Server:
        return Connections(await super()._make_server(), self._kernel, self._limits, access_log=None)


# --- what handlers know of them -----------------------------------------------------------------------------------


@web.middleware
async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body that announces too great a length, and let go of a body when its request is done.

    After a body that was not read to its end the connection takes no other request.
    """
    connection = cast("Connection", request.protocol)
    try:
        if request.content_length is not None and request.content_length > MAX_BODY:
            raise too_large()
        return await handler(request)
    except RequestError as e:
        if e.status not in (408, 413):
            raise
        refusal = failure(e, shape=error_shape(request.path))
        refusal.force_close()
        return refusal
    finally:
        if connection.held:
            connection.release()


async def body(request: web.Request) -> bytes:
    """Return the body of a request: whole, in time and within bounds. Raises RequestError, Unavailable."""
    return await cast("Connection", request.protocol).receive(request) if request.body_exists else b""


def peer_of(request: web.Request) -> Peer:
    """Return the peer that made a request's connection."""
    return cast("Connection", request.protocol).peer


def _full() -> bytes:
    """Return the response to a connection that is one too many."""
    told = failure(Unavailable("There are too many connections; try again later.", code="too_many_connections"))
    assert isinstance(told.body, bytes)
    headers = {**told.headers, "Content-Length": len(told.body), "Server": SERVER, "Connection": "close"}
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + told.body


_FULL = _full()
