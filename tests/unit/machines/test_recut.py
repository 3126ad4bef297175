"""A move of layers between two hosts of one machine: what goes when, and what is left wherever it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.hosts import copying
from disco_daemon.engine.hosts.joining_legs import Span
from disco_daemon.engine.hosts.legs import Leg
from disco_daemon.engine.hosts.loading import BrokenOffError
from disco_daemon.engine.hosts.placing import SequencesAtWork
from disco_daemon.engine.hosts.recompute import CellsAgain
from disco_daemon.engine.hosts.recut import MoveReport, Recut, WantedLeg
from disco_daemon.types import LayerRange
from tests.fixtures.recut import ScriptedLink, loading_at, scripted_host, segment_at

LOW, HIGH = LayerRange(5, 15, 30), LayerRange(15, 25, 30)
OLD, STAYS, NEW = 1, 2, 3  # segments: the low layers at the first host and, later, at the second; the high ones there


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "new_memory", lambda: None)


@dataclass
class Moving:
    """A move of the low layers from one host to another, and what sequences have."""

    moves_states: bool = True
    cells: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.source, first), (self.target, second) = scripted_host(0), scripted_host(1)
        self.a: ScriptedLink = first
        self.b: ScriptedLink = second
        self.at_work, self.numbers = SequencesAtWork(), count(1)
        self.old = [
            Leg(layers, [segment_at(host, number, layers)], (), self.at_work)
            for layers, host, number in ((LOW, self.source, OLD), (HIGH, self.target, STAYS))
        ]
        low = WantedLeg(LOW, self.old[0], [loading_at(self.target, NEW, LOW)], (), self.at_work)
        high = WantedLeg(HIGH, self.old[1], list(self.old[1].replicas), (), self.at_work)
        self.move = Recut(self.old, [low, high], MoveReport((), 0.0), lambda: self.moves_states)

    @property
    def spans(self) -> list[Span]:
        return [(0, len(cells), frozenset((seq,))) for seq, cells in self.cells.items() if cells]

    def grow(self, seq: int, n: int) -> None:
        """Compute `n` tokens of a sequence, which is an order like others."""
        new = [next(self.numbers) for _ in range(n)]
        self.cells.setdefault(seq, []).extend(new)
        for leg, link in zip(self.old, (self.a, self.b), strict=True):
            leg.pins.setdefault(seq, leg.replicas[0])
            cells = link.cells[OLD if link is self.a else STAYS]
            link.waiting.append(lambda cells=cells: cells.setdefault(seq, []).extend(new))  # type: ignore[misc]

    def forget(self, seq: int, start: int) -> None:
        del self.cells.get(seq, [])[start:]
        for leg in self.old:
            leg.forget(seq, start)
        self.move.forget(seq, start)

    def share(self, source: int, seq: int, n: int) -> None:
        n = min(n, len(self.cells.get(source, ())))
        if n and not self.cells.get(seq):
            self.cells[seq] = self.cells[source][:n]
            for leg in self.old:
                leg.share(source, seq, n)
            self.move.share(source, seq, n)

    def compact(self) -> None:
        """Free the cells of nobody, as home does when none is left."""
        for leg in self.old:
            leg.compact(self.spans)
        self.move.clear()

    def serve_all(self) -> None:
        self.a.serve()
        self.b.serve()

    def finish(self) -> list[Leg]:
        return self.move.finish(self.spans, self.serve_all)

    def is_whole(self, link: ScriptedLink, segment: int) -> bool:
        """Whether a segment has what sequences have."""
        self.serve_all()
        return {seq: cells for seq, cells in link.cells[segment].items() if cells} == {
            seq: cells for seq, cells in self.cells.items() if cells
        }


def moving(*, moves_states: bool = True, n_sequences: int = 2, n: int = 300) -> Moving:
    found = Moving(moves_states)
    for seq in range(n_sequences):
        found.grow(seq, n)
    return found


def test_cells_are_saved_while_the_segment_is_loaded_and_put_when_it_is_there() -> None:
    m = moving()
    assert not m.move.progress(m.spans)
    assert (m.b.told, m.a.told) == (["load"], ["save"] * 4)  # 256 and 44 cells of each
    m.serve_all()
    assert not m.move.progress(m.spans)
    assert m.b.told == ["load"]
    m.b.end_load()
    assert m.move.progress(m.spans), "nothing is left, so it is time to switch"
    assert m.move.ends_quickly
    assert m.b.told == ["load", *["PutCells"] * 4]
    assert not m.a.saved
    m.grow(0, 1)
    assert [leg.layers for leg in m.finish()] == [LOW, HIGH]
    assert m.a.told[4:] == ["save"]
    assert m.is_whole(m.b, NEW)
    assert m.move.report.load_s > 0


def test_a_source_that_is_lost_while_a_segment_is_loaded_is_asked_again() -> None:
    m = moving()
    m.move.progress(m.spans)
    m.a.serve(2)
    lost, m.source.link = m.a, None
    assert not m.move.progress(m.spans)
    fresh: Any = ScriptedLink(cells=lost.cells, layers=lost.layers)
    lost.serve()
    m.source.link, m.a = fresh, fresh
    assert not m.move.progress(m.spans)
    assert m.a.told == ["save"] * 4
    m.b.end_load()
    m.serve_all()
    assert m.move.progress(m.spans)
    m.finish()
    assert m.is_whole(m.b, NEW)


def test_a_source_that_is_lost_after_it_breaks_the_move_off() -> None:
    m = moving()
    m.b.end_load()
    m.move.progress(m.spans)
    m.b.end_load()
    m.move.progress(m.spans)
    m.source.link = None
    with pytest.raises(BrokenOffError, match="lost"):
        m.move.progress(m.spans)


def test_what_was_saved_early_is_dropped_where_the_new_segment_cannot_have_it() -> None:
    m = moving()
    m.move.progress(m.spans)
    m.serve_all()
    assert len(m.a.saved) == 4
    m.moves_states = False  # as its host says when it has loaded
    m.b.end_load(moves_states=False)
    with pytest.raises(BrokenOffError, match="not kept"):  # these rows came by no flight
        m.move.progress(m.spans)
    assert isinstance(m.move._cells, CellsAgain)
    assert not m.a.saved
    assert "PutCells" not in m.b.told


@pytest.mark.parametrize("there", ["far", "not started"])
def test_nothing_is_saved_early_for_a_host_over_a_line_or_one_without_a_process(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = moving()
    if there == "far":
        m.b.shares_memory = False
    else:
        m.target.link = None
        monkeypatch.setattr("disco_daemon.engine.hosts.loading.HostStart.progress", lambda *_: None)
    assert not m.move.progress(m.spans)
    assert m.a.told == []
    if there == "far":
        m.b.end_load()
        m.serve_all()
        while not m.move.progress(m.spans):
            m.serve_all()
        assert not m.move.ends_quickly
        m.grow(1, 3)
        n_asked = len(m.a.told)
        m.move.ask_rest(m.spans)
        assert len(m.a.told) == n_asked + 1
        m.finish()
        assert len(m.a.told) == n_asked + 1, "the rest was asked for once"
        assert m.is_whole(m.b, NEW)


EVENTS = st.one_of(
    st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 300)),
    st.tuples(st.just("forget"), st.integers(0, 2), st.integers(0, 300)),
    st.tuples(st.just("share"), st.sampled_from([(0, 1), (1, 2), (2, 0)]), st.integers(1, 300)),
    st.tuples(st.just("compact"), st.just(0), st.just(0)),
    st.tuples(st.just("serve"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("progress"), st.just(0), st.just(0)),
    st.tuples(st.just("load"), st.just(0), st.just(0)),
)


@given(st.lists(EVENTS, max_size=30), st.booleans())
def test_a_move_ends_with_all_cells_or_as_if_it_had_not_been(
    events: list[tuple[str, Any, int]], is_broken_off: bool
) -> None:
    m = moving(n_sequences=1)
    for kind, which, n in events:
        match kind:
            case "grow":
                m.grow(which, n)
            case "forget":
                m.forget(which, min(n, len(m.cells.get(which, ()))))
            case "share":
                m.share(which[0], which[1], n)
            case "compact":
                m.compact()
            case "serve":
                (m.a, m.b)[which].serve(n)
            case "progress":
                m.move.progress(m.spans)
            case "load":
                m.b.end_load()
    if is_broken_off:
        m.move.undo()
        m.b.end_load()
        m.serve_all()
        assert set(m.a.cells) == {OLD}
        assert set(m.b.cells) == {STAYS}
        assert set(m.target.segments) == {STAYS}
    else:
        while not m.move.progress(m.spans):
            m.b.end_load()
            m.serve_all()
        legs = m.finish()
        assert m.is_whole(m.b, NEW)
        assert all(leg.pins[seq] in leg.replicas for leg in legs for seq in m.cells if m.cells[seq])
    assert m.is_whole(m.a, OLD)
    assert m.is_whole(m.b, STAYS)
    assert not m.a.saved, "no copy is left that nobody takes"


def test_a_replica_that_stays_has_its_own_sequences_alone_when_cells_are_compact_during_a_move() -> None:
    (first, a), (second, b) = scripted_host(0), scripted_host(1)
    going, staying = segment_at(first, OLD, LOW), segment_at(second, STAYS, LOW)
    leg = Leg(LOW, [going, staying], (), SequencesAtWork(), pins={0: going, 1: staying})
    a.cells[OLD], b.cells[STAYS] = {0: [1, 2, 3]}, {1: [4, 5]}
    spans: list[Span] = [(0, 3, frozenset((0,))), (0, 2, frozenset((1,)))]
    move = Recut([leg], [WantedLeg(LOW, leg, [staying], (), leg.at_work)], MoveReport((), 0.0), lambda: True)

    def serve() -> None:
        a.serve()
        b.serve()

    assert move.progress(spans), "so few are left for the switch"
    move.ask_rest(spans)
    serve()
    move.progress(spans)
    serve()
    assert b.cells[STAYS] == {0: [1, 2, 3], 1: [4, 5]}
    leg.compact(spans)
    move.clear()
    serve()
    assert (a.cells[OLD], b.cells[STAYS]) == ({0: [1, 2, 3]}, {1: [4, 5]})
    [new] = move.finish(spans, serve)
    serve()
    assert b.cells[STAYS] == {0: [1, 2, 3], 1: [4, 5]}
    assert new.pins == {0: staying, 1: staying}
