"""A small run of `python -m benchmarks.fleet --pressure`: a control group of the kernel, and a hog in it."""

from __future__ import annotations

import pytest

from benchmarks.fleet.memory_group import NoGroupError, memory_group
from benchmarks.fleet.pressure import ENDS_S, N_READERS, SMALL, pressure, pressure_lines
from disco_daemon.models.default import default_model_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]


@pytest.mark.timeout(600)
def test_a_hog_beside_a_host_kills_nothing_and_no_answer_fails_or_changes() -> None:
    try:
        with memory_group() as group:
            assert (group.oom_kills(), group.used()) == (0, 0)
    except NoGroupError as e:
        pytest.skip(str(e))
    found = pressure(SMALL)
    assert found is not None
    assert (found["failed"], found["changed"], found["oom_kills"]) == ([], 0, 0)
    assert found["answers"] >= N_READERS
    assert found["owner_violation_s"] is not None, "it has no more than its owner allows"
    assert found["owner_violation_s"] <= ENDS_S
    assert found["hog_violation_s"], "it had more than was left, and that came to an end"
    assert any("more than its owner allows" in step["why"] for step in found["steps"])
    # That a reduction is taken back takes a minute: `test_fleet_pressure` shortens that.
    assert found["phase_3"]["undone"] is None
    assert "out-of-memory kills" in "\n".join(pressure_lines(found))
