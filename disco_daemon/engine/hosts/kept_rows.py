"""The rows that home sent to a host, for another one that takes its place: it computes its layers from them alone.

They are kept in the order of the host's cells, one row for each cell that is still in use, so they are never more than
the cache has cells: 4 bytes x n_embd each. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .cell_memory import SavedCells

FloatRows = NDArray[np.float32]
REPLAYED = 256  # rows that are sent again at a time


@dataclass(slots=True)
class Kept:
    """Neighbouring cells from position `start` on: the rows (n x n_embd) that were sent, or what was saved of them.

    Each sequence of `owners` has them up to its position.
    """

    flight: int
    start: int
    owners: dict[int, int]
    rows: FloatRows | None = None
    saved: SavedCells = b""

    @property
    def n_bytes(self) -> int:
        """What it takes."""
        return len(self.saved) if self.rows is None else int(self.rows.nbytes)


@dataclass(frozen=True, slots=True)
class RowsAgain:
    """Rows to compute again, with their positions and sequences."""

    places: tuple[tuple[int, int], ...]
    rows: FloatRows


@dataclass(frozen=True, slots=True)
class ShareAgain:
    """`seq` has the first `n` cells of `source`."""

    source: int
    seq: int
    n: int


@dataclass(frozen=True, slots=True)
class PutAgain:
    """Cells as they were saved, from `start` to `end` of `owner`."""

    owner: int
    start: int
    end: int
    saved: SavedCells


Step = RowsAgain | ShareAgain | PutAgain


def _joined(piece: list[Kept]) -> Kept:
    """Return rows that stand behind each other as one, without those of cells that are gone."""
    first, rows = piece[0], list[FloatRows]()
    for kept in piece:
        if kept.rows is None:
            return kept
        rows.append(kept.rows[: max(kept.owners.values()) - kept.start])
    if len(rows) == 1 and first.rows is not None and len(rows[0]) == len(first.rows):
        return first
    return Kept(-1, first.start, piece[-1].owners, np.concatenate(rows))


@dataclass(slots=True)
class KeptRows:
    """All that is kept for one host, by a running number; mirrors what its cells go through.

    `_by_seq` has each sequence's own, so that what becomes of one costs nothing for the others.
    """

    n_bytes: int = field(default=0, init=False)  # what all of it takes
    _n_saved: int = field(default=0, init=False)
    _n: int = field(default=0, init=False)
    _kept: dict[int, Kept] = field(default_factory=dict)
    _by_seq: dict[int, dict[int, Kept]] = field(default_factory=dict)

    @property
    def is_rows(self) -> bool:
        """Whether all of it are rows, for any segment that begins at the same layer: saved cells are of some."""
        return self._n_saved == 0

    def _append(self, kept: Kept) -> None:
        self._n += 1
        self._kept[self._n] = kept
        self.n_bytes += kept.n_bytes
        self._n_saved += kept.rows is None
        for seq in kept.owners:
            self._by_seq.setdefault(seq, {})[self._n] = kept

    def _leave(self, seq: int, number: int) -> None:
        """Take something from a sequence; without an owner it is gone."""
        kept = self._by_seq[seq].pop(number)
        del kept.owners[seq]
        if not kept.owners:
            del self._kept[number]
            self.n_bytes -= kept.n_bytes
            self._n_saved -= kept.rows is None

    def add(self, flight: int, places: Iterable[tuple[int, int]], rows: FloatRows) -> None:
        """Keep a flight's rows; those of one sequence stand behind each other, in the order of their positions."""
        at, found = 0, list(places)
        while at < len(found):
            start, seq = found[at]
            n = 1
            while at + n < len(found) and found[at + n] == (start + n, seq):
                n += 1
            self._append(Kept(flight, start, {seq: start + n}, rows[at : at + n].copy()))
            at += n

    def keep(self, owners: Iterable[int], start: int, end: int, rows: FloatRows) -> None:
        """Keep rows whose cells were put back."""
        self._append(Kept(-1, start, dict.fromkeys(owners, end), rows))

    def length(self, seq: int) -> int:
        """Return the position behind the last that a sequence has."""
        return max((kept.owners[seq] for kept in self._of(seq)), default=0)

    def lengths(self) -> dict[int, int]:
        """Return for each sequence the position behind its last."""
        return {seq: self.length(seq) for seq, own in self._by_seq.items() if own}

    def _of(self, seq: int) -> Iterable[Kept]:
        return self._by_seq.get(seq, {}).values()

    def rows_of(self, seq: int, start: int, end: int) -> FloatRows | None:
        """Return a sequence's rows from one position to another; None if not all of them are kept."""
        found, at = list[FloatRows](), start
        for kept in self._of(seq):
            last = min(kept.owners[seq], end)
            if kept.rows is not None and kept.start <= at < last:
                found.append(kept.rows[at - kept.start : last - kept.start])
                at = last
        return np.concatenate(found) if found and at == end else None

    def put(self, owners: Iterable[int], start: int, end: int, saved: SavedCells) -> None:
        """Keep cells that were put back as they were saved."""
        self._append(Kept(-1, start, dict.fromkeys(owners, end), saved=saved))

    def forget(self, seq: int, start: int) -> None:
        """A sequence has lost its cells from this position on."""
        for number, kept in list(self._by_seq.get(seq, {}).items()):
            if kept.owners[seq] > start:
                if start <= kept.start:
                    self._leave(seq, number)
                else:
                    kept.owners[seq] = start

    def share(self, source: int, seq: int, n: int, start: int = 0) -> None:
        """A sequence has the first `n` cells of another, or those from position `start` on, where a part begins."""
        own = self._by_seq.setdefault(seq, {})
        for number, kept in list(self._by_seq.get(source, {}).items()):
            if start <= kept.start < n:
                kept.owners[seq] = min(kept.owners[source], n)
                own[number] = kept

    def compact(self, seqs: Container[int]) -> None:
        """All cells but those of these sequences are free: keep nothing of others, and rows of one text in one piece.

        Rows that stand behind each other become one piece where the same sequences have all of both; it stands where
        the first one stood, so that each sequence's positions still come in their order.
        """
        for seq in [seq for seq in self._by_seq if seq not in seqs]:
            self.forget(seq, 0)
        pieces, by_end = list[list[Kept]](), dict[tuple[frozenset[int], int], list[Kept]]()
        for kept in self._kept.values():
            owners, ends = frozenset(kept.owners), set(kept.owners.values())
            joins = kept.rows is not None and len(ends) == 1
            piece = by_end.pop((owners, kept.start), None) if joins else None
            if piece is None:
                pieces.append(piece := [])
            piece.append(kept)
            if joins:
                by_end[owners, ends.pop()] = piece
        self.clear()
        for piece in pieces:
            self._append(_joined(piece))

    def clear(self) -> None:
        """All cells are free."""
        self._kept.clear()
        self._by_seq.clear()
        self.n_bytes = self._n_saved = 0

    def replay(self, without: Container[int] = ()) -> Iterator[Step]:
        """Yield what gives a new host the cells of the lost one, but for these flights, whose rows are sent anyway."""
        places, rows = list[tuple[int, int]](), list[FloatRows]()
        for kept in self._kept.values():
            if kept.flight in without:
                continue
            source = max(kept.owners, key=lambda seq: (kept.owners[seq], -seq))
            end = kept.owners[source]
            if kept.rows is None:
                if places:
                    yield RowsAgain(tuple(places), np.concatenate(rows))
                    places, rows = [], []
                yield PutAgain(source, kept.start, end, kept.saved)
            else:
                at = kept.start
                while at < end:
                    n = min(end - at, REPLAYED - len(places))
                    places += [(position, source) for position in range(at, at + n)]
                    rows.append(kept.rows[at - kept.start : at - kept.start + n])
                    at += n
                    if len(places) == REPLAYED:
                        yield RowsAgain(tuple(places), np.concatenate(rows))
                        places, rows = [], []
            others = [ShareAgain(source, seq, n) for seq, n in kept.owners.items() if seq != source]
            if others and places:
                yield RowsAgain(tuple(places), np.concatenate(rows))
                places, rows = [], []
            yield from others
        if places:
            yield RowsAgain(tuple(places), np.concatenate(rows))
