from __future__ import annotations

import pytest

from benchmarks.fuzz import run, targets


@pytest.mark.parametrize("name", sorted(targets()))
def test_mutated_input_is_refused_or_read_and_nothing_else(name: str) -> None:
    """A short run of `python benchmarks/fuzz.py`, which makes 50,000 of each."""
    found = run(targets()[name], 300, seed=7, n_traced=0)
    assert (found["crashes"], found["slow"]) == (0, 0), found["first_crashes"]
