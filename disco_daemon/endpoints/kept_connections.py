"""Connections to a server that are kept for the next request, and when they are not to be trusted any more.

A connection dies unseen: while the machine sleeps, when it is on another network, when a router forgets it. Nothing
tells, and a request into it waits for its whole time-out. So one that this machine slept with, or that would take
another way now, is closed before it is used; one whose other end acknowledges nothing is given up by the kernel.

And one that the server closes as a request comes says nothing about that request: it may be sent again. But the server
may have read it, and bill it. Only whoever keeps the account may do so; here nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import ServerDisconnectedError, TCPConnector
from aiohttp.client_proto import ResponseHandler

SLEPT_S = 1.0  # of sleep, after which what was kept is not trusted
IDLE_S = 5.0  # since the last request began: before that, no route is looked up, which takes as long as a tenth of ours
UNHEARD_S = 5  # without an acknowledgement of what was sent, or of a question whether there is still somebody
QUIET_S = 10  # of an answer without a byte, after which the other end's kernel is asked, and each UNHEARD_S again
N_ASKED = 3  # times, before the connection is given up: a server that thinks for minutes keeps it, a dead one does not

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
    """One connection. It has carried `_n_sent` requests, the last of them `_heard` or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
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
        super().set_response_params(**settings)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._heard = True
        super().data_received(data)

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
