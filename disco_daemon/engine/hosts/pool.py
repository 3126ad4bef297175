"""The hosts of a model, the legs that are made of them, and what a move of layers wants of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ...types import LayerRange
from ..llama.refusals import ModelError
from ..llama.segment import SegmentModel
from ..llama.state import State
from ..wire import Load
from .cell_memory import SavedCells, bytes_of
from .ends import LegPlan
from .legs import AnySegment, HomeSegment, Leg
from .link import HostGoneError, HostLink
from .loading import HomeLoading, HostStart, Loading, RemoteLoading
from .placing import SequencesAtWork
from .recut import WantedLeg
from .remote import OpenHost, RemoteHost, RemoteSegment

HERE = -1  # the number of home among the hosts


@dataclass(eq=False, slots=True)
class HostPool:
    """Hosts by their numbers, made when they are first needed. `load` is that of home, with the cache's size."""

    open_host: OpenHost | Sequence[OpenHost]
    folders: tuple[str, ...]
    n_embd: int
    load: Load
    hosts: dict[int, RemoteHost]
    beat: Callable[[], None] = lambda: None  # called while home waits for a host that gets on
    _n_segments: int = 0
    _tried: dict[str, bool] = field(default_factory=dict)  # by build: whether cells can be cut by layers
    _at_work: SequencesAtWork = field(default_factory=SequencesAtWork)

    def leg(self, plan: LegPlan) -> Leg:
        """Make a leg at hosts, which begin later, or at home. Raises ModelError."""
        layers, load = plan.layers, self.load_of(plan.layers, plan.path)
        replicas = list[AnySegment]()
        for number in plan.hosts:
            if number == HERE:
                replicas.append(HomeSegment(SegmentModel(load, layers)))
                continue
            segment = self._segment(number, layers, load)
            segment.host.segments[segment.number] = segment
            replicas.append(segment)
        return Leg(layers, replicas, plan.shares, self._at_work)

    def wanted(self, present: Sequence[Leg], legs: Iterable[LegPlan]) -> list[WantedLeg]:
        """Return for each leg the present one of its layers, and its replicas: those that stay, and those to load."""
        starts: dict[int, HostStart] = {}
        found = list[WantedLeg]()
        for layers, path, numbers, shares in legs:
            twin = next((leg for leg in present if leg.layers == layers), None)
            stay = {} if twin is None else {number_of(segment): segment for segment in twin.replicas}
            load = self.load_of(layers, path)
            replicas = list[AnySegment | Loading]()
            for number in numbers:
                if number in stay:
                    replicas.append(stay[number])
                elif number == HERE:
                    replicas.append(HomeLoading(load, layers))
                else:
                    start = starts.setdefault(number, HostStart())
                    replicas.append(RemoteLoading(self._segment(number, layers, load), start))
            found.append(WantedLeg(layers, twin, replicas, shares, self._at_work))
        return found

    def load_of(self, layers: LayerRange, path: str) -> Load:
        """Return how an inner range is loaded."""
        return msgspec.structs.replace(range_load(self.load, layers, path), n_ctx=self.load.n_cells, chat_template="")

    def _segment(self, number: int, layers: LayerRange, load: Load) -> RemoteSegment:
        self._n_segments += 1
        return RemoteSegment(self._host(number), self._n_segments, layers, load)

    def _host(self, number: int) -> RemoteHost:
        if (host := self.hosts.get(number)) is None:
            opener = self.open_host if callable(self.open_host) else self.open_host[number]
            host = RemoteHost(number, opener, self.folders, self.n_embd, tried=self._tried, beat=self.beat)
            self.hosts[number] = host
        return host


def range_load(load: Load, layers: LayerRange, path: str) -> Load:
    """Return how a range of the model is loaded."""
    return msgspec.structs.replace(load, model_path=path, layers=(layers.first, layers.last, layers.of))


def number_of(segment: AnySegment) -> int:
    """Return the number of the host that has a segment."""
    return segment.host.number if isinstance(segment, RemoteSegment) else HERE


def hand_over(old: Sequence[Leg], new: Sequence[Leg]) -> None:
    """Let segments that take the same rows as old ones have the rows kept for those, in place of copied cells."""
    by_first = {leg.layers.first: leg for leg in old}
    for leg in new:
        before = by_first.get(leg.layers.first)
        if before is None or before.layers == leg.layers or len(before.replicas) != 1 or len(leg.replicas) != 1:
            continue
        there, here = before.replicas[0], leg.replicas[0]
        if isinstance(there, RemoteSegment) and isinstance(here, RemoteSegment) and there.kept.is_rows:
            here.kept = there.kept


def leg_parts(legs: Sequence[Leg], seq: int, start: int, end: int, mend: Callable[[RemoteHost], None]) -> list[State]:
    """Return what a sequence has in each leg; all hosts are asked first, and lost ones are asked again.

    `mend` replaces a lost host. Raises ModelError if one cannot be had.
    """
    segments = [leg.place(seq) for leg in legs]
    found: dict[int, State] = {}
    while len(found) < len(segments):
        asked: list[tuple[int, RemoteSegment, HostLink, int]] = []
        for at, segment in enumerate(segments):
            if at in found:
                continue
            if isinstance(segment, HomeSegment):
                found[at] = segment.model.part(seq, start, end)
                continue
            mend(segment.host)
            if (link := segment.host.link) is None:
                raise ModelError(f"no host can be had for {segment}")
            try:
                asked.append((at, segment, link, segment.ask(seq, start, end, segment.layers)))
            except HostGoneError as e:
                segment.host.lose(e)
        for at, segment, link, number in asked:
            if (saved := _awaited(segment.host, link, number)) is not None:
                found[at] = bytes_of(saved)
    return [found[at] for at in range(len(segments))]


def _awaited(host: RemoteHost, link: HostLink, number: int) -> SavedCells | None:
    """Wait for a copy that a host's process was asked for; return None if that is lost."""
    if host.link is not link:
        return None
    try:
        link.wait(lambda: number in link.saved)
    except HostGoneError as e:
        host.lose(e)
        return None
    return link.saved.pop(number)
