"""How messages between daemon and engine become bytes: a 4-byte little-endian length and one msgpack message each."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

from .wire import Message

MAX_FRAME = 64 * 1024 * 1024  # bytes; a request body is at most 8 MiB, so this only catches a broken peer
_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class Unsendable(ValueError):
    """A message cannot be encoded; the error's text is fit for a user."""


def frame(message: Message) -> bytes:
    """Encode one message with its length in front. Raises Unsendable."""
    try:
        body = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as e:  # an integer of 65 bits, half a character
        msg = f"the request cannot be sent to the engine: {e}"
        raise Unsendable(msg) from e
    if len(body) > MAX_FRAME:
        msg = f"the request is too large for the engine: {len(body)} bytes, at most {MAX_FRAME} are possible"
        raise Unsendable(msg)
    return _HEADER.pack(len(body)) + body


def _length(header: bytes) -> int:
    (n,) = _HEADER.unpack(header)
    if n > MAX_FRAME:
        msg = f"a frame of {n} bytes exceeds the limit of {MAX_FRAME}"
        raise ValueError(msg)
    return int(n)


def read_blocking(sock: socket.socket) -> bytes | None:
    """Read one frame's body in the engine process; None when the daemon has gone.

    A socket that the daemon closed with frames unread says that the connection was reset, not that it ended.
    """
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _length(header))


def _read_exactly(sock: socket.socket, n: int) -> bytes | None:
    parts: list[bytes] = []
    while n:
        try:
            part = sock.recv(min(n, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


async def read_async(reader: asyncio.StreamReader) -> bytes | None:
    """Read one frame's body in the daemon; None when the engine has gone."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return await reader.readexactly(_length(header))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
