"""Connections to a server that are kept for the next request, and when they are not to be trusted any more.

A connection dies unseen: while the machine sleeps, when it is on another network, when a router forgets it. Nothing
tells, and a request into it waits for its whole time-out. So one that this machine slept with, or that would take
another way now, is closed before it is used; one whose other end acknowledges nothing is given up by the kernel.

And one that the server closes as a request comes says nothing about that request: it may be sent again. But the server
may have read it, and bill it. Only whoever keeps the account may do so; here nothing is sent twice.

What a server sends is parsed a little at a time, with a turn for others between: a parser makes thousands of objects of
one read of the socket, if that is all empty answers or chunks of one byte. And what carries nothing has a bound.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import ServerDisconnectedError, StreamReader, TCPConnector
from aiohttp.client_proto import ResponseHandler

from .stream import Endless

SLEPT_S = 1.0  # of sleep, after which what was kept is not trusted
IDLE_S = 5.0  # since the last request began: before that, no route is looked up, which takes as long as a tenth of ours
UNHEARD_S = 5  # without an acknowledgement of what was sent, or of a question whether there is still somebody
QUIET_S = 10  # of an answer without a byte, after which the other end's kernel is asked, and each UNHEARD_S again
N_ASKED = 3  # times, before the connection is given up: a server that thinks for minutes keeps it, a dead one does not

MAX_FED = 8 * 1024  # bytes that are parsed at a time
TURN_WORK = 64 * 1024  # bytes that are parsed before others have a turn; one that is not of the body counts as so many:
FRAMING_WORK = 32
MAX_INFORMATIONAL = 32  # answers of 1xx before the true one; nobody sends more than one or two
MAX_FRAMING = 256 * 1024  # bytes behind a head that are not of the body, and as many more as the body has; to send
# each token as a chunk takes a tenth of it

# Names of the options by system: macOS has its own for the first two.
_OPTIONS = (
    ("TCP_KEEPIDLE", QUIET_S), ("TCP_KEEPALIVE", QUIET_S), ("TCP_KEEPINTVL", UNHEARD_S), ("TCP_KEEPCNT", N_ASKED),
    ("TCP_USER_TIMEOUT", UNHEARD_S * 1000),
)  # fmt: skip
_TCP_RXT_CONNDROPTIME = 0x80  # macOS's TCP_USER_TIMEOUT, in s, which Python does not name

# A clock that goes on while the machine sleeps: Linux has one of that name, macOS's monotonic one does.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class KeptDrop(ServerDisconnectedError):
    """The server closed a kept connection before a byte of its response came: it may have read the request, or not.

    llama-server closes after an answer, and tells it too late for a request that follows at once.
    """


class KeptConnections(TCPConnector):
    """aiohttp's pool, whose connections know whether they are to be trusted."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = cast(Any, partial(KeptConnection, self._loop))


