"""The socket through which an engine asks the daemon for hosts: it may start no process itself.

The engine sends a host's number, 1 to 255, whenever it needs a new process of it; the daemon answers with one byte and
a socket to that, or with a text that says why there is none. The byte says whether that is a process of ours: what
another machine lends says of itself what it likes.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol

GRANTED = b"."  # with a socket behind it, to a process of this machine
LENT = b"~"  # with a socket behind it, to what another machine lends
MAX_TEXT = 500  # bytes of a reason
MAX_NUMBER = 255  # of a host: it is asked for by one byte


class LentSocket(socket.socket):
    """The socket to a host that another machine lends."""


class HostDoor:
    """The engine's end; one thread asks at a time, and the others wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._asking = sock, threading.Lock()

    def open(self, number: int) -> socket.socket:
        """Return the socket to a new process of a host; the one before is ended. Raises OSError.

        The daemon ends an engine that is silent for too long, and its own end ends this: so the wait has a limit.
        """
        with self._asking:
            self._sock.sendall(bytes([number]))
            said, descriptors, _, _ = socket.recv_fds(self._sock, MAX_TEXT, 1)
        if not descriptors:
            raise OSError(0, said.decode("utf-8", "replace") or "the daemon has gone")
        kind = socket.socket if said == GRANTED else LentSocket
        return kind(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptors[0])


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
