"""Cells that are copied by layers to the legs to come, from those of the old legs that have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...types import LayerRange
from ..llama.layer_states import LayerState, StateFormatError, is_state_of, joined, state_head, unpacked
from ..llama.refusals import ModelError
from .cell_memory import CellMemory, SavedCells, SharedCells, bytes_of, new_memory
from .joining_legs import COPIED_ROWS, JoiningLeg, Span
from .legs import AnySegment, HomeSegment, Leg
from .link import HostGoneError, HostLink
from .loading import BrokenOffError
from .remote import RemoteHost, RemoteSegment

ASKED_ROWS = 2048  # cells that are asked for and not there yet; whatever new tokens add is less, or it would not end
FAR_ASKED_ROWS = 1024  # where some go over a line, on which rows of answers would wait behind them
FAR_ROWS = 32  # cells that go to another machine at a time: what a slow line does not take holds home up
LEFT_ROWS = 128  # cells that may be left to copy to each leg while no answer is computed: some ms


@dataclass(eq=False, slots=True)
class CellsCopy:
    """Cells on their way to a new leg: what is there of them, and what was asked of a host."""

    target: JoiningLeg
    owners: set[int]
    start: int
    end: int
    parts: list[tuple[LayerRange, RemoteSegment, HostLink, int] | LayerState]

    def require_sources(self) -> None:
        """Check that the hosts are there that were asked for it. Raises BrokenOffError if one is not."""
        for part in self.parts:
            if not isinstance(part, LayerState) and part[1].host.link is not part[2]:
                raise BrokenOffError(f"the host of {part[1]} is lost")

    @property
    def is_there(self) -> bool:
        """Whether all parts are. Raises BrokenOffError if one will never be."""
        self.require_sources()
        return all(isinstance(part, LayerState) or part[3] in part[2].saved for part in self.parts)

    def state(self, memory: CellMemory | None) -> SavedCells:
        """Return it as the new leg takes it. Raises BrokenOffError.

        What one host has saved in the common memory stays there; what is put together here goes to the `memory`.
        """
        try:
            saved = self._whole() or self._joined()
            head = saved.read(state_head(self.end - self.start)) if isinstance(saved, SharedCells) else saved
            if not is_state_of(head, self.start, self.end):
                raise BrokenOffError(f"cells {self.start} to {self.end} are not all there")
            target = self.target.leg.replicas[0]
            if isinstance(saved, SharedCells) or memory is None or isinstance(target, HomeSegment):
                return saved
            return memory.write(saved) if target.host.shares_memory else saved
        except (StateFormatError, OSError) as e:
            raise BrokenOffError(str(e)) from e

    def drop(self) -> None:
        """Forget what is under way of it."""
        for part in self.parts:
            if not isinstance(part, LayerState):
                part[2].drop_saved(part[3])

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
class CellCopies:
    """All that is copied from the `old` legs to the `joining` ones.

    Until the segments of the new legs are loaded it `only_saves`: what has come stays here.
    """

    old: Sequence[Leg]
    joining: Sequence[JoiningLeg]
    only_saves: bool = False
    n_bytes: int = 0
    n_rows_again: int = 0  # none: nothing is computed
    _copies: deque[CellsCopy] = field(default_factory=deque)
    _memory: CellMemory | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._copies

    @property
    def hosts(self) -> set[RemoteHost]:
        """The hosts from which something is awaited."""
        parts = (part for copy in self._copies for part in copy.parts if not isinstance(part, LayerState))
        return {segment.host for _, segment, _, _ in parts}

    def progress(self, spans: Sequence[Span]) -> bool:
        """Go on as far as can be done without waiting; return whether little is left. Raises BrokenOffError."""
        while True:
            self.take(waits=False)
            left = [(one, span) for one in self.joining for span in one.missing(spans, _rows_at_a_time(one))]
            if sum(end - start for _, (start, end, _) in left) <= LEFT_ROWS * len(self.joining):
                return not self._copies  # the last ones are still on their way
            n_asked = sum(copy.end - copy.start for copy in self._copies)
            if n_asked >= (most := self._most_asked()):
                return False
            for joining, span in left:
                if n_asked < most:
                    self._ask(joining, span)
                    n_asked += span[1] - span[0]

    def _most_asked(self) -> int:
        """Return how many cells may be under way; home asks for more once a flight, so a move waits for few of them."""
        legs = (*self.old, *(joining.leg for joining in self.joining))
        is_far = any(_is_far(segment) for leg in legs for segment in leg.replicas)
        return FAR_ASKED_ROWS if is_far else ASKED_ROWS

    def ask_all(self, spans: Sequence[Span]) -> None:
        """Ask for all that is missing. Raises BrokenOffError."""
        for joining in self.joining:
            for span in list(joining.missing(spans, _rows_at_a_time(joining))):
                self._ask(joining, span)

    def _ask(self, joining: JoiningLeg, span: Span) -> None:
        start, end, owners = span
        if self._memory is None:
            self._memory = new_memory()
        # It is under way before it is asked for: what one host has been asked is dropped when the next one is lost.
        copy = CellsCopy(joining, set(owners), start, end, [])
        self._copies.append(copy)
        for leg in self.old:
            first, last = max(leg.layers.first, joining.leg.layers.first), min(leg.layers.last, joining.leg.layers.last)
            if first >= last:
                continue
            layers, seq = LayerRange(first, last, leg.layers.of), min(owners)
            copy.parts.append(_part(leg.place(seq), layers, seq, (start, end), self._memory))
        joining.asked.update(dict.fromkeys(owners, end))

    def take(self, *, waits: bool = True) -> None:
        """Put what has come into the new legs, in the order in which it was asked for. Raises BrokenOffError.

        Unless it `waits` for a line that takes no more at present, what is for that stays here for now.
        """
        while self._copies and self._copies[0].is_there and not self.only_saves:
            if not waits and not all(map(_takes_more, self._copies[0].target.leg.replicas)):
                return
            copy = self._copies[0]  # under way until it has been put together, so that it is dropped where that fails
            target = copy.target
            saved = copy.state(self._memory)
            self._copies.popleft()
            if not copy.owners:
                continue
            try:
                target.leg.put(sorted(copy.owners), copy.start, copy.end, saved)
            except ModelError as e:
                raise BrokenOffError(str(e)) from e
            target.have.update(dict.fromkeys(copy.owners, copy.end))
            self.n_bytes += len(saved)

    def require_sources(self) -> None:
        """Check that the hosts are there that were asked for something. Raises BrokenOffError if one is not."""
        for copy in self._copies:
            copy.require_sources()

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

    def end(self) -> None:
        """Let hosts close the common memory; home has it as long as cells there are kept for another process."""
        for copy in self._copies:
            copy.drop()
        self._copies.clear()
        memory, self._memory = self._memory, None
        if memory is None:
            return
        legs = [*self.old, *(joining.leg for joining in self.joining)]
        for host in {one.host for leg in legs for one in leg.replicas if isinstance(one, RemoteSegment)}:
            host.unshare(memory)


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
        raise BrokenOffError(f"the host of {segment} is lost")
    try:
        return layers, segment, link, segment.ask(seq, *span, layers, memory)
    except HostGoneError as e:
        segment.host.lose(e)
        raise BrokenOffError(str(e)) from e


def _rows_at_a_time(joining: JoiningLeg) -> int:
    """Return how many cells of a sequence go to a leg at a time."""
    return FAR_ROWS if any(map(_is_far, joining.leg.replicas)) else COPIED_ROWS


def is_near(segments: Iterable[AnySegment]) -> bool:
    """Whether cells of all these segments go through memory, not over a line."""
    return not any(map(_is_far, segments))


def _is_far(segment: AnySegment) -> bool:
    return isinstance(segment, RemoteSegment) and not segment.host.shares_memory


def _takes_more(segment: AnySegment) -> bool:
    """Whether cells can be sent there without waiting."""
    if not isinstance(segment, RemoteSegment) or segment.host.link is None or segment.host.shares_memory:
        return True
    return segment.host.link.takes_more()
