"""The lengths of answers given the prompt's: what they are shrunk to, when they count, and how cut answers count."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.estimation.given_prompt import (
    LEAST_ANSWERS,
    LEAST_FORETOLD,
    MAX_BINS,
    PER_BIN,
    bin_edges,
    expected_log,
    foretold,
    shrunk,
)
from disco_daemon.estimation.lengths import ANSWER_WINDOW, OutputLengths
from disco_daemon.estimation.survival import Survival, heavy_tail, kaplan_meier
from disco_daemon.types import GENERATED, rest_at

POOLED = heavy_tail(150.0, 1.5)
SHORT, LONG = 20, 400  # prompts, tokens

answers = st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.integers(0, 2000)), max_size=250)


def add_all(samples: list[tuple[int, bool, int]]) -> OutputLengths:
    lengths = OutputLengths()
    for tokens, censored, prompt in samples:
        lengths.add(tokens, censored, prompt)
    return lengths


def telling(seed: int, leaving: float = 0.0) -> OutputLengths:
    """Prompts of 10 to 40 tokens get about 60, those of 300 to 500 about 300; a share of readers leaves early."""
    rng = np.random.default_rng(seed)
    lengths = OutputLengths()
    for _ in range(ANSWER_WINDOW):
        is_long = rng.random() < 0.5
        true = int(rng.lognormal(np.log(300 if is_long else 60), 0.4)) + 1
        prompt = int(rng.integers(300, 500) if is_long else rng.integers(10, 40))
        left_at = int(rng.integers(10, 600)) if rng.random() < leaving else 10**9
        lengths.add(min(true, left_at), true > left_at, prompt)
    return lengths


def silent(seed: int) -> OutputLengths:
    """The prompt says nothing of the answer."""
    rng = np.random.default_rng(seed)
    lengths = OutputLengths()
    for tokens, prompt in zip(rng.lognormal(5, 0.8, ANSWER_WINDOW), rng.integers(10, 900, ANSWER_WINDOW), strict=True):
        lengths.add(int(tokens) + 1, censored=False, prompt=int(prompt))
    return lengths


# --- the shrinkage ----------------------------------------------------------------------------------------------------


def test_without_answers_a_bin_is_the_pooled_curve() -> None:
    assert shrunk(POOLED, np.empty(0), np.empty(0, np.bool_)) is POOLED


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.floats(0.01, 100.0), st.floats(0, 4000))
def test_of_whole_answers_a_bin_is_the_mean_of_its_own_and_the_pooled_curve(
    tokens: list[int], strength: float, x: float
) -> None:
    own = kaplan_meier(tokens, np.ones(len(tokens), np.bool_))
    mixed = shrunk(POOLED, np.array(tokens, float), np.ones(len(tokens), np.bool_), strength)
    n = len(tokens)
    assert mixed.at(x) == pytest.approx((strength * POOLED.at(x) + n * own.at(x)) / (strength + n), abs=1e-9)
    assert (mixed.n, mixed.censored_share) == (n, 0)


@given(answers.filter(bool), st.floats(0, 4000))
def test_many_pseudo_answers_are_the_pooled_curve_and_hardly_any_the_bins_own(
    samples: list[tuple[int, bool, int]], x: float
) -> None:
    tokens, cut, _ = np.array(samples, float).T
    assert shrunk(POOLED, tokens, cut == 0, 1e9).at(x) == pytest.approx(POOLED.at(x), abs=1e-5)
    own = kaplan_meier(tokens, cut == 0)
    if x < tokens.max():  # beyond the longest one, only the pooled curve knows
        assert shrunk(POOLED, tokens, cut == 0, 1e-9).at(x) == pytest.approx(own.at(x), abs=1e-5)


@given(answers, st.integers(0, 3000), st.integers(0, 4000))
@settings(max_examples=60)
def test_every_curve_falls_from_1_and_the_rest_is_known_and_not_negative(
    samples: list[tuple[int, bool, int]], prompt: int, generated: int
) -> None:
    lengths = add_all(samples)
    curve = lengths.curve(prompt)
    assert (np.diff(curve.after, prepend=1.0) <= 0).all()
    assert curve.after.min() >= 0
    assert (np.diff(curve.times) > 0).all()
    assert lengths.expected_remaining(generated, prompt) >= 0


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_where_prompts_say_nothing_all_of_them_have_the_pooled_curve(seed: int) -> None:
    lengths = silent(seed)
    assert lengths.given.foretold <= LEAST_FORETOLD
    assert lengths.curve(SHORT) is lengths.curve()
    assert lengths.rest(LONG) == ()
    assert lengths.expected_remaining(7, SHORT) == lengths.expected_remaining(7)


@pytest.mark.parametrize("seed", range(5))
def test_where_they_do_the_rest_is_known_by_the_prompt(seed: int) -> None:
    lengths = telling(seed)
    assert 0.4 < lengths.given.foretold < 0.9
    short, long = lengths.expected_remaining(0, SHORT), lengths.expected_remaining(0, LONG)
    assert short < 0.5 * long
    assert short < lengths.expected_remaining(0) < long
    assert lengths.expected_remaining(0, 0) == lengths.expected_remaining(0), "of no prompt that is known"


def test_a_few_answers_foretell_nothing_yet() -> None:
    samples = [(60 + 9 * (i % 2), False, 10 + 100 * (i % 2)) for i in range(LEAST_ANSWERS)]
    assert not add_all(samples[:-1]).given.is_open
    assert add_all(samples).given.is_open


def test_answers_of_unknown_prompts_count_in_the_pooled_curve_alone() -> None:
    lengths = add_all([(50, False, 0)] * ANSWER_WINDOW)
    assert lengths.curve().n == ANSWER_WINDOW
    assert not lengths.given.is_open


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_no_more_is_foretold_than_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bins, values = rng.integers(0, 5, 150), rng.normal(size=150)
    assert foretold(bins, values) < 0.2
    assert foretold(bins, bins.astype(float)) > 0.6
    assert foretold(bins, np.full(150, 3.0)) == 0
    assert foretold(np.zeros(150, np.int64), values) <= 1e-9, "one bin says what all of them say"


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300))
def test_bins_have_as_many_prompts_as_equal_lengths_allow(prompts: list[int]) -> None:
    data = np.array(prompts)
    edges = bin_edges(data)
    n_bins = max(1, min(MAX_BINS, len(data) // PER_BIN))
    assert len(edges) < n_bins
    counts = np.bincount(edges.searchsorted(data, "right"), minlength=len(edges) + 1)
    assert counts.min() > 0
    most_alike = np.unique(data, return_counts=True)[1].max()
    assert counts.max() <= len(data) / n_bins + most_alike + 1


# --- cut answers ------------------------------------------------------------------------------------------------------


@given(answers.filter(bool))
def test_a_cut_answer_counts_as_what_it_is_expected_to_come_to(samples: list[tuple[int, bool, int]]) -> None:
    tokens, cut, _ = np.array(samples, float).T
    found = expected_log(POOLED, tokens, cut == 0)
    steps = np.log1p(POOLED.times)
    for own, length, is_cut in zip(found, tokens, cut, strict=True):
        beyond = steps[POOLED.times > length]  # its steps are of equal probability
        wanted = beyond.mean() if is_cut and len(beyond) else np.log1p(length)
        assert own == pytest.approx(wanted)


def test_a_curve_that_does_not_end_has_its_rest_at_its_last_step() -> None:
    hidden = Survival(np.array([10.0, 100.0]), np.array([0.5, 0.5]), 2.0, 0.5)
    (found,) = expected_log(hidden, np.array([20.0]), np.zeros(1, np.bool_))
    assert found == pytest.approx(np.log1p(100.0))
    kept = shrunk(hidden, np.array([5.0]), np.ones(1, np.bool_), 4.0)
    assert kept.at(100.0) == pytest.approx(0.4), "who was cut is not made to end"


def test_cut_answers_do_not_bias_what_their_bin_expects() -> None:
    whole = np.mean([telling(seed).expected_remaining(0, LONG) for seed in range(20)])
    cut = np.mean([telling(seed, leaving=0.4).expected_remaining(0, LONG) for seed in range(20)])
    assert cut == pytest.approx(whole, rel=0.1)
    rng = np.random.default_rng(0)
    stays, leaves = rng.lognormal(np.log(300), 0.4, 10**5), rng.integers(10, 600, 10**5)
    taken = np.where(rng.random(10**5) < 0.4, np.minimum(stays, leaves), stays).mean()
    assert taken < 0.9 * stays.mean(), "taking the cut length for the length is biased"


# --- kept and sent ----------------------------------------------------------------------------------------------------


@given(answers)
@settings(max_examples=30)
def test_stored_answers_go_on_with_their_prompts(samples: list[tuple[int, bool, int]]) -> None:
    one = add_all(samples)
    two = OutputLengths.from_json(json.loads(json.dumps(one.to_json())))
    assert one.to_json() == two.to_json()
    assert one.rest(LONG) == two.rest(LONG)


def test_answers_stored_without_prompts_are_taken_up() -> None:
    old = OutputLengths.from_json({"samples": [[50, False], [64, True]]})
    assert old.to_json() == {"samples": [[50, False, 0], [64, True, 0]]}


def test_the_rest_travels_as_a_table_and_is_read_between_its_points_on_a_line() -> None:
    lengths = telling(1)
    rest = lengths.rest(SHORT)
    for n in GENERATED:
        assert rest_at(rest, n) == pytest.approx(lengths.expected_remaining(n, SHORT))
    assert rest_at(rest, 24) == pytest.approx((rest[1] + rest[2]) / 2)
    assert rest_at(rest, 10**6) == rest[-1]
    assert rest_at((), 5) == 0


@given(st.integers(0, 5000))
def test_a_length_is_between_the_points_around_it(generated: int) -> None:
    assert rest_at(tuple(map(float, GENERATED)), generated) == min(generated, GENERATED[-1])
