"""Cells of legs to come that are computed again, where what a sequence has cannot be cut by layers.

Home keeps the rows that it sent to each of the old legs. New legs one behind the other, the first of which begins where
an old one does, are a *chain*: the rows kept there go in, and what comes out of one leg goes on to the next.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..llama.hidden import FloatRows
from .joining_legs import JoiningLeg, Span
from .legs import AnySegment, FlightFailedError, Leg
from .link import HostLink
from .loading import BrokenOffError
from .remote import RemoteHost, RemoteSegment

AGAIN_ROWS = 32  # rows computed again at a time: an answer waits for no more, as for a part of a prompt
UNDER_WAY = 64  # rows of a chain: one piece is computed while the next one waits

_flights = itertools.count(-2, -1)  # numbers that no batch has; -1 is what a lost host's successor is sent


@dataclass(eq=False, slots=True)
class Chain:
    """Legs to come, one behind the other, and the old leg that begins where the first of them does."""

    source: Leg
    joining: list[JoiningLeg]

    def rows(self, seq: int, start: int, end: int) -> FloatRows:
        """Return the rows that are kept of these positions. Raises BrokenOffError if they are not."""
        kept = self.source.place(seq).kept
        if kept is None or (rows := kept.rows_of(seq, start, end)) is None:
            raise BrokenOffError(f"the rows {start} to {end} of a sequence are not kept")
        return rows

    def cut(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on."""
        for joining in self.joining:
            joining.forget(seq, start)
            joining.asked[seq] = min(joining.asked.get(seq, 0), start)


@dataclass(eq=False, slots=True)
class RowsUnderWay:
    """Rows of a sequence that go through a chain; its cells are for all `owners`, none of whom may be left.

    They have been sent to this `segment` of the leg number `at`; its host had this `link` then.
    """

    chain: Chain
    flight: int
    seq: int
    start: int
    end: int
    owners: set[int]
    at: int = -1
    segment: AnySegment | None = None
    link: HostLink | None = None
    is_wanted: bool = True

    @property
    def host(self) -> RemoteHost | None:
        """The host that computes them; None if that is home."""
        return self.segment.host if isinstance(self.segment, RemoteSegment) else None

    @property
    def _leg(self) -> Leg:
        return self.chain.joining[self.at].leg

    def send(self, rows: FloatRows) -> None:
        """Send the rows to the next leg, and let all owners have the cells. Raises BrokenOffError."""
        self.at += 1
        joining = self.chain.joining[self.at]
        self.segment = joining.leg.place(self.seq)
        self.link = None if self.host is None else self.host.link
        joining.leg.send(self.flight, [(position, self.seq) for position in range(self.start, self.end)], rows)
        joining.have[self.seq] = self.end
        for owner in self.owners - {self.seq}:
            self._give(joining, owner)

    def give(self, owner: int) -> None:
        """Let one sequence more have the cells."""
        self.owners.add(owner)
        for joining in self.chain.joining:
            joining.asked[owner] = self.end
        for joining in self.chain.joining[: self.at + 1]:
            self._give(joining, owner)

    def _give(self, joining: JoiningLeg, owner: int) -> None:
        joining.leg.share(self.seq, owner, self.end, self.start)
        joining.have[owner] = self.end

    def take(self) -> FloatRows | None:
        """Return what came of the rows at the present leg; None if it is not there yet. Raises BrokenOffError."""
        host = self.host
        if host is not None and (self.link is None or host.link is not self.link):
            raise BrokenOffError(f"host {host.number} is lost")
        try:
            return self._leg.take(self.flight)
        except FlightFailedError as e:
            raise BrokenOffError("rows cannot be computed again") from e

    def drop(self) -> None:
        """Forget them."""
        self._leg.drop(self.flight)

    @property
    def is_last(self) -> bool:
        """Whether the present leg is the chain's last."""
        return self.at + 1 == len(self.chain.joining)


