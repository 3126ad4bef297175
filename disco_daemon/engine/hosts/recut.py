"""A move of boundaries between ranges while answers are written: load, copy, switch, release.

New segments are loaded beside the old ones. What the sequences have is copied there by layers, while answers go on;
what changes meanwhile is carried out at both. When little is left, no flight is under way and that little is copied,
too, the new legs take the place of the old ones, which are freed. Until then it can be broken off anywhere, and the old
legs are as they were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...types import LayerRange
from ..llama.layer_states import LayerState, StateFormatError, is_state_of, joined, state_head, unpacked
from ..llama.refusals import ModelError
from .cell_memory import CellMemory, SavedCells, SharedCells, bytes_of, new_memory
from .legs import AnySegment, HomeSegment, Leg
from .link import HostGoneError, HostLink
from .loading import BrokenOffError, HomeLoading, Loading, RemoteLoading
from .remote import RemoteHost, RemoteSegment

COPIED_ROWS = 256  # cells of a sequence copied at a time: a host that saves them does not compute meanwhile
ASKED_ROWS = 1024  # cells that are asked for and not there yet; whatever new tokens add is less, or it would not end
LEFT_ROWS = 128  # cells that may be left to copy to each leg while no answer is computed: some ms

Span = tuple[int, int, frozenset[int]]  # cells from a position up to another one, and the sequences that have them


def missing(spans: Iterable[Span], have: dict[int, int]) -> Iterator[Span]:
    """Yield what is to be copied, parents first, where each sequence of `have` has its first cells already.

    At most COPIED_ROWS cells at a time, each to all sequences that share it and lack it.
    """
    for start, end, owners in spans:
        edges = sorted({start, end, *(min(max(have.get(seq, 0), start), end) for seq in owners)})
        for first, last in pairwise(edges):
            lacking = frozenset(seq for seq in owners if have.get(seq, 0) <= first)
            for at in range(first, last if lacking else first, COPIED_ROWS):
                yield at, min(at + COPIED_ROWS, last), lacking


@dataclass(eq=False, slots=True)
class CellsCopy:
    """Cells on their way to a new leg: what is there of them, and what was asked of a host."""

    target: JoiningLeg
    owners: set[int]
    start: int
    end: int
    parts: list[tuple[LayerRange, RemoteSegment, HostLink, int] | LayerState]

    @property
    def is_there(self) -> bool:
        """Whether all parts are. Raises BrokenOffError if one will never be."""
        for part in self.parts:
            if isinstance(part, LayerState):
                continue
            _, segment, link, number = part
            if segment.host.link is not link:
                msg = f"the host of {segment} is lost"
                raise BrokenOffError(msg)
            if number not in link.saved:
                return False
        return True

    def state(self, memory: CellMemory | None) -> SavedCells:
        """Return it as the new leg takes it. Raises BrokenOffError.

        What one host has saved in the common memory stays there; what is put together here goes to the `memory`.
        """
        try:
            saved = self._whole() or self._joined()
            head = saved.read(state_head(self.end - self.start)) if isinstance(saved, SharedCells) else saved
            if not is_state_of(head, self.start, self.end):
                msg = f"cells {self.start} to {self.end} are not all there"
                raise BrokenOffError(msg)
            target = self.target.leg.replicas[0]
            if isinstance(saved, SharedCells) or memory is None or isinstance(target, HomeSegment):
                return saved
            return memory.write(saved) if target.host.shares_memory else saved
        except (StateFormatError, OSError) as e:
            raise BrokenOffError(str(e)) from e

    def _whole(self) -> SavedCells | None:
        """Return what a host has saved of just the layers that the new leg has; None if it has to be put together."""
        first = self.parts[0]
        if len(self.parts) > 1 or isinstance(first, LayerState) or first[0] != self.target.leg.layers:
            return None
        _, _, link, number = first
        return link.saved.pop(number)

    def _joined(self) -> bytes:
        states = list[LayerState]()
        for part in self.parts:
            if isinstance(part, LayerState):
                states.append(part)
            else:
                layers, _, link, number = part
                states.append(unpacked(bytes_of(link.saved.pop(number)), layers))
        return joined(states).packed()


@dataclass(eq=False, slots=True)
class JoiningLeg:
    """A leg to come: its sequences have their first cells there (`have`), or will have soon (`asked`).

    One with the `layers` of an old leg may have replicas of it; the sequences that are there already stay.
    """

    leg: Leg
    twin: Leg | None = None
    have: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    @property
    def fresh(self) -> list[AnySegment]:
        """The segments that are new."""
        return [one for one in self.leg.replicas if self.twin is None or one not in self.twin.replicas]

    def stays(self, seq: int) -> bool:
        """Whether a sequence is at one of the replicas that stay."""
        return self.twin is not None and self.twin.pins.get(seq) in self.leg.replicas

    def missing(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield what is to be asked for."""
        going = ((start, end, frozenset(seq for seq in owners if not self.stays(seq))) for start, end, owners in spans)
        return missing(going, self.asked)

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

    def take_over(self) -> None:
        """Become one of the legs: the old one's flights have landed."""
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


