"""Legs to come in a move of layers, and what of the sequences' cells they lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from .legs import AnySegment, Leg

COPIED_ROWS = 256  # cells of a sequence copied at a time: a host that saves them does not compute meanwhile

Span = tuple[int, int, frozenset[int]]  # cells from a position up to another one, and the sequences that have them


def missing(spans: Iterable[Span], have: dict[int, int], n_rows: int = COPIED_ROWS) -> Iterator[Span]:
    """Yield what is to be copied, parents first, where each sequence of `have` has its first cells already.

    At most `n_rows` cells at a time, each to all sequences that share it and lack it.
    """
    for start, end, owners in spans:
        edges = sorted({start, end, *(min(max(have.get(seq, 0), start), end) for seq in owners)})
        for first, last in pairwise(edges):
            lacking = frozenset(seq for seq in owners if have.get(seq, 0) <= first)
            for at in range(first, last if lacking else first, n_rows):
                yield at, min(at + n_rows, last), lacking


@dataclass(eq=False, slots=True)
class JoiningLeg:
    """A leg to come: its sequences have their first cells there (`have`), or will have soon (`asked`).

    One with the `layers` of an old leg may have replicas of it; the sequences that are there already stay.
    """

    leg: Leg
    twin: Leg | None = None
    have: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.take_over()  # those that stay count where the others find their places

    @property
    def fresh(self) -> list[AnySegment]:
        """The segments that are new."""
        return [one for one in self.leg.replicas if self.twin is None or one not in self.twin.replicas]

    def stays(self, seq: int) -> bool:
        """Whether a sequence is at one of the replicas that stay."""
        return self.twin is not None and self.twin.pins.get(seq) in self.leg.replicas

    def missing(self, spans: Iterable[Span], n_rows: int = COPIED_ROWS) -> Iterator[Span]:
        """Yield what is to be asked for, at most `n_rows` cells at a time."""
        going = ((start, end, frozenset(seq for seq in owners if not self.stays(seq))) for start, end, owners in spans)
        return missing(going, self.asked, n_rows)

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on."""
        if self.have.get(seq, 0) > start:
            self.have[seq] = start
            self.leg.place(seq).forget(seq, start)
        if not self.have.get(seq):
            self.have.pop(seq, None)
            self.leg.pins.pop(seq, None)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let `seq` have the first `n` cells of `source`, as far as they are there."""
        if n := min(n, self.have.get(source, 0)):
            self.have[seq] = self.asked[seq] = n
            self.leg.share(source, seq, n)

    def clear(self) -> None:
        """Free all cells; those of the replicas that stay are freed already."""
        self.have.clear()
        self.asked.clear()
        self.leg.pins.clear()
        for segment in self.fresh:
            segment.clear()

    def begin_again(self) -> None:
        """Forget what was asked for, of which nothing has been put anywhere yet."""
        self.asked.clear()
        self.leg.pins.clear()
        self.take_over()

    def take_over(self) -> None:
        """Have the sequences that stay at the old one's replicas."""
        if self.twin is not None:
            stay = {seq: segment for seq, segment in self.twin.pins.items() if segment in self.leg.replicas}
            self.leg.pins.update(stay)

    def undo(self) -> None:
        """Free what was copied to replicas that stay, and all that is new."""
        fresh = self.fresh
        for seq in list(self.have):
            if self.leg.place(seq) not in fresh:
                self.leg.place(seq).forget(seq, 0)
        for segment in fresh:
            segment.release()
