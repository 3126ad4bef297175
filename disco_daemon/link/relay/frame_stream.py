"""Frames of `messages` over one connection: TLS to another machine, or a Unix socket to an engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from ...system.frames import BadFrameError, Frame, FrameFormat
from ..protocol import FRAMES, Refused, frame
from ..trust import tls
from ..trust.refusals import LinkEndedError

PIECE = 1 << 16  # bytes of a large frame that are read at a time: 0.5 s at 1 Mbit/s
READ_AHEAD = 1 << 18  # bytes that are taken off a socket before somebody wants them; twice as many at most
HIGH_WATER = 1 << 18  # bytes that wait to be sent before `drain` waits: 20 ms at 100 Mbit/s
UNSENT_BYTES = 1 << 17  # that wait in the kernel: what comes behind bulk rows, such as a ping, is soon on its way
LINGER_S = 0.25  # a refusal is lost if its connection is reset: what still comes is read for so long, and dropped
SIGNED_OFF_S = 1.0  # for the good-bye of a connection that is closed; then it is cut


class FrameStream:
    """A connection that carries frames; it owns its socket. `heard_at` is when bytes last came, by the loop's clock.

    All mutable state: the two counters of bytes, `heard_at`, and whether it is closed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self.n_sent = self.n_received = 0
        self.heard_at = self._loop.time()
        writer.transport.set_write_buffer_limits(high=HIGH_WATER)
        set_options(writer.get_extra_info("socket"))

    @property
    def n_waiting(self) -> int:
        """Bytes that were written and are not yet on their way."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def writer(self) -> asyncio.StreamWriter:
        """The writer, for what is not in frames, and for what TLS says of the other side."""
        return self._writer

    async def read(self, form: FrameFormat = FRAMES) -> Frame:
        """Return the next frame, whose tag is the number of the peer.

        Raises LinkEndedError: closed, certificate, or too_large before the frame's bytes are read.
        """
        try:
            return await form.receive(self.read_exactly)
        except BadFrameError as e:
            raise LinkEndedError("too_large", str(e), tell=True) from e

    async def read_exactly(self, n_bytes: int) -> bytes:
        """Return so many bytes. Each piece that comes is a sign of life. Raises LinkEndedError."""
        pieces: list[bytes] = []
        left = n_bytes
        while left:
            try:
                piece = await self._reader.readexactly(min(left, PIECE))
            except asyncio.IncompleteReadError as e:
                msg = "the other side has closed the connection"
                raise LinkEndedError("closed", msg) from e
            except OSError as e:
                raise ended_by(e) from e
            pieces.append(piece)
            left -= len(piece)
            self.n_received += len(piece)
            self.heard_at = self._loop.time()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_some(self, n_bytes: int) -> bytes:
        """Return up to so many bytes, none at the end. Raises LinkEndedError."""
        try:
            data = await self._reader.read(n_bytes)
        except OSError as e:
            raise ended_by(e) from e
        self.n_received += len(data)
        return data

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes; they wait here if the other side is slow. What is written to a closed connection is dropped."""
        if not self._writer.is_closing():
            self._writer.write(data)
            self.n_sent += len(data)

    async def drain(self) -> None:
        """Wait until most of what was written is on its way. Raises LinkEndedError."""
        try:
            await self._writer.drain()
        except OSError as e:
            raise ended_by(e) from e

    async def refuse(self, reason: str, message: str) -> None:
        """Tell the other side why it is not served, and close."""
        self.write(frame(Refused(reason=reason, message=message)))
        with contextlib.suppress(LinkEndedError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await self.read_some(READ_AHEAD):
                    pass
        await self.close()

    async def close(self) -> None:
        """Close the connection, within SIGNED_OFF_S; idempotent."""
        self._writer.close()
        try:
            async with asyncio.timeout(SIGNED_OFF_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            pass
        finally:
            self._writer.transport.abort()

    def abort(self) -> None:
        """Cut the connection at once."""
        self._writer.transport.abort()


def set_options(sock: socket.socket | None) -> None:
    """Let nothing wait for more, neither small frames in the kernel nor anything behind what it has not sent yet."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


async def say_last(sock: socket.socket, data: bytes) -> None:
    """Send a few bytes by a non-blocking socket, and let the other side read them before its connection is reset."""
    if not data:
        return
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, READ_AHEAD):
                pass


def ended_by(error: OSError) -> LinkEndedError:
    """Return what an error of a connection means."""
    if isinstance(error, ssl.SSLError):
        kind, message = tls.meaning(error)
        return LinkEndedError("closed" if kind == "other" else "certificate", message)
    return LinkEndedError("closed", f"the connection has broken: {error.strerror or error}")
