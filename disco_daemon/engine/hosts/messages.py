"""What goes between home and a host: frames (`system.frames`) with a message and raw bytes; their tag is the epoch.

The order of a connection's frames is the order of their effects. A verb is never answered; one that fails ends the
connection, and with it the host. Rows are 4-byte numbers, n x n_embd. An *epoch* is one life of a connection: a frame
of another one came too late, and is dropped.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from typing import Annotated

import msgspec

from ...link.protocol import MAX_HEADER
from ...system.frames import BadFrameError, FrameFormat
from ..wire import Load

MAX_BEHIND = 1 << 30  # bytes behind a message: the cells of a long text
MAX_FROM_HOST = 1 << 16  # bytes of what a host says, without what is behind it: the rights it gave up take the most
TO_HOST, FROM_HOST = FrameFormat(MAX_HEADER, MAX_BEHIND), FrameFormat(MAX_FROM_HOST, MAX_BEHIND)
MAX_ROWS = 1 << 16  # rows in one batch: 128 times as many as a batch has
MAX_PID = 1 << 31  # of a process: Linux numbers them up to 2^22
N_BUILD = 500  # characters of what a host says it computes by; instruction sets take the most
N_RIGHT = 200  # characters of a right that a host has given up
N_RIGHTS = 50  # of those: there are some ten
N_REASON = 500  # characters of why a segment was not loaded
MAX_DONE = 1 << 53  # orders that a host has carried out: at a thousand a second in 285,000 years
MAX_CPU_S = 1e10  # of a processor: 300 years
SENT_AT_ONCE = 1 << 16  # bytes; less is copied behind its message, which is cheaper than another system call


MAX_SECONDS = 86400.0  # a day: what takes longer is no time that home may reckon with
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]


class HostMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages."""


class BeginHost(HostMessage, frozen=True, kw_only=True):
    """The first: from now on the host opens files in these folders only.

    Where it can, home sends a descriptor with it, to learn whether descriptors arrive.
    """

    folders: tuple[str, ...]


class HostReady(HostMessage, frozen=True, kw_only=True):
    """It computes by this `build` of llama.cpp, in process `pid`, which has given up the rights `confined` lists.

    `shares_memory`: a descriptor came with the first message, so that cells may go through common memory.
    """

    build: Annotated[str, msgspec.Meta(max_length=N_BUILD)]
    pid: Annotated[int, msgspec.Meta(ge=1, le=MAX_PID)]
    confined: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=N_RIGHT)], ...], msgspec.Meta(max_length=N_RIGHTS)
    ] = ()
    shares_memory: bool = False


class LoadSegment(HostMessage, frozen=True, kw_only=True):
    """Load these layers beside what is being computed; from then on they go by a number that is never used again.

    `moves_states` is what another process of the same build has said of the model, so that nobody tries it out again.
    """

    segment: int
    load: Load
    moves_states: bool | None = None


class SegmentLoaded(HostMessage, frozen=True, kw_only=True):
    """It is there; `moves_states`: what its sequences have can be cut and joined by layers."""

    segment: int
    moves_states: bool


class SegmentRefused(HostMessage, frozen=True, kw_only=True):
    """The host cannot load it."""

    segment: int
    reason: Annotated[str, msgspec.Meta(max_length=N_REASON)]


class ReleaseSegment(HostMessage, frozen=True, kw_only=True):
    """Free it with all that its sequences have, also while it is being loaded."""

    segment: int


class ComputeRows(HostMessage, frozen=True, kw_only=True):
    """Compute the rows behind this message, each with its position and its sequence; `answered`: and send them on."""

    segment: int
    flight: int
    places: tuple[tuple[int, int], ...]
    answered: bool = True


class RowsComputed(HostMessage, frozen=True, kw_only=True):
    """What came of a flight's rows, behind this message. They were computed in a batch of `n_batch`, in `took_s`.

    For `held_s` they were at the host, from when they had come until this was sent.
    """

    segment: int
    flight: int
    n_batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    took_s: Seconds
    held_s: Seconds = 0.0


class ForgetCells(HostMessage, frozen=True, kw_only=True):
    """Take a sequence's cells from position `start` on."""

    segment: int
    seq: int
    start: int


class ShareCells(HostMessage, frozen=True, kw_only=True):
    """Let `seq` have the first `n` cells of `source`, or those from position `start` on."""

    segment: int
    source: int
    seq: int
    n: int
    start: int = 0


class ClearCells(HostMessage, frozen=True, kw_only=True):
    """Free all cells."""

    segment: int


class CompactCells(HostMessage, frozen=True, kw_only=True):
    """Put these spans of cells to the front, in this order: positions from one to another, and who has them.

    All other cells are free then.
    """

    segment: int
    spans: tuple[tuple[int, int, tuple[int, ...]], ...]


