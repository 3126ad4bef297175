"""`benchmarks.split`: what it makes of the figures that daemons tell of themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split_asked import asked_figures
from benchmarks.split_forecast import check_plan, plan_document, plan_lines
from benchmarks.split_loop_lag import long_prompts, quantile_s
from benchmarks.split_run import AskedPrompt
from benchmarks.split_tables import SplitAnswer, document
from benchmarks.split_text import SplitPrompt
from disco_daemon.bench.child import BenchError
from disco_daemon.peer.first_frames import CutFacts, TheCuts

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


# --- the plan beside what was measured --------------------------------------------------------------------------------


def cuts(chance: float = 0.0) -> TheCuts:
    """A model of four layers and a head, all of them of the same size, whose rows take 1 KB."""
    facts = tuple(CutFacts(layer, 10 * layer, 50 - 10 * layer, layer / 5, chance) for layer in (1, 2, 3))
    return TheCuts(cuts=facts, cell_bytes=0, row_bytes=1000, whole_bytes=50)


def asked(data: str, whole_s: float, split_s: float) -> AskedPrompt:
    """A prompt whose answers have eleven tokens, of the first of which nothing counts."""
    cloud = SplitAnswer("a", 11, 5.0 + 10 * whole_s, first_s=5.0)
    one = AskedPrompt(SplitPrompt(data, "?"), 11, 4, cloud, ["a"])
    one.answers["here exact"] = SplitAnswer("a", 11, 7.0 + 10 * split_s, first_s=7.0, round_trips=10)
    return one


def test_a_plan_is_fed_the_whole_models_time_and_stands_beside_the_median_of_exact_answers() -> None:
    prompts = [asked("plain", 0.02, 0.04), asked("plain", 0.02, 0.05), asked("plain", 0.02, 0.09)]
    [row] = check_plan(prompts, cuts(), 3, "here", (0.02, 8.0))
    assert (row.data, row.cut, row.rtt_ms, row.answers, row.chance) == ("plain", 3, 20.0, 3, 0.0)
    assert row.whole_token_s == pytest.approx(0.02)
    assert row.measured_token_s == pytest.approx(0.05)
    assert row.measured_tokens_per_round_trip == pytest.approx(1.1)
    assert row.planned_token_s == pytest.approx(0.02 + 0.02 + 0.001), "the whole, a round trip, and a row's bytes"
    assert row.error == pytest.approx(0.041 / 0.05 - 1)


def test_a_plan_is_judged_by_the_median_size_of_its_errors() -> None:
    prompts = [asked("plain", 0.02, 0.041), asked("texts", 0.02, 0.082)]
    found = plan_document(check_plan(prompts, cuts(), 3, "here", (0.02, 8.0)))
    assert found is not None
    assert [row["error"] for row in found["rows"]] == [pytest.approx(0), pytest.approx(-0.5)]
    assert found["error_p50"] == pytest.approx(0.25)
    [line, _] = plan_lines(found)
    assert line.startswith("plain, cut 3: planned 41.0 ms a token and 1.00 a round trip, measured 41.0 ms and 1.10")
    figures = document("m", 4, 3, None, {}, []) | {"plan": found}
    [judged] = asked_figures(figures)
    assert (judged.found, judged.bound, judged.is_met) == (pytest.approx(0.25), 0.15, False)


def test_answers_of_one_token_say_nothing_of_a_token() -> None:
    assert SplitAnswer("a", 1, 1.0, first_s=1.0).token_s is None
    assert SplitAnswer("a", 9, 1.0).token_s is None
    one = AskedPrompt(SplitPrompt("plain", "?"), 1, 4, SplitAnswer("a", 1, 1.0, first_s=1.0), ["a"])
    one.answers["here exact"] = one.cloud
    assert check_plan([one], cuts(), 3, "here", (0.02, 8.0)) == []
    assert plan_document([]) is None
    assert plan_lines(None) == []
