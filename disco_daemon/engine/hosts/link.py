"""Home's end of the connection to a host: orders go out, rows come back, and a host that is gone is noticed."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ...peer.messages import BadFrameError
from ..llama.hidden import FloatRows
from ..wire import Load
from .kept_rows import KeptRows, PutAgain, RowsAgain, ShareAgain
from .messages import (
    AskSign,
    CellsSaved,
    ComputeRows,
    FromHost,
    HostRefused,
    HostSocket,
    LoadSegments,
    PutCells,
    RowsComputed,
    SaveCells,
    SegmentsLoaded,
    ShareCells,
    ToHost,
    read_from_host,
)

SILENT_S = 3.5  # a host that gives no sign of life for so long is gone
ASK_S = 1.0  # of silence, until it is asked for one


M = TypeVar("M", bound=FromHost)


class HostGoneError(Exception):
    """The host has ended, is silent, or sends what it should not; its text says which."""


class HostLink:
    """One life of a host that has one segment of `n_embd` numbers a row. Raises HostGoneError where it is gone."""

    def __init__(self, sock: socket.socket, load: Load, n_embd: int, epoch: int) -> None:
        """Let the host behind the socket load its segment, and wait until it has."""
        self._socket, self._n_embd = HostSocket(sock, epoch), n_embd
        # What is sent to a host that has stopped fills the socket: that is silence, too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 3, 500_000))
        self._early: deque[tuple[RowsComputed, bytes]] = deque()
        self.n_rows, self.busy_s = 0, 0.0  # what it computed for flights
        self._tell(LoadSegments(loads=(load,)))
        self.pid, self.build = 0, ""
        message, _ = self._next(SegmentsLoaded)
        self.pid, self.build = message.pid, message.build

    def tell(self, message: ToHost, behind: bytes | memoryview = b"") -> None:
        """Send an order, which is not answered."""
        self._tell(message, behind)

    def send(self, flight: int, places: Sequence[tuple[int, int]], rows: FloatRows, *, answered: bool = True) -> None:
        """Send a flight's rows."""
        message = ComputeRows(segment=0, flight=flight, places=tuple(places), answered=answered)
        self._tell(message, np.ascontiguousarray(rows, np.float32).data.cast("B"))

    def receive(self, flight: int, n: int) -> FloatRows:
        """Wait for a flight's rows, n x n_embd: all of them numbers."""
        message, behind = self._early.popleft() if self._early else self._next(RowsComputed)
        if message.flight != flight or len(behind) != 4 * n * self._n_embd:
            msg = f"it sent {len(behind)} bytes for flight {message.flight} in place of {n} rows for {flight}"
            raise HostGoneError(msg)
        rows = np.frombuffer(behind, np.float32).reshape(n, self._n_embd)
        if not np.isfinite(rows).all():
            raise HostGoneError("it sent what is no number")
        self.n_rows += n
        self.busy_s += message.took_s * n / message.n_batch
        return rows

    def save(self, seq: int, start: int, end: int) -> bytes:
        """Return what a sequence has at these positions."""
        self._tell(SaveCells(segment=0, seq=seq, start=start, end=end))
        return self._next(CellsSaved)[1]

    def replay(self, kept: KeptRows, without: Sequence[int]) -> None:
        """Give a new host the cells that the lost one had."""
        for step in kept.replay(without):
            match step:
                case RowsAgain(places, rows):
                    self.send(-1, places, rows, answered=False)
                case ShareAgain(source, seq, n):
                    self._tell(ShareCells(segment=0, source=source, seq=seq, n=n))
                case PutAgain(owner, start, end, saved):
                    self._tell(PutCells(segment=0, owners=(owner,), start=start, end=end), saved)

    def close(self) -> None:
        """End the connection, and with it the host."""
        self._socket.sock.close()

    def _tell(self, message: ToHost, behind: bytes | memoryview = b"") -> None:
        try:
            self._socket.send(message, behind)
        except OSError as e:
            msg = f"the connection has broken: {e.strerror}"
            raise HostGoneError(msg) from e

    def _next(self, wanted: type[M]) -> tuple[M, bytes]:
        """Return the next message of this kind and what is behind it; rows that come before it are kept."""
        while True:
            try:
                found = read_from_host(self)
            except (BadFrameError, OSError) as e:
                raise HostGoneError(str(e)) from e
            if found is None:
                raise HostGoneError("its process has ended")
            message, behind, epoch = found
            if isinstance(message, HostRefused):
                raise HostGoneError(message.reason)
            if epoch == self._socket.epoch and isinstance(message, wanted):
                return message, behind
            if epoch == self._socket.epoch and isinstance(message, RowsComputed):
                self._early.append((message, behind))

    def read(self, n: int) -> bytes:
        """Return the next `n` bytes, fewer at the end; for `messages`. Each that comes is a sign of life."""
        pieces = list[bytes]()
        while n:
            self._wait()
            piece = self._socket.sock.recv(n)
            if not piece:
                break
            pieces.append(piece)
            n -= len(piece)
        return b"".join(pieces)

    def _wait(self) -> None:
        """Wait until there is something to read."""
        began = time.monotonic()
        while not select.select([self._socket.sock], [], [], ASK_S)[0]:
            if time.monotonic() - began > SILENT_S:
                msg = f"it was silent for {SILENT_S} s"
                raise HostGoneError(msg)
            self._tell(AskSign())
