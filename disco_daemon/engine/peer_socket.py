"""The engine's ends of the socket pairs that lead to relays, and through them to the machines with the other layers.

A relay may die, or be ended while nothing is to leave the machine; the engine outlives it. So the daemon hands over a
new socket for each life of a relay, by the engine's `door`.
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


class PresentRelay:
    """What is sent by the relay that there is now, if there is one; for the main thread."""

    def __init__(self) -> None:
        self._socket: PeerSocket | None = None

    def use(self, present: PeerSocket | None) -> None:
        """Send by this one from now on; None: nothing is sent, there is no relay."""
        self._socket = present

    def send(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        """Send one frame to a peer, if there is a relay. Raises BadFrameError if it is too large."""
        if self._socket is not None:
            self._socket.send(peer, message, payload)
