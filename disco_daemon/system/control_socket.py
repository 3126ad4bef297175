"""Whole messages between this program's own processes, in order, some with a file descriptor: both ends of a socket.

A frame's tag is how many descriptors come with it: none or one. What a message says is its two ends' affair.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from .frames import BadFrameError, FrameBuffer, FrameFormat

if TYPE_CHECKING:
    import asyncio  # at run time where there is a loop: an engine has none, and would take a twentieth longer to start

FRAMES = FrameFormat(1 << 28)  # bytes of a message: a training's job has the texts that its user wants learned
PIECE = 1 << 16  # bytes read at once
MAX_WAITING = 64  # descriptors that have come before their message was read
MAX_DESCRIPTORS = 4  # descriptors in one read; a message has one at most

encode = msgspec.msgpack.Encoder().encode


class ControlClosedError(ConnectionError):
    """The other end has gone, or sent what is no message."""


class _Came:
    """What has come of messages and descriptors so far, however it was cut."""

    def __init__(self, form: FrameFormat) -> None:
        self._frames, self._descriptors = FrameBuffer(form), deque[int]()

    def feed(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Add what was read. Raises ControlClosedError."""
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        if len(self._descriptors) > MAX_WAITING:
            raise ControlClosedError("descriptors come that belong to no message")
        if not data:
            raise ControlClosedError("the other end of the control socket has gone")
        self._frames.feed(data)

    def take(self) -> tuple[bytes, int | None] | None:
        """Return the next message's body and descriptor; None if not all of it is there. Raises ControlClosedError."""
        try:
            found = self._frames.take()
        except BadFrameError as e:
            raise ControlClosedError(str(e)) from e
        if found is None:
            return None
        body, _, n_descriptors = found
        if n_descriptors and not self._descriptors:
            raise ControlClosedError("a message comes without its descriptor")
        return body, self._descriptors.popleft() if n_descriptors else None

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


class ControlSocket:
    """Sends and receives by a connected Unix stream socket, which it owns; `close` it."""

    def __init__(self, sock: socket.socket, form: FrameFormat = FRAMES) -> None:
        sock.setblocking(False)
        import asyncio

        self._sock, self._form, self._came = sock, form, _Came(form)
        self._sending, self._loop = asyncio.Lock(), asyncio.get_running_loop

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took; idempotent."""
        self._sock.close()
        self._came.close()

    async def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send a message, and a duplicate of `descriptor` with it. Raises BadFrameError, ControlClosedError."""
        data = self._form.pack(encode(message), tag=descriptor is not None)
        loop = self._loop()
        async with self._sending:
            try:
                if descriptor is not None:
                    data = data[await self._send_with(data, descriptor) :]
                await loop.sock_sendall(self._sock, data)
            except (OSError, ValueError) as e:  # ValueError: closed meanwhile
                raise ControlClosedError("the other end of the control socket has gone") from e

    async def receive(self) -> tuple[bytes, int | None]:
        """Return the next message's body, and the descriptor that came with it. Raises ControlClosedError."""
        while (found := self._came.take()) is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, PIECE, MAX_DESCRIPTORS)
            except BlockingIOError:
                await self._ready(writing=False)
                continue
            except (OSError, ValueError) as e:
                raise ControlClosedError("the control socket has broken") from e
            self._came.feed(data, descriptors)
        return found

    async def _send_with(self, data: bytes, descriptor: int) -> int:
        """Send the first bytes with the descriptor; return how many."""
        while True:
            try:
                return socket.send_fds(self._sock, [data], [descriptor])
            except BlockingIOError:
                await self._ready(writing=True)

    async def _ready(self, *, writing: bool) -> None:
        """Wait until the socket can be read, or written to."""
        loop = self._loop()
        waiting: asyncio.Future[None] = loop.create_future()
        number = self._sock.fileno()
        if number < 0:
            raise ControlClosedError("the control socket is closed")
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

        def ring() -> None:
            if not waiting.done():
                waiting.set_result(None)

        add(number, ring)
        try:
            await waiting
        finally:
            remove(number)


class BlockingControl:
    """The same for threads, which may wait: one of them reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._came, self._sending = sock, _Came(FRAMES), threading.Lock()

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send a message, and a duplicate of `descriptor` with it. Raises OSError."""
        data = FRAMES.pack(encode(message), tag=descriptor is not None)
        with self._sending:
            if descriptor is not None:
                data = data[socket.send_fds(self._sock, [data], [descriptor]) :]
            self._sock.sendall(data)

    def receive(self) -> tuple[bytes, int | None]:
        """Return the next message's body, and the descriptor that came with it. Raises OSError, ControlClosedError."""
        while (found := self._came.take()) is None:
            data, descriptors, _, _ = socket.recv_fds(self._sock, PIECE, MAX_DESCRIPTORS)
            self._came.feed(data, descriptors)
        return found

    def end_with(self, end: Callable[[], object] = lambda: os._exit(1)) -> None:
        """Call `end` when the other end has gone, from a thread: however the process that has it has ended."""

        def watch() -> None:
            try:
                while True:
                    self.receive()
            except OSError:
                end()

        threading.Thread(target=watch, name="end with its socket", daemon=True).start()
