"""What goes between home and a host: a frame's two lengths and its epoch, a message, and raw bytes behind it.

The order of a connection's frames is the order of their effects. A verb is never answered; one that fails ends the
connection, and with it the host. Rows are 4-byte numbers, n x n_embd. An *epoch* is one life of a connection: a frame
of another one came too late, and is dropped.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol, TypeVar

import msgspec

from ...peer.messages import HEADER, MAX_HEADER, BadFrameError
from ..wire import Load

MAX_BEHIND = 1 << 30  # bytes behind a message: the cells of a long text


class HostMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages."""


class LoadSegments(HostMessage, frozen=True, kw_only=True):
    """The first: what the host computes, a file and its layers for each segment, which go by their number from 0."""

    loads: tuple[Load, ...]


class SegmentsLoaded(HostMessage, frozen=True, kw_only=True):
    """They are there: computed by this `build` of llama.cpp, in process `pid`."""

    build: str
    pid: int


class HostRefused(HostMessage, frozen=True, kw_only=True):
    """The host cannot load them, and ends."""

    reason: str


class ComputeRows(HostMessage, frozen=True, kw_only=True):
    """Compute the rows behind this message, each with its position and its sequence; `answered`: and send them on."""

    segment: int
    flight: int
    places: tuple[tuple[int, int], ...]
    answered: bool = True


class RowsComputed(HostMessage, frozen=True, kw_only=True):
    """What came of a flight's rows, behind this message. They were computed in a batch of `n_batch`, in `took_s`."""

    flight: int
    n_batch: int
    took_s: float


class ForgetCells(HostMessage, frozen=True, kw_only=True):
    """Take a sequence's cells from position `start` on."""

    segment: int
    seq: int
    start: int


class ShareCells(HostMessage, frozen=True, kw_only=True):
    """Let `seq` have the first `n` cells of `source`."""

    segment: int
    source: int
    seq: int
    n: int


class ClearCells(HostMessage, frozen=True, kw_only=True):
    """Free all cells."""

    segment: int


class SaveCells(HostMessage, frozen=True, kw_only=True):
    """Send what a sequence has at the positions from `start` to `end`."""

    segment: int
    seq: int
    start: int
    end: int


class CellsSaved(HostMessage, frozen=True, kw_only=True):
    """What a sequence has, behind this message."""


class PutCells(HostMessage, frozen=True, kw_only=True):
    """Put what is behind this message into new cells, at the positions from `start` to `end` of the `owners`."""

    segment: int
    owners: tuple[int, ...]
    start: int
    end: int


class AskSign(HostMessage, frozen=True, kw_only=True):
    """Is anybody there? The host's reader answers, whatever is being computed."""


class SignOfLife(HostMessage, frozen=True, kw_only=True):
    """Yes."""


ToHost = LoadSegments | ComputeRows | ForgetCells | ShareCells | ClearCells | SaveCells | PutCells | AskSign
FromHost = SegmentsLoaded | HostRefused | RowsComputed | CellsSaved | SignOfLife
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_to_host, _from_host = msgspec.msgpack.Decoder(ToHost), msgspec.msgpack.Decoder(FromHost)


class HostSocket:
    """One end of a connection. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket, epoch: int = 0) -> None:
        self.sock, self.epoch = sock, epoch
        self._lock = threading.Lock()

    def send(self, message: ToHost | FromHost, behind: bytes | memoryview = b"") -> None:
        """Send one frame. Raises OSError."""
        body = _encoder.encode(message)
        with self._lock:
            self.sock.sendall(b"".join((HEADER.pack(len(body), len(behind), self.epoch), body, behind)))


class ByteStream(Protocol):
    """Where frames are read."""

    def read(self, n: int, /) -> bytes:
        """Return the next `n` bytes, fewer at the end. Raises OSError."""


def read_to_host(stream: ByteStream) -> tuple[ToHost, bytes, int] | None:
    """Return the next message, what is behind it, and its epoch; None at the end. Raises BadFrameError, OSError."""
    found = _read(stream)
    return None if found is None else (_decoded(_to_host, found[0]), found[1], found[2])


def read_from_host(stream: ByteStream) -> tuple[FromHost, bytes, int] | None:
    """Return the next message, what is behind it, and its epoch; None at the end. Raises BadFrameError, OSError."""
    found = _read(stream)
    return None if found is None else (_decoded(_from_host, found[0]), found[1], found[2])


def _read(stream: ByteStream) -> tuple[bytes, bytes, int] | None:
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    n_body, n_behind, epoch = HEADER.unpack(head)
    if n_body > MAX_HEADER or n_behind > MAX_BEHIND:
        msg = f"a frame of {n_body} + {n_behind} bytes, where {MAX_HEADER} + {MAX_BEHIND} are allowed"
        raise BadFrameError(msg)
    body, behind = stream.read(n_body), stream.read(n_behind)
    return None if len(body) < n_body or len(behind) < n_behind else (body, behind, epoch)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        msg = f"no message between home and host: {e}"
        raise BadFrameError(msg) from e
