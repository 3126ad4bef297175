"""A host's process: `python -m disco_daemon.engine.hosts.process FD`.

It has segments of a model and no vocabulary: rows in, rows out. The main thread computes; all rows that wait for a
segment go into one batch. The reader thread takes frames off the socket and gives signs of life. When home goes away,
the socket ends and so does this process.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...confine import Access, confine
from ...peer.messages import BadFrameError
from ...types import LayerRange
from ..llama import gpu
from ..llama.model import N_BATCH, build, quiet
from ..llama.refusals import ModelError
from ..llama.rows import Row
from ..llama.segment import SegmentModel
from .messages import (
    AskSign,
    CellsSaved,
    ClearCells,
    ComputeRows,
    ForgetCells,
    HostRefused,
    HostSocket,
    LoadSegments,
    PutCells,
    RowsComputed,
    SaveCells,
    SegmentsLoaded,
    ShareCells,
    SignOfLife,
    ToHost,
    read_to_host,
)

NICE = 5  # as the engine's: home waits for what is computed here
Order = tuple[ToHost, bytes]


class Host:
    """The segments, and what is sent of them."""

    def __init__(self, home: HostSocket, segments: Sequence[SegmentModel]) -> None:
        self._home, self._segments = home, segments

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out all that waits, in its order. Raises ModelError."""
        waiting: list[tuple[ComputeRows, bytes]] = []
        for message, behind in orders:
            if isinstance(message, ComputeRows):
                n = len(message.places) + sum(len(flight.places) for flight, _ in waiting)
                if waiting and (waiting[0][0].segment != message.segment or n > N_BATCH):
                    self._compute(waiting)
                    waiting = []
                waiting.append((message, behind))
                continue
            self._compute(waiting)
            waiting = []
            self._obey(message, behind)
        self._compute(waiting)

    def _compute(self, flights: Sequence[tuple[ComputeRows, bytes]]) -> None:
        if not flights:
            return
        segment = self._segments[flights[0][0].segment]
        rows: list[Row] = [(0, position, seq, False) for flight, _ in flights for position, seq in flight.places]
        began = time.perf_counter()
        given = np.frombuffer(b"".join(behind for _, behind in flights), np.float32)
        computed = segment.run(rows, given.reshape(len(rows), segment.n_embd))
        took_s, at = time.perf_counter() - began, 0
        for flight, _ in flights:
            n = len(flight.places)
            if flight.answered:
                message = RowsComputed(flight=flight.flight, n_batch=len(rows), took_s=took_s)
                self._home.send(message, computed[at : at + n].tobytes())
            at += n

    def _obey(self, message: ToHost, behind: bytes) -> None:
        match message:
            case ForgetCells(segment=number, seq=seq, start=start):
                self._segments[number].forget(seq, start)
            case ShareCells(segment=number, source=source, seq=seq, n=n):
                self._segments[number].share(source, seq, n)
            case ClearCells(segment=number):
                self._segments[number].clear()
            case SaveCells(segment=number, seq=seq, start=start, end=end):
                self._home.send(CellsSaved(), self._segments[number].part(seq, start, end))
            case PutCells(segment=number, owners=owners, start=start, end=end):
                self._segments[number].put(behind, owners, start, end)


def serve(home: HostSocket) -> None:
    """Load the segments that home names first, then compute until it goes away. Raises BadFrameError, OSError."""
    stream = home.sock.makefile("rb")
    first = read_to_host(stream)
    if first is None:
        return
    message, _, home.epoch = first
    if not isinstance(message, LoadSegments):
        msg = f"the first message must be LoadSegments, not {type(message).__name__}"
        raise BadFrameError(msg)
    confine(Access(read=[Path(load.model_path) for load in message.loads]), gpu.free_bytes)
    quiet()
    try:
        segments = [SegmentModel(load, LayerRange(*load.layers)) for load in message.loads]
    except (ModelError, ValueError) as e:
        home.send(HostRefused(reason=str(e)))
        return
    home.send(SegmentsLoaded(build=build(), pid=os.getpid()))
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def read() -> None:
        try:
            while (found := read_to_host(stream)) is not None:
                if isinstance(found[0], AskSign):
                    home.send(SignOfLife())
                elif found[2] == home.epoch:
                    orders.put(found[:2])
        except (BadFrameError, OSError) as e:
            os.write(2, f"the connection to home ends: {e}\n".encode())
        os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    host = Host(home, segments)
    while True:
        waiting = [orders.get()]
        while not orders.empty():
            waiting.append(orders.get())
        host.carry_out(waiting)


def main() -> None:
    """Serve the home behind the inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; home ends us by closing the socket
    os.nice(NICE)
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(HostSocket(sock))
    except ModelError as e:
        sys.exit(f"the host ends: {e}")
    except OSError:
        sys.exit(0)  # home has gone


if __name__ == "__main__":
    main()
