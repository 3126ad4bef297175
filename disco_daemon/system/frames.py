"""The one way in which bytes between two processes become messages, on this machine and between two. Pure.

A frame is three little-endian numbers of 4 bytes each, a message and raw bytes behind it: the lengths of the two, and a
*tag*, which each protocol uses as it likes: the number of a machine, the life of a connection, or that a file
descriptor comes with it. What a message says is the protocol's; here it is bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO

HEADER = struct.Struct("<III")
Frame = tuple[bytes, bytes, int]  # a message, still encoded, the bytes behind that, and the tag


class BadFrameError(ValueError):
    """Bytes that are no frame, or a frame beyond the limits; the text says which."""


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """The frames of one protocol: a message may have `max_body` bytes, and `max_behind` behind it."""

    max_body: int
    max_behind: int = 0

    def head(self, n_body: int, n_behind: int = 0, tag: int = 0) -> bytes:
        """Return what comes before a message. Raises BadFrameError if the frame is too large."""
        if n_body > self.max_body or n_behind > self.max_behind:
            raise self._too_large(n_body, n_behind)
        return HEADER.pack(n_body, n_behind, tag)

    def pack(self, body: bytes, behind: bytes | memoryview = b"", tag: int = 0) -> bytes:
        """Return a whole frame. Raises BadFrameError if it is too large."""
        return b"".join((self.head(len(body), len(behind), tag), body, behind))

    def lengths(self, head: bytes | bytearray) -> tuple[int, int, int]:
        """Return both lengths and the tag by a frame's first bytes, before the rest is read. Raises BadFrameError."""
        n_body, n_behind, tag = HEADER.unpack_from(head)
        if n_body > self.max_body or n_behind > self.max_behind:
            raise self._too_large(n_body, n_behind)
        return n_body, n_behind, tag

    def read(self, stream: BinaryIO) -> Frame | None:
        """Read a frame; None when the other end has gone. Blocks. Raises BadFrameError.

        A socket that was closed with frames unread says that the connection was reset, not that it ended.
        """
        try:
            if len(head := stream.read(HEADER.size)) < HEADER.size:
                return None
            n_body, n_behind, tag = self.lengths(head)
            body, behind = stream.read(n_body), stream.read(n_behind) if n_behind else b""
        except ConnectionError:
            return None
        return (body, behind, tag) if len(body) == n_body and len(behind) == n_behind else None

    async def receive(self, read_exactly: Callable[[int], Awaitable[bytes]]) -> Frame:
        """Read a frame by what returns just so many bytes. Raises BadFrameError, and what that raises."""
        n_body, n_behind, tag = self.lengths(await read_exactly(HEADER.size))
        body = await read_exactly(n_body)
        return body, await read_exactly(n_behind) if n_behind else b"", tag

    def _too_large(self, n_body: int, n_behind: int) -> BadFrameError:
        allowed = f"{self.max_body} + {self.max_behind} are allowed"
        return BadFrameError(f"a frame of {n_body} + {n_behind} bytes, where {allowed}")


class FrameBuffer:
    """Frames out of what has come of them so far, however it was cut.

    It holds no more than it was given, and refuses a frame that is too large as soon as its lengths are there. Where
    `most_behind` is given, it says of a message and its tag how many bytes may be behind it: more are not waited for.
    """

    def __init__(self, form: FrameFormat, most_behind: Callable[[bytes, int], int] | None = None) -> None:
        self._form, self._most_behind = form, most_behind
        self._data = bytearray()
        self._is_checked = most_behind is None  # that what is behind the present message may be so long

    def feed(self, data: bytes | memoryview) -> None:
        """Add what has come."""
        self._data += data

    def take(self) -> Frame | None:
        """Return the next frame; None if not all of it is there. Raises BadFrameError."""
        if len(self._data) < HEADER.size:
            return None
        n_body, n_behind, tag = self._form.lengths(self._data)
        at = HEADER.size + n_body
        if n_behind and not self._is_checked and len(self._data) >= at:
            self._check_behind(bytes(self._data[HEADER.size : at]), n_behind, tag)
        if len(self._data) < at + n_behind:
            return None
        with memoryview(self._data) as data:
            found = bytes(data[HEADER.size : at]), bytes(data[at : at + n_behind]), tag
        del self._data[: at + n_behind]
        self._is_checked = self._most_behind is None
        return found

    def _check_behind(self, body: bytes, n_behind: int, tag: int) -> None:
        assert self._most_behind is not None
        if n_behind > (most := self._most_behind(body, tag)):
            raise BadFrameError(f"{n_behind} bytes behind a message that has {most} at most")
        self._is_checked = True
