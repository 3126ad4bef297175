"""A move of boundaries between ranges while answers are written: load, copy, switch, release.

New segments are loaded beside the old ones. What the sequences have is copied there by layers, while answers go on, or
computed there again where it cannot be cut by layers; what changes meanwhile is carried out at both. On one machine it
is saved already while segments are loaded. When little is left, no flight is under way and that little is copied, too,
the new legs take the place of the old ones, which are freed. Until then it can be broken off anywhere, and the old legs
are as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...types import LayerRange
from .copying import CellCopies, is_near
from .joining_legs import JoiningLeg, Span
from .legs import AnySegment, HomeSegment, Leg, keep_rows
from .loading import BrokenOffError, HomeLoading, Loading, RemoteLoading
from .placing import SequencesAtWork
from .recompute import CellsAgain
from .remote import RemoteHost, RemoteSegment


@dataclass(eq=False, slots=True)
class WantedLeg:
    """A leg to be: the present one with its layers, and its replicas, of which some have to be loaded first."""

    layers: LayerRange
    twin: Leg | None
    replicas: list[AnySegment | Loading]
    shares: tuple[float, ...]
    at_work: SequencesAtWork


@dataclass(slots=True)
class MoveReport:
    """What a move came to: seconds by parts, and how much was copied. `error` is empty if it was carried out.

    Segments were loaded for `load_s` from its begin on, and then cells copied for `copy_s` until few were left; what is
    left of `total_s` is the switch. For `pause_s` of it the flight that departed last was held, or where there was none
    nothing could depart.
    """

    ranges: tuple[LayerRange, ...]
    began_at: float
    load_s: float = 0.0
    copy_s: float = 0.0
    pause_s: float = 0.0
    total_s: float = 0.0
    n_bytes: int = 0
    n_rows_again: int = 0  # rows of segments that were computed in place of copies
    error: str = ""


@dataclass(eq=False, slots=True)
class Recut:
    """A move under way, from the `old` legs to the `wanted` ones."""

    old: Sequence[Leg]
    wanted: Sequence[WantedLeg]
    report: MoveReport
    moves_states: Callable[[], bool]  # whether cells can be cut by layers; asked when all is loaded
    clock: Callable[[], float] = time.perf_counter
    joining: list[JoiningLeg] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)  # as they will be; empty until all is loaded
    _cells: CellCopies | CellsAgain | None = None  # from when all is loaded, or before it where that can be
    _joining_of: dict[int, JoiningLeg] = field(default_factory=dict)  # by the number of the wanted leg
    _added: list[tuple[Leg, list[AnySegment], tuple[float, ...]]] = field(default_factory=list)  # what legs will have

    def __post_init__(self) -> None:
        for number, leg in enumerate(self.wanted):
            stay = _there(leg)
            if leg.twin is None or not all(one in stay for one in leg.twin.replicas):
                joining = JoiningLeg(Leg(leg.layers, stay, leg.shares, leg.at_work), leg.twin)
                self.joining.append(joining)
                self._joining_of[number] = joining

    @property
    def needs_landing(self) -> bool:
        """Whether no flight may be under way at the switch; where replicas are added alone, some may."""
        return bool(self.joining)

    @property
    def hosts(self) -> set[RemoteHost]:
        """The hosts from which something is awaited."""
        found = {one.segment.host for one in self._loadings() if isinstance(one, RemoteLoading)}
        return found if self._cells is None else found | self._cells.hosts

    def progress(self, spans: Iterable[Span]) -> bool:
        """Go on as far as can be done without waiting; return whether it is time to switch. Raises BrokenOffError."""
        if not self.legs and not self._take_loaded():
            self._save_early(list(spans))
            return False
        assert self._cells is not None
        is_time = self._cells.progress(list(spans))
        if is_time and not self.report.copy_s:
            self.report.copy_s = self.clock() - self.report.began_at - self.report.load_s
        return is_time

    @property
    def ends_quickly(self) -> bool:
        """Whether what is left at the switch takes some ms: it goes through memory, and is not computed again."""
        return isinstance(self._cells, CellCopies) and self._is_near

    def ask_rest(self, spans: Iterable[Span]) -> None:
        """Ask for all that is left, for `finish` to wait for. Raises BrokenOffError."""
        assert self._cells is not None
        self._cells.ask_all(list(spans))

    def finish(self, spans: Iterable[Span], wait: Callable[[], None]) -> list[Leg]:
        """Copy what is left, and return the new legs; no flight may be under way. Raises BrokenOffError."""
        cells = self._cells
        assert cells is not None
        cells.ask_all(list(spans))
        cells.take()
        while not cells.is_empty:
            wait()
            cells.take()
        for joining in self.joining:
            joining.take_over()
        for leg, replicas, shares in self._added:
            leg.replicas[:], leg.shares = replicas, shares
        cells.end()
        self.report.n_bytes, self.report.n_rows_again = cells.n_bytes, cells.n_rows_again
        return self.legs

    def undo(self) -> None:
        """Free all that is new."""
        for loading in self._loadings():
            loading.undo()
        for joining in self.joining:
            joining.undo()
        undone = {id(segment) for one in self.joining for segment in one.leg.replicas}
        for leg in self.wanted:
            for one in leg.replicas:
                is_new = leg.twin is None or one not in leg.twin.replicas
                if isinstance(one, RemoteSegment | HomeSegment) and is_new and id(one) not in undone:
                    one.release()
        if self._cells is not None:
            self._cells.end()
        for leg in self.wanted:
            leg.replicas.clear()
        self.joining, self.legs, self._added = [], [], []

    # --- what happens to cells meanwhile ----------------------------------------------------------------------------

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on, also from what is on its way."""
        if self._cells is not None:
            self._cells.forget(seq, start)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let `seq` have the first `n` cells of `source`."""
        if self._cells is not None:
            self._cells.share(source, seq, n)

    def clear(self) -> None:
        """Free all cells."""
        if self._cells is not None:
            self._cells.clear()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _loadings(self) -> list[Loading]:
        replicas = (one for leg in self.wanted for one in leg.replicas)
        return [one for one in replicas if isinstance(one, HomeLoading | RemoteLoading)]

    def _take_loaded(self) -> bool:
        """Put what is loaded in its place; return whether that is all. Raises BrokenOffError."""
        for leg in self.wanted:
            for number, one in enumerate(leg.replicas):
                if isinstance(one, HomeLoading | RemoteLoading) and (found := one.progress()) is not None:
                    leg.replicas[number] = found
        if self._loadings():
            return False
        self.report.load_s = self.clock() - self.report.began_at
        for number, leg in enumerate(self.wanted):
            there = _there(leg)
            if (joining := self._joining_of.get(number)) is not None:
                joining.leg.replicas[:] = there
                self.legs.append(joining.leg)
            else:
                assert leg.twin is not None
                self._added.append((leg.twin, there, leg.shares))
                self.legs.append(leg.twin)
        how = CellCopies if self.moves_states() else CellsAgain
        if how is CellCopies and isinstance(self._cells, CellCopies) and self._has_sources():
            self._cells.only_saves = False
        else:
            self._forget_early()
            self._cells = how(self.old, self.joining)
        keep_rows(self.legs, how is CellsAgain)
        return True

    # --- what is saved while segments are loaded --------------------------------------------------------------------

    def _save_early(self, spans: Sequence[Span]) -> None:
        """Let hosts save cells for segments that are not loaded yet, where they stay on this machine.

        A host that is lost meanwhile is no reason to break a move off: they are saved again.
        """
        if not self._has_sources():
            self._forget_early()
        if not (self.joining and self.moves_states() and self._is_near):
            return
        if self._cells is None:
            self._cells = CellCopies(self.old, self.joining, only_saves=True)
        try:
            self._cells.progress(spans)
        except BrokenOffError:
            self._forget_early()

    @property
    def _is_near(self) -> bool:
        """Whether all segments, also those that are being loaded, are on this machine."""
        present = [one for leg in self.old for one in leg.replicas]
        wanted = [one for leg in self.wanted for one in _there(leg)]
        coming = [one.segment for one in self._loadings() if isinstance(one, RemoteLoading)]
        return is_near([*present, *wanted, *coming])

    def _has_sources(self) -> bool:
        """Whether the hosts are there that were asked for cells early."""
        try:
            if isinstance(self._cells, CellCopies):
                self._cells.require_sources()
        except BrokenOffError:
            return False
        return True

    def _forget_early(self) -> None:
        cells, self._cells = self._cells, None
        if cells is not None:
            cells.end()
        for joining in self.joining:
            joining.begin_again()


def _there(leg: WantedLeg) -> list[AnySegment]:
    """Return the replicas of a leg to be that are there."""
    return [one for one in leg.replicas if isinstance(one, RemoteSegment | HomeSegment)]
