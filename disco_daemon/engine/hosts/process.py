"""A host's process: `python -m disco_daemon.engine.hosts.process FD`.

For a home on another machine the socket of the program that lends it comes before, and three words follow: its folder
of files, its threads and its memory (`lent`).

It has segments of a model and no vocabulary: rows in, rows out. The main thread computes; all rows that wait for a
segment go into one batch. The reader thread takes frames off the socket and gives signs of life. A segment is loaded by
a thread of its own, so that others go on meanwhile. When home goes away, the socket ends and so does this process.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # as in an engine

import numpy as np

from ...system.confine import Access, confine
from ...system.control_socket import BlockingControl
from ...system.frames import BadFrameError, FrameBuffer
from ...types import LayerRange
from ..lent_messages import HostTerms
from ..llama import gpu
from ..llama.layer_states import StateFormatError, moves_states, unpacked
from ..llama.memory import N_BATCH
from ..llama.model import build, quiet
from ..llama.refusals import ModelError, refuse_to_cut
from ..llama.rows import Row
from ..llama.segment import SegmentModel
from .cell_memory import read_all, write_all
from .lent import LentHost
from .memory_return import give_back_what_is_freed
from .messages import (
    N_REASON,
    TO_HOST,
    AskSign,
    BeginHost,
    CellsSaved,
    ClearCells,
    CompactCells,
    ComputeRows,
    DropMemory,
    ForgetCells,
    HostReady,
    HostSocket,
    LoadSegment,
    PutCells,
    ReleaseSegment,
    RowsComputed,
    SaveCells,
    SegmentLoaded,
    SegmentRefused,
    ShareCells,
    SignOfLife,
    TakeMemory,
    ToHost,
    decode_to_host,
    most_to_host,
)

# Added to the niceness of what computes, as the engine's. Where it is a thread's own (Linux) the reader keeps the
# process's: what takes less than a millisecond is not to wait for batches of tens of ms, of other hosts' neither. A
# segment's loader is as nice as batches: it takes some ms, but 0.2 s where the system first has to find the memory.
NICE = 5
READ_BYTES = 1 << 17  # at a time; a socket holds hardly more

MAX_DESCRIPTORS = 8  # that come with one piece of the stream: home sends one with a message

Order = tuple[ToHost, bytes]
CameAt = float  # time.perf_counter() when an order had come


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """A segment that the loading thread hands over; None where it could not be loaded."""

    number: int
    model: SegmentModel | None


@dataclass(frozen=True, slots=True)
class ThreadsAllowed:
    """The owner of this machine allows another number of threads from now on."""

    n_threads: int


Waiting = tuple[Order, CameAt] | SegmentReady | ThreadsAllowed


@dataclass(slots=True)
class Host:
    """The segments by their numbers, and what is sent of them."""

    home: HostSocket
    lent: LentHost | None = None
    orders: queue.SimpleQueue[Waiting] = field(default_factory=queue.SimpleQueue)
    _segments: dict[int, SegmentModel] = field(default_factory=dict)
    _released: set[int] = field(default_factory=set)  # while they are loaded
    _memories: dict[int, int] = field(default_factory=dict)  # descriptors by the number of the memory
    _moves_states: bool | None = None  # of this model and build; tried out with the first segment
    n_done: int = 0  # orders that are carried out; the reader tells it

    def run(self) -> None:
        """Carry out what comes, for ever. Raises ModelError, OSError."""
        while True:
            waiting = [self.orders.get()]
            while not self.orders.empty():
                waiting.append(self.orders.get())
            self.carry_out(waiting)

    def carry_out(self, orders: Sequence[Waiting]) -> None:
        """Carry out all that waits, in its order. Raises ModelError."""
        waiting: list[tuple[ComputeRows, bytes, CameAt]] = []
        for order in orders:
            if isinstance(order, SegmentReady | ThreadsAllowed):
                self._compute(waiting)
                waiting = []
                if isinstance(order, SegmentReady):
                    self._take_over(order)
                else:
                    self._use_threads(order.n_threads)
                self.n_done += 1
                continue
            (message, behind), came_at = order
            if isinstance(message, ComputeRows):
                n = len(message.places) + sum(len(flight.places) for flight, _, _ in waiting)
                if waiting and (waiting[0][0].segment != message.segment or n > N_BATCH):
                    self._compute(waiting)
                    waiting = []
                waiting.append((message, behind, came_at))
                continue
            self._compute(waiting)
            waiting = []
            self._obey(message, behind)
            self.n_done += 1
        self._compute(waiting)

    def _compute(self, flights: Sequence[tuple[ComputeRows, bytes, CameAt]]) -> None:
        if not flights:
            return
        number = flights[0][0].segment
        segment = self._segments[number]
        rows: list[Row] = [(0, position, seq, False) for flight, _, _ in flights for position, seq in flight.places]
        began = time.perf_counter()
        given = np.frombuffer(b"".join(behind for _, behind, _ in flights), np.float32)
        computed = segment.run(rows, given.reshape(len(rows), segment.n_embd))
        took_s, at = time.perf_counter() - began, 0
        for flight, _, came_at in flights:
            n = len(flight.places)
            if flight.answered:
                held_s = time.perf_counter() - came_at
                message = RowsComputed(
                    segment=number, flight=flight.flight, n_batch=len(rows), took_s=took_s, held_s=held_s
                )
                self.home.send(message, computed[at : at + n].tobytes())
            at += n
        self.n_done += len(flights)

    def _obey(self, message: ToHost, behind: bytes) -> None:
        match message:
            case ForgetCells(segment=number, seq=seq, start=start):
                self._segments[number].truncate(seq, start, refuse_to_cut)
            case ShareCells(segment=number, source=source, seq=seq, n=n, start=start):
                self._segments[number].share_range(source, seq, start, n)
            case ClearCells(segment=number):
                self._segments[number].clear()
            case CompactCells(segment=number, spans=spans):
                self._segments[number].compact(spans)
            case SaveCells():
                self._save(message)
            case PutCells(segment=number, owners=owners, start=start, end=end):
                if message.n_shared:
                    behind = read_all(self._memories[message.memory], message.n_shared, message.at)
                self._segments[number].put(behind, owners, start, end)
            case DropMemory(memory=memory):
                os.close(self._memories.pop(memory))
            case ReleaseSegment(segment=number):
                if (found := self._segments.pop(number, None)) is not None:
                    found.close()
                else:
                    self._released.add(number)

    def _save(self, order: SaveCells) -> None:
        segment = self._segments[order.segment]
        saved = segment.part(order.seq, order.start, order.end)
        if order.layers is not None:
            saved = memoryview(unpacked(saved, segment.layers).cut(LayerRange(*order.layers)).packed())
        if order.memory:
            write_all(self._memories[order.memory], saved, order.at)
            self.home.send(CellsSaved(copy=order.copy, n_shared=len(saved)))
        else:
            self.home.send(CellsSaved(copy=order.copy), saved)

    def take_memory(self, memory: int, fd: int) -> None:
        """Take note of a memory, for the orders that come behind."""
        self._memories[memory] = fd

    def load(self, order: LoadSegment) -> None:
        """Load a segment beside what is computed, and hand it over; call it for an order that has just been read.

        So it waits for no batch, neither before it begins nor before home is told: what home sends to the segment then
        is behind the segment itself in the queue.
        """
        threading.Thread(target=self._load, args=(order,), name="loader", daemon=True).start()

    def _load(self, order: LoadSegment) -> None:
        if sys.platform == "linux":  # else all threads have one niceness
            os.nice(NICE)
        try:
            load = order.load if self.lent is None else self.lent.take(order.load)
            segment = SegmentModel(load, LayerRange(*load.layers))
        except (ModelError, OSError, ValueError) as e:
            self.home.send(SegmentRefused(segment=order.segment, reason=str(e)[:N_REASON]))
            self.orders.put(SegmentReady(order.segment, None))
            return
        if self._moves_states is None:
            self._moves_states = order.moves_states
        if self._moves_states is None:
            self._moves_states = moves_states(segment)
        self.orders.put(SegmentReady(order.segment, segment))
        self.home.send(SegmentLoaded(segment=order.segment, moves_states=self._moves_states))

    def _use_threads(self, n: int) -> None:
        for segment in self._segments.values():
            segment.use_threads(n)

    def _take_over(self, ready: SegmentReady) -> None:
        if ready.number in self._released:
            self._released.discard(ready.number)
            if ready.model is not None:
                ready.model.close()
        elif ready.model is not None:
            self._segments[ready.number] = ready.model
            if self.lent is not None:
                ready.model.use_threads(self.lent.terms.n_threads)  # which may be others since it was begun


def frames(home: HostSocket, descriptors: deque[int]) -> Iterator[Order]:
    """Yield what home sends, until it goes away, and gather what descriptors come. Raises BadFrameError, OSError."""
    buffer = FrameBuffer(TO_HOST, most_to_host)
    while data := _receive(home.sock, descriptors):
        buffer.feed(data)
        while (found := buffer.take()) is not None:
            body, behind, epoch = found
            message = decode_to_host(body)
            if isinstance(message, BeginHost):
                home.epoch = epoch
            if epoch == home.epoch:
                yield message, behind


def _receive(sock: socket.socket, descriptors: deque[int]) -> bytes:
    if sock.family != socket.AF_UNIX:
        return sock.recv(READ_BYTES)
    data, found, _, _ = socket.recv_fds(sock, READ_BYTES, MAX_DESCRIPTORS)
    descriptors.extend(found)
    return data


def _computed_s() -> float:
    """Return how long the main thread, which computes, has had a processor, s; 0 where the system does not say."""
    if sys.platform == "darwin":
        return 0.0
    ident = threading.main_thread().ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def serve(home: HostSocket, lent: LentHost | None = None) -> None:
    """Begin as home says first, then compute until it goes away. Raises BadFrameError, ModelError, OSError."""
    home.send(SignOfLife())  # all is imported: from now on silence is no slow start
    descriptors = deque[int]()
    stream = frames(home, descriptors)
    first = next(stream, None)
    if first is None:
        return
    message, _ = first
    if not isinstance(message, BeginHost):
        raise BadFrameError(f"the first message must be BeginHost, not {type(message).__name__}")
    folders = message.folders if lent is None else (str(lent.folder),)
    confined = confine(Access(read=[Path(folder) for folder in folders]), gpu.free_bytes)
    if lent is not None:
        lent.limit_memory()
    quiet()
    home.send(
        HostReady(build=build(), pid=os.getpid(), confined=tuple(confined.in_force), shares_memory=bool(descriptors))
    )
    while descriptors:
        os.close(descriptors.popleft())
    host = Host(home, lent)
    if lent is not None:
        lent.listen(lambda n: host.orders.put(ThreadsAllowed(n)))

    def read() -> None:
        try:
            for order in stream:
                match order[0]:
                    case AskSign():
                        home.send_if_free(SignOfLife(n_done=host.n_done, cpu_s=_computed_s()))
                    case TakeMemory(memory=memory):
                        host.take_memory(memory, descriptors.popleft())
                    case LoadSegment():
                        host.load(order[0])
                    case _:
                        host.orders.put((order, time.perf_counter()))
        except (BadFrameError, OSError, IndexError) as e:
            os.write(2, f"the connection to home ends: {e}\n".encode())
        os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    os.nice(NICE)
    host.run()


def main() -> None:
    """Serve the home behind the inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; home ends us by closing the socket
    gc.freeze()
    gc.enable()
    give_back_what_is_freed()
    lent, home = None, sys.argv[1]
    if len(sys.argv) > 2:
        lender, home, folder, n_threads, memory_bytes = sys.argv[1:]
        terms = HostTerms(int(n_threads), int(memory_bytes))
        lent = LentHost(Path(folder), terms, BlockingControl(socket.socket(fileno=int(lender))))
    try:
        serve(HostSocket(socket.socket(fileno=int(home))), lent)
    except (BadFrameError, ModelError, StateFormatError) as e:
        sys.exit(f"the host ends: {e}")
    except OSError:
        sys.exit(0)  # home has gone


if __name__ == "__main__":
    main()
