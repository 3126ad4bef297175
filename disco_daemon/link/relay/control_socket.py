"""One end of the socket between a daemon and its relay: whole messages, in order, some with a file descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque

from ...system.frames import BadFrameError, FrameBuffer, FrameFormat
from .orders import MAX_CONTROL, RelayEvent, ToRelay, encode

FRAMES = FrameFormat(MAX_CONTROL)
PIECE = 1 << 16  # bytes read at once
MAX_WAITING = 64  # descriptors that have come before their message was read
MAX_DESCRIPTORS = 4  # descriptors in one read; a message has one at most


class ControlClosedError(ConnectionError):
    """The other end has gone, or sent what is no message."""


class ControlSocket:
    """Sends and receives by a connected Unix stream socket, which it owns; `close` it.

    A frame's tag is how many descriptors come with it: none or one.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._came = FrameBuffer(FRAMES)
        self._descriptors: deque[int] = deque()
        self._sending = asyncio.Lock()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took; idempotent."""
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    async def send(self, message: ToRelay | RelayEvent, descriptor: int | None = None) -> None:
        """Send a message, and a duplicate of `descriptor` with it. Raises ControlClosedError."""
        data = FRAMES.pack(encode(message), tag=descriptor is not None)
        loop = asyncio.get_running_loop()
        async with self._sending:
            try:
                if descriptor is not None:
                    data = data[await self._send_with(data, descriptor) :]
                await loop.sock_sendall(self._sock, data)
            except (OSError, ValueError) as e:  # ValueError: closed meanwhile
                msg = "the other end of the control socket has gone"
                raise ControlClosedError(msg) from e

    async def receive(self) -> tuple[bytes, int | None]:
        """Return the next message's body, and the descriptor that came with it. Raises ControlClosedError."""
        try:
            while (found := self._came.take()) is None:
                await self._read_more()
        except BadFrameError as e:
            raise ControlClosedError(str(e)) from e
        body, _, n_descriptors = found
        if n_descriptors and not self._descriptors:
            msg = "a message comes without its descriptor"
            raise ControlClosedError(msg)
        return body, self._descriptors.popleft() if n_descriptors else None

    async def _read_more(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, PIECE, MAX_DESCRIPTORS)
            except BlockingIOError:
                await self._ready(writing=False)
                continue
            except (OSError, ValueError) as e:
                msg = "the control socket has broken"
                raise ControlClosedError(msg) from e
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                self._descriptors.append(descriptor)
            if len(self._descriptors) > MAX_WAITING:
                msg = "descriptors come that belong to no message"
                raise ControlClosedError(msg)
            if not data:
                msg = "the other end of the control socket has gone"
                raise ControlClosedError(msg)
            self._came.feed(data)
            return

    async def _send_with(self, data: bytes, descriptor: int) -> int:
        """Send the first bytes with the descriptor; return how many."""
        while True:
            try:
                return socket.send_fds(self._sock, [data], [descriptor])
            except BlockingIOError:
                await self._ready(writing=True)

    async def _ready(self, *, writing: bool) -> None:
        """Wait until the socket can be read, or written to."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        number = self._sock.fileno()
        if number < 0:
            msg = "the control socket is closed"
            raise ControlClosedError(msg)
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

        def ring() -> None:
            if not waiting.done():
                waiting.set_result(None)

        add(number, ring)
        try:
            await waiting
        finally:
            remove(number)
