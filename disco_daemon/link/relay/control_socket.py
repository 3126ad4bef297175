"""One end of the socket between a daemon and its relay: whole messages, in order, some with a file descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque

from .orders import LENGTH, MAX_CONTROL, RelayEvent, ToRelay, encode, has_descriptor

PIECE = 1 << 16  # bytes read at once
MAX_WAITING = 64  # descriptors that have come before their message was read
MAX_DESCRIPTORS = 4  # descriptors in one read; a message has one at most


class ControlClosedError(ConnectionError):
    """The other end has gone, or sent what is no message."""


class ControlSocket:
    """Sends and receives by a connected Unix stream socket, which it owns; `close` it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._data = bytearray()
        self._descriptors: deque[int] = deque()
        self._sending = asyncio.Lock()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took; idempotent."""
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    async def send(self, message: ToRelay | RelayEvent, descriptor: int | None = None) -> None:
        """Send a message, and a duplicate of `descriptor` with it. Raises ControlClosedError."""
        if has_descriptor(message) != (descriptor is not None):
            msg = f"{type(message).__name__} and its descriptor do not fit"
            raise ValueError(msg)
        data = encode(message)
        loop = asyncio.get_running_loop()
        async with self._sending:
            try:
                if descriptor is not None:
                    data = data[await self._send_with(data, descriptor) :]
                await loop.sock_sendall(self._sock, data)
            except (OSError, ValueError) as e:  # ValueError: closed meanwhile
                msg = "the other end of the control socket has gone"
                raise ControlClosedError(msg) from e

    async def receive(self) -> tuple[bytes, deque[int]]:
        """Return the next message's body, and the descriptors that have come and were not taken.

        The reader takes one (`popleft`) for each message that has one. Raises ControlClosedError.
        """
        while True:
            if len(self._data) >= LENGTH.size:
                (n_bytes,) = LENGTH.unpack_from(self._data)
                if n_bytes > MAX_CONTROL:
                    msg = f"a control message of {n_bytes} bytes"
                    raise ControlClosedError(msg)
                if len(self._data) >= (end := LENGTH.size + n_bytes):
                    body = bytes(self._data[LENGTH.size : end])
                    del self._data[:end]
                    return body, self._descriptors
            await self._read_more()

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
            self._data += data
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
