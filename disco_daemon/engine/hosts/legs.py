"""A leg of the way through a model: a range of inner layers, and where it is computed.

That is at one host, at several, each of which has the whole range and some of the sequences, or at home. A sequence is
pinned to the replica that has its cells; a new one goes by the replicas' shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...types import LayerRange
from ..llama.hidden import FloatRows
from ..llama.refusals import ModelError, refuse_to_cut
from ..llama.rows import Row
from ..llama.segment import SegmentModel
from ..llama.sequences import CellSpan
from .cell_memory import SavedCells, bytes_of
from .kept_rows import KeptRows
from .placing import SequencesAtWork, next_replica
from .remote import Places, RemoteSegment
from .segment_runs import SegmentRuns


class FlightFailedError(Exception):
    """A flight's rows cannot be computed."""


@dataclass(eq=False, slots=True)
class HomeSegment:
    """A range of inner layers in this process."""

    model: SegmentModel
    kept: KeptRows | None = None  # where cells cannot be cut by layers, for the next leg that begins here
    runs: SegmentRuns[LayerRange] = field(default_factory=SegmentRuns)
    _computed: dict[int, FloatRows | None] = field(default_factory=dict)

    @property
    def layers(self) -> LayerRange:
        """Its layers."""
        return self.model.layers

    def send(self, flight: int, places: Places, rows: FloatRows) -> None:
        """Compute a flight's rows."""
        given: list[Row] = [(0, position, seq, False) for position, seq in places]
        if self.kept is not None:
            self.kept.add(flight, places, rows)
        began = time.perf_counter()
        try:
            self._computed[flight] = self.model.run(given, rows)
        except ModelError:
            self._computed[flight] = None
        self.runs.add(self.layers, len(given), time.perf_counter() - began)

    def take(self, flight: int) -> FloatRows:
        """Return what has come of a flight's rows. Raises FlightFailedError."""
        if (rows := self._computed.pop(flight)) is None:
            raise FlightFailedError
        return rows

    def drop(self, flight: int) -> None:
        """Forget a flight that has failed."""
        self._computed.pop(flight, None)

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on."""
        if self.kept is not None:
            self.kept.forget(seq, start)
        self.model.truncate(seq, start, refuse_to_cut)

    def share(self, source: int, seq: int, n: int, start: int = 0) -> None:
        """Let `seq` have the first `n` cells of `source`, or those from position `start` on."""
        if self.kept is not None:
            self.kept.share(source, seq, n, start)
        self.model.share_range(source, seq, start, n)

    def clear(self) -> None:
        """Free all cells."""
        if self.kept is not None:
            self.kept.clear()
        self.model.clear()

    def compact(self, spans: Sequence[CellSpan]) -> None:
        """Put these spans of cells to the front, and free all others. Raises ModelError."""
        if self.kept is not None:
            self.kept.compact({seq for _, _, owners in spans for seq in owners})
        self.model.compact(spans)

    def put(
        self, owners: Iterable[int], start: int, end: int, saved: SavedCells, rows: FloatRows | None = None
    ) -> None:
        """Put saved cells of these layers into new ones, for several sequences. Raises ModelError."""
        owners = tuple(owners)
        self.model.put(bytes_of(saved), owners, start, end)
        if self.kept is not None and rows is not None:
            self.kept.keep(owners, start, end, rows)

    def release(self) -> None:
        """Free it."""
        self.model.close()


AnySegment: TypeAlias = RemoteSegment | HomeSegment


def keep_rows(legs: Iterable[Leg], is_needed: bool) -> None:
    """Let segments at home keep the rows they take, where cells cannot be cut by layers."""
    for leg in legs:
        for segment in leg.replicas:
            if is_needed and isinstance(segment, HomeSegment) and segment.kept is None:
                segment.kept = KeptRows()


@dataclass(frozen=True, slots=True)
class FlightPart:
    """The rows of a flight, by their numbers in it, that one replica computes."""

    segment: AnySegment
    numbers: list[int]


@dataclass(eq=False, slots=True)
class Leg:
    """A range of layers, its replicas, and which of them has a sequence's cells.

    `shares` are those of the sequences `at_work` that each replica is to have; none: all the same.
    """

    layers: LayerRange
    replicas: list[AnySegment]
    shares: tuple[float, ...] = ()
    at_work: SequencesAtWork = field(default_factory=SequencesAtWork)
    pins: dict[int, AnySegment] = field(default_factory=dict)
    _parts: dict[int, tuple[FlightPart, ...]] = field(default_factory=dict)
    _early: dict[tuple[int, int], FloatRows] = field(default_factory=dict)  # of parts of flights

    # --- flights ----------------------------------------------------------------------------------------------------

    def send(self, flight: int, places: Places, rows: FloatRows) -> None:
        """Let a flight's rows be computed, each where its sequence is."""
        by_segment: dict[int, tuple[AnySegment, list[int]]] = {}
        self.at_work.observe(flight, (seq for _, seq in places))
        for number, (_, seq) in enumerate(places):
            segment = self.place(seq)
            by_segment.setdefault(id(segment), (segment, []))[1].append(number)
        parts = self._parts[flight] = tuple(FlightPart(*part) for part in by_segment.values())
        for part in sorted(parts, key=lambda part: isinstance(part.segment, HomeSegment)):  # hosts compute beside us
            if len(parts) == 1:
                part.segment.send(flight, places, rows)
            else:
                part.segment.send(flight, [places[i] for i in part.numbers], rows[part.numbers])

    def take(self, flight: int) -> FloatRows | None:
        """Return what has come of a flight's rows; None if not all is there yet. Raises FlightFailedError."""
        parts = self._parts[flight]
        for at, part in enumerate(parts):
            if (flight, at) in self._early:
                continue
            if (rows := part.segment.take(flight)) is None:
                return None
            self._early[flight, at] = rows
        del self._parts[flight]
        taken = [self._early.pop((flight, at)) for at in range(len(parts))]
        if len(parts) == 1:
            return taken[0]
        order = np.concatenate([part.numbers for part in parts])
        return np.concatenate(taken)[np.argsort(order)]

    def drop(self, flight: int) -> None:
        """Forget a flight that has failed."""
        for at, part in enumerate(self._parts.pop(flight, ())):
            part.segment.drop(flight)
            self._early.pop((flight, at), None)

    def replace(self, old: AnySegment, new: AnySegment) -> None:
        """Let `new`, which has the cells of `old`, take its place, also in flights that are there."""
        self.replicas = [new if one is old else one for one in self.replicas]
        self.pins = {seq: new if one is old else one for seq, one in self.pins.items()}
        for flight, parts in self._parts.items():
            self._parts[flight] = tuple(
                FlightPart(new, part.numbers) if part.segment is old else part for part in parts
            )

    # --- cells ------------------------------------------------------------------------------------------------------

    def place(self, seq: int) -> AnySegment:
        """Return the replica that has a sequence; a new one is pinned to the replica that lacks most of its share."""
        if (segment := self.pins.get(seq)) is None:
            pinned = [one for other, one in self.pins.items() if other in self.at_work]
            at = next_replica(self.shares, [pinned.count(one) for one in self.replicas])
            segment = self.pins[seq] = self.replicas[at]
        return segment

    def replica_of(self, seq: int) -> int:
        """Return the number of the replica that has a sequence; one that is nowhere yet comes behind all others."""
        segment = self.pins.get(seq)
        return next((at for at, one in enumerate(self.replicas) if one is segment), len(self.replicas))

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on."""
        self.place(seq).forget(seq, start)
        if start == 0:
            self.pins.pop(seq, None)
            self.at_work.forget(seq)

    def share(self, source: int, seq: int, n: int, start: int = 0) -> None:
        """Let `seq` have the first `n` cells of `source`, or those from position `start` on."""
        segment = self.pins[seq] = self.place(source)
        segment.share(source, seq, n, start)

    def cells(self) -> dict[int, int] | None:
        """Return how many cells each sequence has, by what is kept; None if nothing is.

        While layers are moved, a replica that stays may have been given a part already of what another one has.
        """
        kept = [segment.kept.lengths() for segment in self.replicas if segment.kept is not None]
        sequences = {seq for lengths in kept for seq in lengths}
        return {seq: max(lengths.get(seq, 0) for lengths in kept) for seq in sequences} if kept else None

    def clear(self) -> None:
        """Free all cells."""
        self.pins.clear()
        self.at_work.clear()
        for segment in self.replicas:
            segment.clear()

    def compact(self, spans: Iterable[CellSpan]) -> None:
        """Let each replica put its sequences' part of these spans to the front, and free all others."""
        of_each: list[list[CellSpan]] = [[] for _ in self.replicas]
        for start, end, owners in spans:
            at = {seq: self.place(seq) for seq in owners}
            for own, segment in zip(of_each, self.replicas, strict=True):
                if here := frozenset(seq for seq in owners if at[seq] is segment):
                    own.append((start, end, here))
        for own, segment in zip(of_each, self.replicas, strict=True):
            segment.compact(own)

    def put(
        self, owners: Iterable[int], start: int, end: int, saved: SavedCells, rows: FloatRows | None = None
    ) -> None:
        """Put saved cells of these layers into new ones, for several sequences, which are at one replica.

        With the `rows` of which they came those are kept, else the cells. Raises ModelError.
        """
        owners = tuple(owners)
        segment = next((self.pins[seq] for seq in owners if seq in self.pins), None) or self.place(owners[0])
        self.pins.update(dict.fromkeys(owners, segment))
        segment.put(owners, start, end, saved, rows)
