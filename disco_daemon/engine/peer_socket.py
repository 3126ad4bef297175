"""The engine's end of the socket pair that leads to the relay, and through it to the machines with the other layers."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

from ..peer.messages import HEADER, PeerFrame, check_lengths, decode, frame


class PeerSocket:
    """Sends frames by a thread of its own, so that a slow network never holds up what is computed.

    What waits in its queue is bounded by the credits that each answer's rows need (`peer.edge`).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.bytes_up = self.bytes_down = 0
        threading.Thread(target=self._write, name="peer writer", daemon=True).start()

    def send(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        """Queue one frame to a peer. Raises BadFrameError if it is too large."""
        data = frame(message, payload, peer)
        self.bytes_up += len(data)
        self._queue.put(data)

    def read(self) -> Iterator[tuple[int, PeerFrame, bytes]]:
        """Yield each frame as (peer, message, bytes behind it), until the relay has gone. Raises BadFrameError."""
        with self._sock.makefile("rb") as stream:
            while len(head := stream.read(HEADER.size)) == HEADER.size:
                n_body, n_payload, peer = HEADER.unpack(head)
                check_lengths(n_body, n_payload)
                body, payload = stream.read(n_body), stream.read(n_payload)
                if len(body) < n_body or len(payload) < n_payload:
                    return
                self.bytes_down += HEADER.size + n_body + n_payload
                yield peer, decode(body), payload

    def _write(self) -> None:
        try:
            while True:
                self._sock.sendall(self._queue.get())
        except OSError:  # the relay has gone, which the reader notices, too
            return
