"""Home's end of the connection to a host: orders go out, rows come back, and a host that is gone is noticed."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ...link.protocol import MAX_PAYLOAD
from ...plain import one_line
from ...system.frames import BadFrameError, FrameBuffer
from ..door import LentSocket
from ..llama.hidden import FloatRows
from ..wire import Load
from .cell_memory import CellMemory, SavedCells, SharedCells, new_memory
from .messages import (
    FROM_HOST,
    AskSign,
    BeginHost,
    CellsSaved,
    ComputeRows,
    DropMemory,
    HostReady,
    HostSocket,
    LoadSegment,
    RowsComputed,
    SaveCells,
    SegmentLoaded,
    SegmentRefused,
    SignOfLife,
    TakeMemory,
    ToHost,
    decode_from_host,
)
from .outstanding import AskedCells, AskedOfHost, SentFlight, UnaskedError, check_cells
from .segment_runs import SegmentRuns
from .transit_times import WayTimes

SILENT_S = 3.5  # a host that gives no sign of life for so long is gone
START_S = 30.0  # in which a new process has to give its first sign: a busy machine takes seconds to start one
LOAD_S = 300.0  # for which a host may load layers, as an engine its model: many of them, from a cold disk
# For which it may get on with what was asked of it, and nothing of that come: 32,000 rows again, at 50 in a second.
GETS_ON_S = 640.0
# Of the time between two signs: a host that had a processor for less of it was held up, by others or by the disk.
HELD_UP_SHARE = 0.5
ASK_S = 1.0  # of silence, until it is asked for one
LOOK_S = 0.01  # at least, between two looks at a silence
READ_BYTES = 1 << 17  # at a time; a socket holds hardly more


class HostGoneError(Exception):
    """The host has ended, is silent, or sends what it should not; its text says which."""


class HostLink:
    """One life of a host's process; rows have `n_embd` numbers. Raises HostGoneError where it is gone.

    What has come and was not taken: `rows` by segment and flight, `saved` by the number of the copy, and `loaded` by
    segment, True if its states can be cut by layers, or the reason why there is none. A host that says what it was not
    asked has gone. What one says that `is_lent` by another machine is no fact of this one: neither that it shares
    memory, nor how long it took for rows; and its cells are checked before llama.cpp has them.

    Whoever waits for it has no time to say so: `beat` is called while it starts or only loads, and as it gets on.
    """

    def __init__(
        self,
        sock: socket.socket,
        folders: Sequence[str],
        n_embd: int,
        epoch: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the host behind the socket, which opens files in these folders only."""
        # What is sent to a host that has stopped fills the socket: that is silence, too.
        self._socket, self._n_embd = HostSocket(sock, epoch, SILENT_S), n_embd
        self._buffer = FrameBuffer(FROM_HOST, self._most_behind)
        self.is_lent = isinstance(sock, LentSocket)
        self.rows: dict[tuple[int, int], FloatRows] = {}
        self.saved: dict[int, SavedCells] = {}
        self.loaded: dict[int, bool | str] = {}
        self.n_rows, self.busy_s = 0, 0.0  # what it computed for flights
        self.pid, self.build, self.shares_memory = 0, "", False
        self._memories = set[int]()  # that the host has
        self._asked = AskedOfHost(n_embd)
        self._knows_form = False  # our own processes of its build have said that cells can be cut by layers
        self.runs = SegmentRuns[int]()  # of its segments, by their numbers
        self.ways = WayTimes()
        self.confined = tuple[str, ...]()  # the rights that it has given up
        self._n_copies, self._silent_since, self._asked_at, self._looked_at = 0, 0.0, 0.0, 0.0
        self._has_spoken = False  # one of another machine has by now: before that it is not offered
        self._beat, self._sign = beat, SignOfLife()
        self._came_at = self._signed_at = time.monotonic()  # when what was asked for came last, and a sign
        self._begins_until = self._came_at + START_S  # until then it may start, or load
        self._begin(BeginHost(folders=tuple(folders)))
        self.wait(lambda: self._has_spoken, START_S)
        self.wait(lambda: self.pid != 0)
        self._begins_until = 0.0

    def fileno(self) -> int:
        """Return the socket's number, for select."""
        return self._socket.sock.fileno()

    def takes_more(self) -> bool:
        """Whether something can be sent without waiting for the line; a host that has gone takes anything."""
        return bool(select.select([], [self], [], 0.0)[1])

    def tell(self, message: ToHost, behind: bytes | memoryview = b"") -> None:
        """Send an order, which is not answered."""
        try:
            self._socket.send(message, behind)
        except BadFrameError as e:
            raise HostGoneError(str(e)) from e
        except OSError as e:
            raise HostGoneError(f"the connection has broken: {e.strerror}") from e

    def _begin(self, message: BeginHost) -> None:
        if self.is_lent or (memory := new_memory()) is None:
            self.tell(message)
        else:
            self._tell_with(message, memory)

    def _tell_with(self, message: ToHost, memory: CellMemory) -> None:
        try:
            self._socket.send_with(message, memory.fd)
        except OSError as e:
            raise HostGoneError(f"the connection has broken: {e.strerror}") from e

    def share(self, memory: CellMemory) -> None:
        """Let the host have a memory, if it has not got it yet."""
        if memory.number not in self._memories:
            self._tell_with(TakeMemory(memory=memory.number), memory)
            self._memories.add(memory.number)

    def unshare(self, memory: CellMemory) -> None:
        """Let the host close a memory, if it has it."""
        if memory.number in self._memories:
            self._memories.discard(memory.number)
            self.tell(DropMemory(memory=memory.number))

    def load(self, segment: int, load: Load, moves_states: bool | None = None) -> None:
        """Let it load a segment in the background; `loaded` has it then. `moves_states`: if that is known already."""
        self._asked.load(segment, load.layers)
        self._begins_until = time.monotonic() + LOAD_S
        self._knows_form = self._knows_form or moves_states is True
        self.tell(LoadSegment(segment=segment, load=load, moves_states=moves_states))

    def send(
        self,
        segment: int,
        flight: int,
        places: Sequence[tuple[int, int]],
        rows: FloatRows,
        *,
        answered: bool = True,
    ) -> None:
        """Send a flight's rows to a segment."""
        message = ComputeRows(segment=segment, flight=flight, places=tuple(places), answered=answered)
        if answered:
            self._begin_owing()
            self._asked.flights[segment, flight] = SentFlight(len(places), time.perf_counter())
        self.tell(message, np.ascontiguousarray(rows, np.float32).data.cast("B"))

    def save(
        self,
        segment: int,
        seq: int,
        span: tuple[int, int],
        layers: tuple[int, int, int] | None = None,
        memory: CellMemory | None = None,
    ) -> int:
        """Ask for what a sequence has from one position to another; return the number by which `saved` has it then.

        With a `memory` it goes there, if the host shares memory.
        """
        self._n_copies += 1
        self._begin_owing()
        message = SaveCells(segment=segment, copy=self._n_copies, seq=seq, start=span[0], end=span[1], layers=layers)
        self._asked.save(self._n_copies, segment, span, layers)
        if memory is not None and self.shares_memory:
            self.share(memory)
            at = memory.slot()
            self._asked.place(self._n_copies, (memory, at))
            message = msgspec.structs.replace(message, memory=memory.number, at=at)
        self.tell(message)
        return self._n_copies

    def drop(self, segment: int, flight: int) -> None:
        """Forget a flight's rows, also if they come yet."""
        self.rows.pop((segment, flight), None)
        self._asked.drop_flight((segment, flight))

    def drop_saved(self, copy: int) -> None:
        """Forget a copy that was asked for, also if it comes yet."""
        self._asked.drop_copy(copy)
        self.saved.pop(copy, None)

    def close(self) -> None:
        """End the connection, and with it the host."""
        self._socket.sock.close()

    # --- whether it gets on -----------------------------------------------------------------------------------------

    def _begin_owing(self) -> None:
        if self._asked.is_empty:
            self._came_at = time.monotonic()

    def _show_begin(self) -> None:
        """Let it be known that it starts or loads; while it owes rows or cells, only its signs say that it gets on."""
        if self._asked.is_empty and time.monotonic() < self._begins_until:
            self._beat()

    def _hear_sign(self, sign: SignOfLife) -> None:
        """Let it be known that it has carried out more, or was held up at that, as an engine may be (`engine.hang`).

        One that says so and sends nothing is believed for a while.
        """
        now = time.monotonic()
        had_s, could_s = sign.cpu_s - self._sign.cpu_s, now - self._signed_at
        gets_on = sign.n_done > self._sign.n_done or 0 < had_s < HELD_UP_SHARE * could_s
        if gets_on and now - self._came_at < GETS_ON_S:
            self._beat()
        self._sign, self._signed_at = sign, now

    def _has_come(self) -> None:
        self._came_at = time.monotonic()
        self._beat()

    # --- reading ----------------------------------------------------------------------------------------------------

    def begin_wait(self) -> None:
        """Begin to wait for it: its silence counts from now on."""
        self._silent_since = self._asked_at = time.monotonic()

    def wait(self, is_there: Callable[[], bool], patience_s: float = SILENT_S) -> None:
        """Read until something is there, or it is silent for `patience_s`."""
        self.begin_wait()
        while not is_there():
            if select.select([self], [], [], self.wait_s(patience_s))[0]:
                self.read()
            else:
                self.look(patience_s)

    def wait_s(self, patience_s: float = SILENT_S) -> float:
        """Return how long to wait for it until `look` is due, s: no longer than its silence may last."""
        left_s = self._silent_since + patience_s - time.monotonic()
        return min(ASK_S, max(0.0, left_s) + LOOK_S)

    def look(self, patience_s: float = SILENT_S) -> None:
        """Judge a silence: ask for a sign of life, or give the host up."""
        now = time.monotonic()
        if now - self._looked_at > 2 * ASK_S:  # nobody waited for it lately: what it was silent for does not count
            self.begin_wait()
        self._looked_at = now
        if now - self._silent_since > patience_s:
            raise HostGoneError(f"it was silent for {patience_s} s")
        if now - self._asked_at >= ASK_S:
            self._asked_at = now
            self.tell(AskSign())
        self._show_begin()

    def read(self) -> None:
        """Take what has come; call it when there is something."""
        try:
            data = self._socket.sock.recv(READ_BYTES)
            if not data:
                raise HostGoneError("its process has ended")
            self._has_spoken = True
            self.begin_wait()  # each byte is a sign of life
            self._buffer.feed(data)
            while (found := self._buffer.take()) is not None:
                body, behind, epoch = found
                if epoch == self._socket.epoch:
                    self._heard(body, behind)
            self._show_begin()
        except (BadFrameError, UnaskedError, OSError) as e:
            raise HostGoneError(str(e)) from e

    def _most_behind(self, body: bytes, epoch: int) -> int:
        """Return how many bytes may be behind a message of the host; one of another epoch is dropped, with its rows."""
        return self._asked.most_behind(decode_from_host(body)) if epoch == self._socket.epoch else MAX_PAYLOAD

    def _heard(self, body: bytes, behind: bytes) -> None:
        message = decode_from_host(body)
        if not isinstance(message, SignOfLife):
            self._has_come()
        match message:
            case RowsComputed():
                self._take_rows(message, behind)
            case CellsSaved(copy=copy):
                if (asked := self._asked.cells(message, len(behind))).is_wanted:
                    self.saved[copy] = self._cells(asked, message.n_shared, behind)
            case SegmentLoaded(segment=segment, moves_states=moves_states):
                self._loaded(segment, moves_states)
            case SegmentRefused(segment=segment, reason=reason):
                self._loaded(segment, one_line(reason))
            case HostReady():
                if self.pid:
                    raise HostGoneError("it says once more that it is ready")
                self.build, self.pid = one_line(message.build), message.pid
                self.shares_memory = message.shares_memory and not self.is_lent
                self.confined = message.confined
            case SignOfLife():
                self._hear_sign(message)

    def _loaded(self, segment: int, found: bool | str) -> None:
        self._asked.loaded(segment)
        self.loaded[segment] = found
        if not self._asked.is_loading:
            self._begins_until = 0.0

    def _cells(self, asked: AskedCells, n_shared: int, behind: bytes) -> SavedCells:
        if asked.slot is not None:
            return SharedCells(*asked.slot, n_shared)
        if self.is_lent:
            are_joined = self._knows_form or all(found is not False for found in self.loaded.values())
            check_cells(behind, asked, are_joined=are_joined)
        return behind

    def _take_rows(self, message: RowsComputed, behind: bytes) -> None:
        sent = self._asked.rows(message, len(behind))
        rows = np.frombuffer(behind, np.float32).reshape(-1, self._n_embd)
        if not np.isfinite(rows).all():
            raise HostGoneError("it sent what is no number")
        took_s, seen_s = message.took_s, time.perf_counter() - sent.sent_at
        if self.is_lent:
            took_s = min(took_s, seen_s)
        if sent.is_wanted:
            self.rows[message.segment, message.flight] = rows
            self.ways.add(len(rows), seen_s - max(message.held_s, took_s))
        self.n_rows += len(rows)
        self.busy_s += took_s * len(rows) / message.n_batch
        self.runs.add(message.segment, message.n_batch, took_s)
