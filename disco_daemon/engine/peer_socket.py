"""The engine's ends of the socket pairs that lead to relays, and through them to the machines with the other layers.

A relay may die, or be ended while nothing is to leave the machine; the engine outlives it. So the daemon hands over a
new socket for each life of a relay, through one that stays.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from ..link.protocol import FRAMES, PeerFrame, decode, frame


class PeerSocket:
    """Sends frames by a thread of its own, so that a slow network never holds up what is computed.

    What waits in its queue is bounded by the credits that each answer's rows need (`link.rows.edge_rows`).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="peer writer", daemon=True).start()

    def send(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        """Queue one frame to a peer. Raises BadFrameError if it is too large."""
        self._queue.put(frame(message, payload, peer))

    def read(self) -> Iterator[tuple[int, PeerFrame, bytes]]:
        """Yield each frame as (peer, message, bytes behind it), until the relay has gone. Raises BadFrameError."""
        with self._sock.makefile("rb") as stream:
            while (found := FRAMES.read(stream)) is not None:
                body, behind, peer = found
                yield peer, decode(body), behind

    def close(self) -> None:
        """End the thread, and close the socket; what waits is dropped."""
        self._queue.put(None)
        self._sock.close()

    def _write(self) -> None:
        with suppress(OSError):  # the relay has gone, which the reader notices, too
            while (data := self._queue.get()) is not None:
                self._sock.sendall(data)


class RelayDoor:
    """The socket through which the daemon hands over one to each relay, and what is sent by the present one.

    `sockets` is for a thread of its own, all else for the main one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._present: PeerSocket | None = None

    def sockets(self) -> Iterator[PeerSocket]:
        """Yield the end of each socket to a relay, as the daemon hands it over, until that has gone."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            if not data:
                return
            yield PeerSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptors[0]))

    def use(self, present: PeerSocket | None) -> None:
        """Send by this one from now on; None: nothing is sent, there is no relay."""
        self._present = present

    def send(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        """Send one frame to a peer, if there is a relay. Raises BadFrameError if it is too large."""
        if self._present is not None:
            self._present.send(peer, message, payload)


def hand_over(door: socket.socket) -> socket.socket:
    """Make a socket pair to the engine behind `door`; return the end that is for a relay. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(door, [b"."], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    return ours
