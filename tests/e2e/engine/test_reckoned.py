"""What a model is reckoned to take in memory is what the process takes: one of 1.2 GiB, and one of 1.7 GiB."""

from __future__ import annotations

import pytest

from benchmarks.engine.reckoned import OFF, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["hybrid", "sliding-window"])
def test_memory_is_reckoned_within_a_tenth_of_what_the_process_takes(kind: str) -> None:
    found = measure(kind)
    assert int(found["reckoned"]) == pytest.approx(int(found["taken"]), rel=OFF)
    if kind == "sliding-window":
        assert 5 * int(found["kv"]) < int(found["kv_full"]), "a fifth of what it would be if all layers had all cells"
