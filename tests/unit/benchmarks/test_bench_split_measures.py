"""`benchmarks.split`: what it makes of the figures that daemons tell of themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split.ablations import NO_EXIT, PROPOSED, ablation_rows, ablation_table
from benchmarks.split.asked import asked_figures
from benchmarks.split.forecast import check_plan, plan_document, plan_lines, prompt_row_s
from benchmarks.split.loop_lag import long_prompts, quantile_s
from benchmarks.split.run import AskedPrompt
from benchmarks.split.tables import Deployed, SplitAnswer, document, summarize
from benchmarks.split.text import SplitPrompt, is_base_model, question_of, text_of
from disco_daemon.bench.child import BenchError
from disco_daemon.link.relay.handshake import CutFacts, TheCuts
from disco_daemon.models.gguf import Header

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
    assert judged.found == pytest.approx(0.25)
    assert (judged.bound, judged.is_met) == (0.15, False)


def test_answers_of_one_token_say_nothing_of_a_token() -> None:
    assert SplitAnswer("a", 1, 1.0, first_s=1.0).token_s is None
    assert SplitAnswer("a", 9, 1.0).token_s is None
    one = AskedPrompt(SplitPrompt("plain", "?"), 1, 4, SplitAnswer("a", 1, 1.0, first_s=1.0), ["a"])
    one.answers["here exact"] = one.cloud
    assert check_plan([one], cuts(), 3, "here", (0.02, 8.0)) == []
    assert plan_document([]) is None
    assert plan_lines(None) == []


def test_a_prompts_row_is_timed_by_prompts_that_are_long_enough() -> None:
    short, long = asked("plain", 0.02, 0.04), replace(asked("texts", 0.02, 0.04), n_prompt=500)
    assert prompt_row_s([short], 0.02) is None
    assert prompt_row_s([short, long], 0.02) == pytest.approx((5.0 - 0.02) / 500)
    [row, _] = check_plan([short, long], cuts(), 3, "here", (0.02, 8.0))
    assert row.whole_row_s == pytest.approx(4.98 / 500)


# --- ablations --------------------------------------------------------------------------------------------------------


def summed_up(data: str, took_s: float) -> Deployed:
    return summarize(data, "exact", [SplitAnswer("a", 4, took_s, 0.5, 0.25, 2, 0, 0)], ["a"], cut=3, codec="bf16")


def test_an_ablation_takes_so_much_of_the_proposed_ways_time() -> None:
    found = {
        PROPOSED: [summed_up("plain", 2.0), summed_up("texts", 4.0)],
        NO_EXIT: [summed_up("plain", 3.0), summed_up("texts", 5.0)],
    }
    rows = ablation_rows(found)
    assert [(row["data"], row["name"], row["relative"]) for row in rows] == [
        ("plain", PROPOSED, 1.0), ("plain", NO_EXIT, 1.5), ("texts", PROPOSED, 1.0), ("texts", NO_EXIT, 1.25),
    ]  # fmt: skip
    assert (rows[1]["total_s"], rows[1]["edge_s"], rows[1]["partner_s"], rows[1]["comm_s"]) == (3.0, 0.5, 0.25, 2.25)
    head, *lines = ablation_table(rows)
    assert "".join(head.split()) == "dataablationtotalsedgespartnerslinksrelativeaskedMBupequal"
    assert "150%" in lines[1]
    assert ablation_rows({}) == []
    assert ablation_table([]) == []


# --- raw prompts ------------------------------------------------------------------------------------------------------


def header(*keys: tuple[str, str]) -> Header:
    return Header(0, dict(keys))


def test_a_model_without_a_chat_template_is_asked_to_go_on_with_text() -> None:
    assert is_base_model(header(("general.architecture", "gemma3")))
    assert is_base_model(header(("tokenizer.chat_template", "")))
    assert not is_base_model(header(("tokenizer.chat_template", "{{ messages }}")))


def test_a_raw_prompt_is_asked_over_the_route_of_completions_and_both_answer_in_chunks_with_text() -> None:
    assert question_of("Hi", raw=True) == ("/v1/completions", {"prompt": "Hi"})
    route, body = question_of("Hi", raw=False)
    assert (route, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "Hi"}])
    assert text_of({"index": 0, "text": " a", "finish_reason": None}) == " a"
    assert text_of({"index": 0, "delta": {"content": " a"}}) == " a"
    assert text_of({"index": 0, "delta": {}, "finish_reason": "stop"}) == ""