@dataclass(eq=False, slots=True)
class CellsAgain:
    """All that is computed again for the `joining` legs, by rows that are kept for the `old` ones."""

    old: Sequence[Leg]
    joining: Sequence[JoiningLeg]
    n_bytes: int = 0  # none: nothing is copied
    n_rows_again: int = 0
    _chains: list[Chain] = field(default_factory=list)
    _under_way: deque[RowsUnderWay] = field(default_factory=deque)

    def __post_init__(self) -> None:
        by_first = {leg.layers.first: leg for leg in self.old}
        for joining in self.joining:
            if (source := by_first.get(joining.leg.layers.first)) is not None:
                self._chains.append(Chain(source, []))
            self._chains[-1].joining.append(joining)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    @property
    def hosts(self) -> set[RemoteHost]:
        """The hosts from which something is awaited."""
        return {host for one in self._under_way if (host := one.host) is not None}

    def progress(self, spans: Sequence[Span]) -> bool:
        """Go on as far as can be done without waiting; return whether little is left. Raises BrokenOffError.

        Little is what all sequences have got in two iterations: less would be too much again when it is there.
        """
        self.take()
        n_left = 0
        for chain in self._chains:
            left = list(self._missing(chain, spans))
            n_left += sum(end - start for start, end, _ in left)
            n_asked = sum(one.end - one.start for one in self._under_way if one.chain is chain)
            for start, end, owners in left if n_left > self._little(spans) else ():
                if n_asked < UNDER_WAY:
                    self._ask(chain, start, end, owners)
                    n_asked += end - start
        return not self._under_way and n_left <= self._little(spans)

    def _little(self, spans: Sequence[Span]) -> int:
        n_sequences = len({seq for _, _, owners in spans for seq in owners})
        return 2 * n_sequences * len(self._chains)

    def _missing(self, chain: Chain, spans: Sequence[Span]) -> Iterator[Span]:
        return chain.joining[0].missing(spans, AGAIN_ROWS)

    def ask_all(self, spans: Sequence[Span]) -> None:
        """Ask for all that is missing. Raises BrokenOffError."""
        for chain in self._chains:
            for start, end, owners in list(self._missing(chain, spans)):
                self._ask(chain, start, end, owners)

    def _ask(self, chain: Chain, start: int, end: int, owners: frozenset[int]) -> None:
        seq = min(owners)
        one = RowsUnderWay(chain, next(_flights), seq, start, end, set(owners))
        rows = chain.rows(seq, start, end)
        for joining in chain.joining:
            joining.asked.update(dict.fromkeys(owners, end))
        self._under_way.append(one)
        one.send(rows)

    def take(self) -> None:
        """Send on what has come. Raises BrokenOffError."""
        for one in list(self._under_way):
            while (rows := one.take()) is not None:
                self.n_rows_again += len(rows)
                if one.is_last or not one.is_wanted:
                    self._under_way.remove(one)
                    break
                one.send(rows)

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on.

        Rows under way for these are of no use any more; what else was to have their cells is to be asked for again.
        """
        for chain in self._chains:
            cut = {seq: start}
            for one in self._under_way:
                if one.chain is chain and any(one.end > cut[owner] for owner in one.owners if owner in cut):
                    cut.update({owner: min(cut.get(owner, one.start), one.start) for owner in one.owners})
                    one.is_wanted = False
                    one.owners.clear()
            for owner, position in cut.items():
                chain.cut(owner, position)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let `seq` have the first `n` cells of `source`, as far as all legs of a chain have them or will have."""
        for chain in self._chains:
            n_there = min(n, *(joining.have.get(source, 0) for joining in chain.joining))
            for joining in chain.joining:
                joining.share(source, seq, n_there)
            for one in self._under_way:
                goes_on = one.chain is chain and source in one.owners and one.end <= n
                if goes_on and chain.joining[0].asked.get(seq, 0) == one.start:
                    one.give(seq)

    def clear(self) -> None:
        """Free all cells."""
        for joining in self.joining:
            joining.clear()
        for one in self._under_way:
            one.is_wanted = False
            one.owners.clear()

    def end(self) -> None:
        """Forget what is under way."""
        for one in self._under_way:
            one.drop()
        self._under_way.clear()
