"""What the engine tells of itself: it is true also when nothing is computed any more."""

from __future__ import annotations

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.serve.stats import EVERY_S, EngineStats
from tests.unit.engine.test_batch import Bench


class Told:
    """An engine's iterations, and the stats that it sends after them."""

    def __init__(self) -> None:
        self.bench, self.now = Bench(), 0.0
        self.stats = EngineStats(self.bench.batcher, lambda: self.now)

    def step(self, took_s: float) -> tuple[bool, wire.Stats | None]:
        """Whether it computed, and what it then tells."""
        with self.stats:
            busy = self.bench.step()
            self.now += took_s
        return busy, self.stats.stats_if_due(busy=busy)


def active(stats: wire.Stats) -> int:
    return stats.running + stats.paused + stats.swapped + stats.waiting


@pytest.mark.parametrize("took_s", [0.01, 2 * EVERY_S], ids=["in a quick iteration", "in one after which it is told"])
@pytest.mark.parametrize("hold", [False, True], ids=["running", "held"])
def test_an_answer_that_is_cancelled_is_not_told_of_for_ever(took_s: float, hold: bool) -> None:
    told = Told()
    name = told.bench.add(max_tokens=20, hold=hold)
    told.now = 2 * EVERY_S
    busy, before = told.step(took_s)
    assert busy
    assert before is not None
    assert active(before) == 1
    while hold and busy:  # it has caught up, and waits
        busy, later = told.step(took_s)
        before = later or before
    told.bench.batcher.cancel(name)
    busy, after = told.step(0.0)
    assert not busy
    assert after is not None
    assert active(after) == 0
    assert after.iteration_s == pytest.approx(before.iteration_s)
    assert told.step(0.0) == (False, None), "once is enough"