@dataclass(eq=False, slots=True)
class WantedLeg:
    """A leg to be: the present one with its layers, and its replicas, of which some have to be loaded first."""

    layers: LayerRange
    twin: Leg | None
    replicas: list[AnySegment | Loading]


@dataclass(slots=True)
class MoveReport:
    """What a move came to: seconds by parts, and how much was copied. `error` is empty if it was carried out."""

    ranges: tuple[LayerRange, ...]
    began_at: float
    load_s: float = 0.0
    copy_s: float = 0.0
    pause_s: float = 0.0  # that no flight could depart: the last ones land, the rest is copied, switch
    total_s: float = 0.0
    n_bytes: int = 0
    error: str = ""


@dataclass(eq=False, slots=True)
class Recut:
    """A move under way, from the `old` legs to the `wanted` ones."""

    old: Sequence[Leg]
    wanted: Sequence[WantedLeg]
    report: MoveReport
    clock: Callable[[], float] = time.perf_counter
    joining: list[JoiningLeg] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)  # as they will be; empty until all is loaded
    _copies: deque[CellsCopy] = field(default_factory=deque)
    _added: list[tuple[Leg, list[AnySegment]]] = field(default_factory=list)  # legs with all that they will have
    _memory: CellMemory | None = None

    @property
    def needs_landing(self) -> bool:
        """Whether no flight may be under way at the switch; where replicas are added alone, some may."""
        return not self.legs or bool(self.joining)

    @property
    def hosts(self) -> set[RemoteHost]:
        """The hosts from which something is awaited."""
        found = {one.segment.host for one in self._loadings() if isinstance(one, RemoteLoading)}
        parts = (part for copy in self._copies for part in copy.parts if not isinstance(part, LayerState))
        return found | {segment.host for _, segment, _, _ in parts}

    def progress(self, spans: Iterable[Span]) -> bool:
        """Go on as far as can be done without waiting; return whether it is time to switch. Raises BrokenOffError."""
        if not self.legs and not self._take_loaded():
            return False
        spans = list(spans)
        while True:
            self._take_copies()
            left = [(joining, span) for joining in self.joining for span in joining.missing(spans)]
            if sum(end - start for _, (start, end, _) in left) <= LEFT_ROWS * len(self.joining):
                return not self._copies  # the last ones are still on their way
            n_asked = sum(copy.end - copy.start for copy in self._copies)
            if n_asked >= ASKED_ROWS:
                return False
            for joining, span in left:
                if n_asked < ASKED_ROWS:
                    self._ask(joining, span)
                    n_asked += span[1] - span[0]

    def finish(self, spans: Iterable[Span], wait: Callable[[], None]) -> list[Leg]:
        """Copy what is left, and return the new legs; no flight may be under way. Raises BrokenOffError."""
        spans = list(spans)
        for joining in self.joining:
            for span in list(joining.missing(spans)):
                self._ask(joining, span)
        self._take_copies()
        while self._copies:
            wait()
            self._take_copies()
        for joining in self.joining:
            joining.take_over()
        for leg, replicas in self._added:
            leg.replicas[:] = replicas
        self._end_sharing()
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
        self._end_sharing()
        for leg in self.wanted:
            leg.replicas.clear()
        self.joining, self.legs, self._added = [], [], []
        self._copies.clear()

    def _end_sharing(self) -> None:
        """Let hosts close the common memory; home has it as long as cells there are kept for another process."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        legs = [*self.old, *self.legs]
        hosts = {one.host for leg in legs for one in leg.replicas if isinstance(one, RemoteSegment)}
        for host in hosts:
            host.unshare(memory)

    # --- what happens to cells meanwhile ----------------------------------------------------------------------------

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on, also from what is on its way."""
        for joining in self.joining:
            joining.forget(seq, start)
            n_asked = min(joining.asked.get(seq, 0), start)
            for copy in self._copies:
                if copy.target is joining and seq in copy.owners and copy.end > start:
                    copy.owners.discard(seq)
                    n_asked = min(n_asked, copy.start)
            joining.asked[seq] = n_asked

    def share(self, source: int, seq: int, n: int) -> None:
        """Let `seq` have the first `n` cells of `source`."""
        for joining in self.joining:
            joining.share(source, seq, n)
            for copy in self._copies:  # what is on its way is for both
                goes_on = copy.target is joining and source in copy.owners and copy.end <= n
                if goes_on and joining.asked.get(seq, 0) == copy.start:
                    copy.owners.add(seq)
                    joining.asked[seq] = copy.end

    def clear(self) -> None:
        """Free all cells."""
        for joining in self.joining:
            joining.clear()
        for copy in self._copies:
            copy.owners.clear()

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
        for leg in self.wanted:
            there = [one for one in leg.replicas if isinstance(one, RemoteSegment | HomeSegment)]
            if leg.twin is not None and all(one in there for one in leg.twin.replicas):
                self._added.append((leg.twin, there))
                self.legs.append(leg.twin)
                continue
            self.joining.append(JoiningLeg(Leg(leg.layers, there), leg.twin))
            self.legs.append(self.joining[-1].leg)
        return True

    def _ask(self, joining: JoiningLeg, span: Span) -> None:
        start, end, owners = span
        if self._memory is None:
            self._memory = new_memory()
        parts: list[tuple[LayerRange, RemoteSegment, HostLink, int] | LayerState] = []
        for leg in self.old:
            first, last = max(leg.layers.first, joining.leg.layers.first), min(leg.layers.last, joining.leg.layers.last)
            if first >= last:
                continue
            layers, seq = LayerRange(first, last, leg.layers.of), min(owners)
            parts.append(_part(leg.place(seq), layers, seq, (start, end), self._memory))
        self._copies.append(CellsCopy(joining, set(owners), start, end, parts))
        joining.asked.update(dict.fromkeys(owners, end))

    def _take_copies(self) -> None:
        """Put what has come into the new legs, in the order in which it was asked for. Raises BrokenOffError."""
        while self._copies and self._copies[0].is_there:
            copy = self._copies.popleft()
            target = copy.target
            saved = copy.state(self._memory)
            if not copy.owners:
                continue
            try:
                target.leg.put(sorted(copy.owners), copy.start, copy.end, saved)
            except ModelError as e:
                raise BrokenOffError(str(e)) from e
            target.have.update(dict.fromkeys(copy.owners, copy.end))
            self.report.n_bytes += len(saved)


def _part(
    segment: AnySegment, layers: LayerRange, seq: int, span: tuple[int, int], memory: CellMemory | None
) -> tuple[LayerRange, RemoteSegment, HostLink, int] | LayerState:
    """Return a sequence's cells of these layers, or the number by which they come. Raises BrokenOffError."""
    if isinstance(segment, HomeSegment):
        try:
            return unpacked(segment.model.part(seq, *span), segment.layers).cut(layers)
        except StateFormatError as e:
            raise BrokenOffError(str(e)) from e
    link = segment.host.link
    if link is None:
        msg = f"the host of {segment} is lost"
        raise BrokenOffError(msg)
    try:
        return layers, segment, link, segment.ask(seq, *span, layers, memory)
    except HostGoneError as e:
        segment.host.lose(e)
        raise BrokenOffError(str(e)) from e
