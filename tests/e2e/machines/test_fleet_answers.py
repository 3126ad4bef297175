"""What the benchmark of a fleet counts, with small numbers: answers beside random steps, and hosts that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet.answers import FAULTS, equal_answers, failures
from benchmarks.fleet.live import equal_lines, failure_lines
from disco_daemon.models.default import default_model_path

pytestmark = [
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.slow,
]


def test_random_steps_over_one_two_and_three_hosts_change_no_answer_and_leave_nothing(tmp_path: Path) -> None:
    found = equal_answers(default_model_path(), tmp_path, 30, 2)
    assert found["equal"] == found["drawn"] >= 6
    assert (found["failed"], found["wrong_cells"]) == (0, 0)
    assert found["moves"] > 0
    assert found["leaked"] == {"1": {}, "2": {}, "3": {}}
    assert all(n > 0 for rows in found["rows"].values() for n in rows)
    assert {n: len(rows) for n, rows in found["rows"].items()} == {"1": 1, "2": 2, "3": 3}
    assert "left behind: nothing" in equal_lines(found)[-1]


def test_hosts_that_are_killed_stopped_or_closed_cost_no_word(tmp_path: Path) -> None:
    found = failures(default_model_path(), tmp_path, 30, len(FAULTS), between=15)  # all in one round of answers
    assert (found["runs"], found["lost"], found["doubled"], found["failed"]) == (len(FAULTS), 0, 0, 0)
    assert found["orphans"] == 0
    assert all(recovered_s > 0 for recovered_s in found["recovery_s"].values())
    assert "0 answers lost text" in failure_lines(found)[0]
