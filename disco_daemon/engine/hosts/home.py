"""A model whose inner layers are at a host: like a whole one to whoever batches, and its ends are here.

Home has the first range, with the embedding, and the last one, with the head and the vocabulary; what happens to cells
here happens at the host in the same order. A batch is computed at once (`decode`), or it departs and arrives later, so
that the host computes one while home is busy with another. A host that is gone is replaced by a new one, which gets the
cells of the lost one from the rows that are kept here; nothing is drawn there, so no token is lost or doubled.

A host of this machine may see private texts. Where hosts are other machines, the refusal of private requests belongs
before the first row departs: in the daemon, as the split's `refusal_of`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ...types import LayerRange
from ..llama.hidden import FloatRows
from ..llama.layer_states import StateFormatError, joined, unpacked
from ..llama.model import AbortFlag, Llama
from ..llama.refusals import ModelError
from ..llama.rows import Row
from ..llama.state import State
from ..wire import Load
from .kept_rows import KeptRows
from .link import HostGoneError, HostLink
from .messages import ClearCells, ForgetCells, PutCells, ShareCells, ToHost

OpenHost = Callable[[], socket.socket]  # starts a host's process, and returns the socket to it
MAX_LOST = 3  # hosts in a row that are lost with the same flight; then it has failed
BROKEN = -1  # of a decode, as llama_decode returns it


@dataclass(frozen=True, slots=True)
class Ends:
    """The files of three ranges, one behind the other, of which the middle one is a host's."""

    paths: tuple[str, str, str]
    ranges: tuple[LayerRange, LayerRange, LayerRange]


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that is at the host: its rows as tokens, and as they were sent."""

    number: int
    rows: Sequence[Row]
    hidden: FloatRows


class HomeLlama(Llama):
    """The last range as a model, with the first one and the host before it."""

    _first: Llama | None = None

    def __init__(self, load: Load, ends: Ends, abort: AbortFlag, open_host: OpenHost) -> None:
        """Load both ends, and let a host load the layers between them. Raises ModelError."""
        self._ends, self._open_host = ends, open_host
        self._kept, self._flights = KeptRows(), deque[Flight]()
        self._host: HostLink | None = None
        self._n_flights = self.n_lost = 0
        self.replaced_s = 0.0  # that it took to replace the latest host that was lost
        load = msgspec.structs.replace(load, speculate=False, draft_path="", adapters=())
        super().__init__(self._part_of(load, 2), abort)
        # One cache with as many cells in all three: what is in one of them has its place in the others.
        sized = msgspec.structs.replace(load, n_ctx=self.n_ctx, n_cells=self.n_cells)
        try:
            first = self._first_of(sized, abort)
        except ModelError:
            super().close()
            raise
        self._middle = msgspec.structs.replace(self._part_of(sized, 1), n_ctx=self.n_cells, chat_template="")
        self._first = first
        self.bytes_per_token += first.bytes_per_token + 4 * self.n_embd  # a kept row for each cell
        try:
            self._replace()
        except HostGoneError as e:
            self.close()
            msg = f"the host cannot have the layers {ends.ranges[1]}: {e}"
            raise ModelError(msg) from e
        self.prefill_tps, decode_s = self._warm_up()
        self.latency_prior = (0.8 * decode_s, 0.2 * decode_s, 1.0 / self.prefill_tps, 0.1 * decode_s / self.n_ctx)

    def _first_of(self, load: Load, abort: AbortFlag) -> Llama:
        first = Llama(self._part_of(load, 0), abort)
        if first.n_cells != self.n_cells:
            first.close()
            raise ModelError("there is no memory for the first layers' cells: lower device.n_ctx")
        return first

    def _part_of(self, load: Load, number: int) -> Load:
        layers = self._ends.ranges[number]
        numbers = (layers.first, layers.last, layers.of)
        return msgspec.structs.replace(load, model_path=self._ends.paths[number], layers=numbers)

    def close(self) -> None:
        """Free both ends, and let the host go."""
        if self._host is not None:
            self._host.close()
        if self._first is not None:
            self._first.close()
        super().close()

    @property
    def host_pid(self) -> int:
        """The process of the present host; 0 if there is none."""
        return 0 if self._host is None else self._host.pid

    @property
    def kept_bytes(self) -> int:
        """What the rows take that are kept for another host."""
        return self._kept.n_bytes

    # --- computing -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Row], hidden: FloatRows | None = None) -> int:
        """Run one batch through all layers; return llama_decode's return value. No flight may be under way."""
        if self._first is None:  # the last range alone, which is being loaded
            return super().decode(rows, hidden)
        rc = self.depart(rows)
        return rc or self.arrive()

    def depart(self, rows: Sequence[Row]) -> int:
        """Compute a batch up to the host, and send it there; return llama_decode's return value."""
        assert self._first is not None
        if (rc := self._first.decode(rows)) != 0:
            return rc
        flight = Flight(self._n_flights, list(rows), self._first.hidden_out)
        self._n_flights += 1
        self._flights.append(flight)
        self._kept.add(flight.number, _places(flight), flight.hidden)
        if self._host is not None:
            try:
                self._host.send(flight.number, _places(flight), flight.hidden)
            except HostGoneError as e:
                self._lose(e)
        return 0

    def arrive(self) -> int:
        """Wait for the rows of the flight that departed first, and compute the rest; return llama_decode's value."""
        flight = self._flights[0]
        for _ in range(MAX_LOST):
            try:
                if self._host is None:
                    self._replace()
                assert self._host is not None
                hidden = self._host.receive(flight.number, len(flight.rows))
            except HostGoneError as e:
                self._lose(e)
                continue
            self._flights.popleft()
            return super().decode(flight.rows, hidden)
        self._flights.popleft()
        return BROKEN

    # --- the host ------------------------------------------------------------------------------------------------

    def _lose(self, error: HostGoneError) -> None:
        os.write(2, f"the host of the layers {self._ends.ranges[1]} is lost: {error}\n".encode())
        self.n_lost += 1
        if self._host is not None:
            self._host.close()
        self._host = None

    def _replace(self) -> None:
        """Let a new host take the place of a lost one, with its cells, and send it what is under way."""
        began = time.perf_counter()
        try:
            sock = self._open_host()
        except OSError as e:
            msg = f"no process of a host can be started: {e}"
            raise HostGoneError(msg) from e
        self._host = HostLink(sock, self._middle, self.n_embd, epoch=self.n_lost + 1)
        self._host.replay(self._kept, [flight.number for flight in self._flights])
        for flight in self._flights:
            self._host.send(flight.number, _places(flight), flight.hidden)
        self.replaced_s = time.perf_counter() - began

    def _tell(self, message: ToHost, behind: bytes = b"") -> None:
        """Send an order; a lost host's successor has what is kept here, where it is carried out already."""
        if self._host is None:
            return
        try:
            self._host.tell(message, behind)
        except HostGoneError as e:
            self._lose(e)

    # --- cells: the same at all three ----------------------------------------------------------------------------

    def forget(self, seq: int, from_pos: int = 0) -> None:
        """Take the KV cells from position `from_pos` on from a sequence."""
        super().forget(seq, from_pos)
        if self._first is not None:
            self._first.forget(seq, from_pos)
            self._kept.forget(seq, from_pos)
            self._tell(ForgetCells(segment=0, seq=seq, start=from_pos))

    def clear(self) -> None:
        """Free all cells of all sequences."""
        super().clear()
        if self._first is not None:
            self._first.clear()
            self._kept.clear()
            self._tell(ClearCells(segment=0))

    def share(self, source: int, seq: int, n: int) -> None:
        """Let a sequence without cells have the first `n` of another's."""
        assert self._first is not None
        super().share(source, seq, n)
        self._first.share(source, seq, n)
        self._kept.share(source, seq, n)
        self._tell(ShareCells(segment=0, source=source, seq=seq, n=n))

    def save(self, seq: int) -> memoryview:
        """Copy the KV cache's content of a sequence: as the whole model's."""
        return self.part(seq, 0, self.n_ctx)

    def part(self, seq: int, start: int, end: int) -> memoryview:
        """Copy the KV cache's content of a sequence's positions from `start` to `end`: as the whole model's."""
        assert self._first is not None
        ranges = self._ends.ranges
        saved: tuple[State, ...] = (
            self._first.part(seq, start, end),
            self._middle_part(seq, start, end),
            super().part(seq, start, end),
        )
        parts = [unpacked(data, layers) for data, layers in zip(saved, ranges, strict=True)]
        return memoryview(joined(parts).packed())

    def _middle_part(self, seq: int, start: int, end: int) -> bytes:
        for _ in range(MAX_LOST):
            try:
                if self._host is None:
                    self._replace()
                assert self._host is not None
                return self._host.save(seq, start, end)
            except HostGoneError as e:
                self._lose(e)
        raise ModelError("no host can be had for the inner layers")

    def restore(self, seq: int, data: State) -> bool:
        """Put the content from `save` back into the KV cache; return False if there is no room."""
        last = self._ends.ranges[2]
        try:
            n = max(unpacked(data, LayerRange(0, last.last, last.of)).positions, default=-1) + 1
            self.put(data, [seq], 0, n)
        except (ModelError, StateFormatError):
            return False
        return True

    def put(self, data: State, owners: Iterable[int], start: int, end: int) -> None:
        """Put the content from `part` into new cells, for several sequences. Raises ModelError if there are none."""
        assert self._first is not None
        first, middle, last = self._ends.ranges
        state, seqs = unpacked(data, LayerRange(0, last.last, last.of)), tuple(owners)
        self._first.put(state.cut(first).packed(), seqs, start, end)
        super().put(state.cut(last).packed(), seqs, start, end)
        saved = state.cut(middle).packed()
        self._kept.put(seqs, start, end, saved)
        self._tell(PutCells(segment=0, owners=seqs, start=start, end=end), saved)


def _places(flight: Flight) -> list[tuple[int, int]]:
    return [(position, seq) for _, position, seq, _ in flight.rows]