class KeptConnection(ResponseHandler):
    """One connection. It has carried `_n_sent` requests, the last of them `_heard` or not.

    `_rest` has been read and is not parsed yet. Of the response under way so many bytes have come, and 1xx answers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._rest, self._is_scheduled = bytearray(), False
        self._n_bytes = self._n_informational = 0
        self._body: StreamReader | None = None
        self._n_sent, self._heard = 0, False
        self._slept_s, self._used_at = slept_s(), time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands: let the kernel see whether it still does."""
        super().connection_made(transport)
        if (end := transport.get_extra_info("socket")) is not None:
            _watch(end)

    def is_connected(self) -> bool:
        """Whether it may be used, for all that is known; asked before each request on a kept connection."""
        if not super().is_connected() or slept_s() - self._slept_s >= SLEPT_S:
            return False
        return time.monotonic() - self._used_at < IDLE_S or self._is_on_its_way()

    def set_response_params(self, **settings: Any) -> None:
        """A request follows."""
        self._n_sent, self._heard = self._n_sent + 1, False
        self._slept_s, self._used_at = slept_s(), time.monotonic()
        self._rest.clear()
        self._n_bytes = self._n_informational = 0
        self._body = None
        super().set_response_params(**settings)

    @property
    def should_close(self) -> bool:
        """Whether it cannot carry another request; nor can one on which more came than was asked for."""
        return bool(self._rest) or super().should_close

    def data_received(self, data: bytes) -> None:
        """Bytes have come; none if the parser may go on with what it has."""
        self._heard = self._heard or bool(data)
        if not data or not (self._rest or len(data) > MAX_FED):
            self._feed(data)
            return
        self._rest += data
        if not self._is_scheduled:
            self._feed_rest()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """The body has room again: for what has come, then for what is in the socket. Asked for each HTTP chunk."""
        if not self._reading_paused:
            return  # the parser has what has come, or gets it in the next turn
        if not self._rest:
            super().resume_reading(resume_parser)
            return
        self._reading_paused = False
        if resume_parser:
            self._feed(b"")
        self._feed_rest_soon()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection has ended; what came before that counts, unless it was ended here."""
        rest = bytes(self._rest)
        self._rest.clear()
        if rest and self.transport is not None:
            self._feed(rest)
        super().connection_lost(exc)
        self._body = None  # which holds this connection

    def feed_data(self, data: tuple[Any, StreamReader], size: int = 0) -> None:
        """The parser has found a response's head; its body follows."""
        message, self._body = data
        if 100 <= message.code < 200 and message.code != 101:
            self._n_informational += 1
            if self._n_informational > MAX_INFORMATIONAL:
                self._give_up(f"it begins with more than {MAX_INFORMATIONAL} informational answers")
                return
        self._n_bytes = 0
        super().feed_data(data, size)

    def _feed_rest_soon(self) -> None:
        """Parse more in the next turn; meanwhile no more is read of the socket."""
        if self._rest and not self._is_scheduled and self.transport is not None:
            self._is_scheduled = True
            self.transport.pause_reading()
            self._loop.call_soon(self._feed_rest)

    def _feed_rest(self) -> None:
        """Parse a little more, unless the body is full: then its reader says when to go on."""
        self._is_scheduled = False
        work = 0
        while self._rest and work < TURN_WORK and self.transport is not None and not self._reading_paused:
            part, n_framing = bytes(self._rest[:MAX_FED]), self._n_framing
            del self._rest[:MAX_FED]
            self._feed(part)
            work += len(part) + FRAMING_WORK * max(0, self._n_framing - n_framing)
        if self.transport is None or self._reading_paused:
            return
        if self._rest:
            self._feed_rest_soon()
        else:
            self.transport.resume_reading()

    @property
    def _n_framing(self) -> int:
        """Of the bytes that have come with this response, those that are not its body's."""
        return self._n_bytes if self._body is None else self._n_bytes - self._body.total_bytes

    def _feed(self, data: bytes) -> None:
        """Parse bytes, and look how many of them were the body's."""
        self._n_bytes += len(data)
        super().data_received(data)
        n_body = 0 if self._body is None else self._body.total_bytes
        if self._n_bytes - n_body > MAX_FRAMING + n_body and self._body is not None:
            self._give_up(f"more than {MAX_FRAMING} of its bytes say nothing")

    def _give_up(self, why: str) -> None:
        """End a response that has no end, and with it the connection."""
        self._rest.clear()
        error = Endless(why)
        if self._body is not None:
            self._body.set_exception(error)
        self.set_exception(error)
        if self.transport is not None:
            self.transport.abort()

    def set_exception(self, exc: Any, *cause: Any) -> None:
        """The connection has failed. On a kept one that was silent that is a drop."""
        if self._n_sent > 1 and not self._heard and isinstance(exc, OSError | ServerDisconnectedError):
            exc = KeptDrop(f"{exc}" or type(exc).__name__)
        super().set_exception(exc, *cause)

    def _is_on_its_way(self) -> bool:
        """Whether a new connection to the same address would come from the same one of this machine."""
        transport = self.transport
        here, there = (transport.get_extra_info(name) if transport else None for name in ("sockname", "peername"))
        return here is None or there is None or source_of(there) == here[0]


def slept_s() -> float:
    """How long the machine has slept since it was started, s, as far as its clocks tell."""
    if _BOOTTIME is None:
        return time.time() - time.monotonic()
    return time.clock_gettime(_BOOTTIME) - time.monotonic()


def source_of(there: tuple[Any, ...]) -> str | None:
    """Return the address of this machine from which it would connect to `there` now; None where it could not.

    Asks the kernel's table of routes; nothing is sent.
    """
    family = socket.AF_INET6 if ":" in there[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.connect(there)
            found: str = end.getsockname()[0]
            return found
    except OSError:
        return None


def _watch(end: socket.socket) -> None:
    """Let the kernel give up a connection whose other end acknowledges nothing, as far as it can."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if (option := getattr(socket, name, None)) is not None:
            with suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform == "darwin":
        with suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, UNHEARD_S)