class SaveCells(HostMessage, frozen=True, kw_only=True):
    """Send what a sequence has at the positions from `start` to `end`, of these layers alone or of all.

    The answer has the same `copy`. With a `memory`, they go there, from byte `at` on.
    """

    segment: int
    copy: int
    seq: int
    start: int
    end: int
    layers: tuple[int, int, int] | None = None
    memory: int = 0
    at: int = 0


class CellsSaved(HostMessage, frozen=True, kw_only=True):
    """What a sequence has: as llama.cpp saves it, or cut by layers. It is behind this message, or `n_shared` bytes."""

    copy: int
    n_shared: Annotated[int, msgspec.Meta(ge=0, le=MAX_BEHIND)] = 0


class PutCells(HostMessage, frozen=True, kw_only=True):
    """Put saved cells into new ones, at the positions from `start` to `end` of the `owners`.

    They are behind this message, or `n_shared` bytes of a `memory`, from byte `at` on.
    """

    segment: int
    owners: tuple[int, ...]
    start: int
    end: int
    memory: int = 0
    at: int = 0
    n_shared: int = 0


class TakeMemory(HostMessage, frozen=True, kw_only=True):
    """With this message comes the descriptor of a memory, which has this number from now on."""

    memory: int


class DropMemory(HostMessage, frozen=True, kw_only=True):
    """That memory is not needed any more."""

    memory: int


class AskSign(HostMessage, frozen=True, kw_only=True):
    """Is anybody there? The host's reader answers, whatever is being computed."""


class SignOfLife(HostMessage, frozen=True, kw_only=True):
    """Yes; and how far it is, by which home knows whether it gets on.

    So many orders are carried out, and what computes has had a processor for `cpu_s`; 0 where no system tells.
    """

    n_done: Annotated[int, msgspec.Meta(ge=0, le=MAX_DONE)] = 0
    cpu_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_CPU_S)] = 0.0


ToHost = (
    BeginHost
    | LoadSegment
    | ReleaseSegment
    | ComputeRows
    | ForgetCells
    | ShareCells
    | ClearCells
    | CompactCells
    | SaveCells
    | PutCells
    | TakeMemory
    | DropMemory
    | AskSign
)
FromHost = HostReady | SegmentLoaded | SegmentRefused | RowsComputed | CellsSaved | SignOfLife
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_to_host: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
_from_host: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


class HostSocket:
    """One end of a connection. Any thread may send; one reads.

    With a patience the other end is given up when it has taken nothing for so long, s.
    """

    def __init__(self, sock: socket.socket, epoch: int = 0, patience_s: float | None = None) -> None:
        self.sock, self.epoch, self._patience_s = sock, epoch, patience_s
        if patience_s is not None:
            whole_s = int(patience_s)
            wait = struct.pack("ll", whole_s, int(1e6 * (patience_s - whole_s)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._lock = threading.Lock()

    def send(self, message: ToHost | FromHost, behind: bytes | memoryview = b"") -> None:
        """Send one frame. Raises OSError."""
        body = _encoder.encode(message)
        head = TO_HOST.head(len(body), len(behind), self.epoch)
        with self._lock:
            if len(behind) < SENT_AT_ONCE:
                self._send_all(b"".join((head, body, behind)))
            else:
                self._send_all(head + body)
                self._send_all(behind)

    def send_with(self, message: ToHost, fd: int) -> None:
        """Send one frame with a descriptor, where the socket is one of this machine. Raises OSError."""
        if self.sock.family != socket.AF_UNIX:
            self.send(message)
            return
        frame = TO_HOST.pack(_encoder.encode(message), tag=self.epoch)
        with self._lock:
            n = socket.send_fds(self.sock, [frame], [fd])
            self._send_all(frame[n:])

    def _send_all(self, data: bytes | memoryview) -> None:
        """Send it all. Raises OSError.

        Where the time-out of the socket ends, the kernel says how much was taken before; `sendall` would begin to wait
        anew with the rest.
        """
        while True:
            began = time.monotonic()
            if (n := self.sock.send(data)) == len(data):
                return
            if self._patience_s is not None and time.monotonic() - began >= self._patience_s:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            data = memoryview(data)[n:]

    def send_if_free(self, message: FromHost) -> None:
        """Send one frame, unless another one is being sent: whoever waits for a sign has that. Raises OSError."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.send(message)


def most_to_host(body: bytes, _: int) -> int:
    """Return how many bytes may be behind a message to a host. Raises BadFrameError."""
    return MAX_BEHIND if isinstance(decode_to_host(body), ComputeRows | PutCells) else 0


def decode_to_host(body: bytes) -> ToHost:
    """Return a message to a host. Raises BadFrameError."""
    try:
        return _to_host.decode(body)
    except MALFORMED as e:
        raise BadFrameError(f"no message to a host: {e}") from e


def decode_from_host(body: bytes) -> FromHost:
    """Return a message from a host. Raises BadFrameError."""
    try:
        return _from_host.decode(body)
    except MALFORMED as e:
        raise BadFrameError(f"no message from a host: {e}") from e
