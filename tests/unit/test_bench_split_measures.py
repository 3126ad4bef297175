"""`benchmarks.split`: what it makes of the figures that daemons tell of themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split_loop_lag import long_prompts, quantile_s
from disco_daemon.bench.child import BenchError

BOUNDS = (0.001, 0.002, 0.005, 0.01, float("inf"))


# --- event loops ------------------------------------------------------------------------------------------------------


def histogram(lateness: list[float]) -> dict[float, float]:
    return {bound: float(sum(late <= bound for late in lateness)) for bound in BOUNDS}


@given(st.lists(st.floats(0, 0.0099), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_of_a_histogram_lies_in_the_bucket_of_the_real_one(lateness: list[float], share: float) -> None:
    real = next(late for i, late in enumerate(sorted(lateness), 1) if i >= share * len(lateness))
    low, high = next(pair for pair in itertools.pairwise((0.0, *BOUNDS)) if real <= pair[1])
    assert low <= quantile_s(histogram(lateness), share) <= high


def test_a_loop_that_is_later_than_the_last_bound_is_told_by_that_bound() -> None:
    assert quantile_s(histogram([7.0]), 0.99) == 0.01
    with pytest.raises(BenchError, match="event loop"):
        quantile_s(histogram([]), 0.99)


def test_long_prompts_begin_at_different_places_of_the_texts() -> None:
    prompts = long_prompts(["a b c", "d e f"], 8, 3)
    assert prompts == ["a b c d e f a b", "c d e f a b c d", "e f a b c d e f"]
