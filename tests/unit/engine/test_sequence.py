"""A sequence's status says where it is, and only Admission moves it, along MOVES."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.serve import admission
from disco_daemon.engine.serve.sequence import MOVES, Sequence, SequenceStatus
from tests.unit.engine.test_batch import N_CTX, Bench


class Chosen:
    """A scheduler that lets those run whose names are in `names`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def choose(self, jobs: list[Any], capacity: Any, now: float) -> list[Any]:
        del capacity, now
        return [job for job in jobs if job.key in self.names]


def consistent(s: Sequence) -> bool:
    has_cells, is_saved = s.slot >= 0, s.saved is not None
    match s.status:
        case SequenceStatus.RUNNING | SequenceStatus.PAUSED | SequenceStatus.AT_PARTNER | SequenceStatus.IN_FLIGHT:
            return has_cells and not is_saved
        case SequenceStatus.SWAPPED:
            return is_saved and not has_cells
        case SequenceStatus.WAITING | SequenceStatus.ENDED:
            return not (has_cells or is_saved)
        case SequenceStatus.HELD:
            return not (has_cells and is_saved)


def test_a_life_goes_through_all_statuses() -> None:
    bench, chosen = Bench(n_cells=2 * N_CTX), Chosen()
    bench.admission.scheduler = cast(Any, chosen)
    bench.llama.bytes_per_token = 1
    chosen.names = {"r0"}
    ids = [bench.add(text) for text in ("ghi", "foo")]  # about twenty tokens each
    (first, other) = (cast(Sequence, bench.find(id_)) for id_ in ids)
    seen = [first.status]

    def look() -> None:
        assert consistent(first)
        assert consistent(other)
        if first.status is not seen[-1]:
            seen.append(first.status)

    for _ in range(4):
        bench.step()
        look()
    assert other.status is SequenceStatus.WAITING
    chosen.names = {"r1"}
    bench.admission.reconsider()
    bench.step()
    look()
    bench.cells.swap_s_per_byte = 1e-12  # cheaper than to compute it again
    bench.admission.preempt(first)
    look()
    bench.hold("r0")
    look()
    bench.append("r0", "", go=True)
    look()
    chosen.names = {"r0", "r1"}
    bench.drain()
    look()
    assert seen[:4] == [SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.PAUSED, SequenceStatus.SWAPPED]
    assert seen[4] is SequenceStatus.HELD
    assert seen[-1] is SequenceStatus.ENDED
    assert other.has_ended
    assert all(after in MOVES[before] for before, after in itertools.pairwise(seen))
    for id_ in ids:
        bench.check_answer(id_)
    bench.check_rest()


def test_a_move_that_is_not_in_the_table_is_a_mistake_and_changes_nothing() -> None:
    bench = Bench()
    s = cast(Sequence, bench.find(bench.add("abc", max_tokens=1)))
    bench.drain()
    assert s.has_ended
    with pytest.raises(AssertionError):
        bench.admission.hold(s, 0.0)
    assert s.has_ended
    assert bench.of(wire.Done)


def test_every_status_but_the_last_can_be_left_and_any_can_be_ended() -> None:
    assert set(MOVES) == set(SequenceStatus)
    assert all(SequenceStatus.ENDED in moves for status, moves in MOVES.items() if status is not SequenceStatus.ENDED)
    assert all(status not in moves for status, moves in MOVES.items())


def test_nobody_but_admission_sets_a_status() -> None:
    folder = Path(admission.__file__).parents[1]
    setters = {path.name for path in folder.rglob("*.py") if ".status = " in path.read_text()}
    assert setters == {"admission.py"}


def test_the_scheduler_is_told_how_much_of_an_answer_is_still_to_come() -> None:
    bench = Bench()
    rest = tuple(float(100 - i) for i in range(10))
    asked: list[dict[str, Any]] = [{"rest": rest}, {"rest": rest, "max_tokens": 7}, {"max_tokens": 7}]
    told, few, unknown = (cast(Sequence, bench.find(bench.add("ghi", **more))) for more in asked)
    assert [s.job(0.0).expected_rest for s in (told, few, unknown)] == [100.0, 7.0, 0.0]
    told.tokens += [1] * 16
    assert told.job(0.0).expected_rest == 99.0
