"""What a learner keeps of a mover's speeds, so that a restart or a reload does not forget how fast the sides write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from disco_daemon.daemon.tasks.learner import Learner
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.mover import DECODE_TPS, CostMover
from disco_daemon.dispatch.planner import Planner
from disco_daemon.store import History
from disco_daemon.types import Side
from tests.fixtures.clock import StoppedClock

KEY = "a | b"


def made(history: History) -> tuple[Learner, CostMover]:
    learner = Learner(Planner(make_policy("optimal"), Side.SERVER, 0.5), history, StoppedClock(), KEY)
    learner.mover = CostMover(learner.planner, cast("Any", None))
    return learner, learner.mover


def test_speeds_that_were_seen_are_there_after_a_restart_and_no_others(tmp_path: Path) -> None:
    with History(tmp_path / "h.sqlite") as history:
        learner, mover = made(history)
        mover.observe(Side.DEVICE, 3.0)
        seen = mover.decode_tps[Side.DEVICE]
        learner.save()
        history.flush(10.0)
        again, after = made(history)
        again.restore()
    assert seen != DECODE_TPS[Side.DEVICE]
    assert after.decode_tps == {Side.DEVICE: seen, Side.SERVER: DECODE_TPS[Side.SERVER]}
    assert after.known_tps == {"device": seen}


@pytest.mark.parametrize("saved", [None, {"device": 0}, {"device": -1.0}, {"device": "fast"}, [7], {"device": None}])
def test_speeds_that_none_can_be_cost_nothing_else(saved: Any, tmp_path: Path) -> None:
    with History(tmp_path / "h.sqlite") as history:
        learner, mover = made(history)
        history.save_learned(KEY, 0.0, learner.planner.knowledge.to_json() | {"decode_tps": saved})
        history.flush(10.0)
        learner.restore()
    assert mover.decode_tps == DECODE_TPS
