"""The socket by which sockets come from the daemon to its engine, which may start no process and opens no connection.

An edge or a partner gets one to each life of a relay, as that comes. A fleet's home asks for the process of a host by
its number, whenever it needs a new one, and gets the socket to that, or the reason why there is none.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import msgspec

from ..system.control_socket import BlockingControl, ControlClosedError

MAX_HOSTS = 255  # of a fleet, by their numbers


class HostWanted(msgspec.Struct, frozen=True):
    """The engine needs a new process of this host; the one before is ended."""

    number: int


class SocketPassed(msgspec.Struct, frozen=True):
    """A socket comes with this; or `why` there is none.

    `is_lent`: it leads to what another machine lends, which says of itself what it likes.
    """

    is_lent: bool = False
    why: str = ""


class LentSocket(socket.socket):
    """The socket to a host that another machine lends."""


class EngineDoor:
    """The engine's end; one thread asks at a time, and the others wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._control, self._asking = BlockingControl(sock), threading.Lock()

    def sockets(self) -> Iterator[socket.socket]:
        """Yield each socket that the daemon passes by itself, until that has gone."""
        with suppress(ControlClosedError):
            while True:
                yield self._taken()

    def open(self, number: int) -> socket.socket:
        """Return the socket to a new process of a host; the one before is ended. Raises OSError.

        The daemon ends an engine that is silent for too long, and its own end ends this: so the wait has a limit.
        """
        with self._asking:
            self._control.send(HostWanted(number))
            return self._taken()

    def _taken(self) -> socket.socket:
        body, descriptor = self._control.receive()
        said = msgspec.msgpack.decode(body, type=SocketPassed)
        if descriptor is None:
            raise OSError(0, said.why)
        kind = LentSocket if said.is_lent else socket.socket
        return kind(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor)


def hand_over(door: socket.socket) -> socket.socket:
    """Make a socket pair to the engine behind `door`; return the end that is for a relay. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            BlockingControl(door).send(SocketPassed(), theirs.fileno())
        except BaseException:  # whatever it was: nobody else has this end; it is raised again
            ours.close()
            raise
    return ours


class Hosts(Protocol):
    """The processes of one engine's hosts, as its supervisor needs them."""

    async def prepare(self) -> None:
        """Write what the engine and its hosts load, if it is missing. Raises OSError."""
        ...

    def attach(self, door: socket.socket) -> None:
        """Start hosts as a new engine process asks for them, by the daemon's end of its door."""
        ...

    async def detach(self) -> None:
        """End all hosts, and wait for them: their engine process has gone. Idempotent."""
        ...
