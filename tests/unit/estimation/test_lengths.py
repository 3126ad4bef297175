from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.estimation.lengths import (
    ANSWER_WINDOW,
    EXACT,
    HALF_LIFE,
    KEPT_SHARE,
    LONGEST,
    MOST_KEPT,
    LengthDistribution,
    OutputLengths,
    PromptLengths,
)

lengths = st.lists(st.integers(1, 5000) | st.integers(1, 10**7), min_size=1, max_size=200)


def learned(prompts: list[int]) -> PromptLengths:
    estimate = PromptLengths()
    for length in prompts:
        estimate.add(length)
    return estimate


def lognormal(seed: int, n: int) -> list[int]:
    random = np.random.default_rng(seed)
    return np.maximum(1, np.exp(random.normal(5.5, 0.8, n))).astype(int).tolist()  # type: ignore[no-any-return]


# --- LengthDistribution ---------------------------------------------------------------------------------------------


@given(lengths)
def test_the_exact_distribution_has_every_length_with_its_share(data: list[int]) -> None:
    exact = LengthDistribution.of(data)
    assert exact.values.tolist() == sorted(set(data))
    for value, share in zip(exact.values, exact.shares, strict=True):
        assert share == pytest.approx(data.count(int(value)) / len(data))
    assert exact.mean == pytest.approx(np.mean(data))
    assert exact.token_shares == pytest.approx(exact.values * exact.shares / exact.mean)
    assert exact.token_shares.sum() == pytest.approx(1)


@given(lengths, st.integers(1, 40))
def test_buckets_keep_mass_and_mean_and_are_about_equal(data: list[int], j_max: int) -> None:
    exact = LengthDistribution.of(data)
    merged = exact.in_buckets(j_max)
    assert len(merged.values) <= j_max
    assert merged.shares.sum() == pytest.approx(1, abs=1e-12)
    assert merged.mean == pytest.approx(exact.mean, rel=1e-12)
    if len(exact.values) > j_max:
        assert merged.shares.max() <= 1 / j_max + exact.shares.max() + 1e-12
    else:
        assert merged is exact


def test_many_lengths_fill_the_buckets_evenly() -> None:
    merged = LengthDistribution.of(lognormal(0, 20_000)).in_buckets(32)
    assert len(merged.values) == 32
    assert merged.shares * 32 == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("data", [[], [0, 1], [-1, 5], [1.0, 2.0], [[1, 2]], ["a"], [0, 10**6], [-5, 10**6]], ids=str)
def test_nonsense_lengths_are_refused(data: list[Any]) -> None:
    with pytest.raises(ValueError):
        LengthDistribution.of(data)


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ([], []),
        ([1, 2], [1]),
        ([[1]], [[1]]),
        ([2, 1], [0.5, 0.5]),
        ([1, 1], [0.5, 0.5]),
        ([0, 1], [0.5, 0.5]),
        ([1, np.nan], [0.5, 0.5]),
        ([1, np.inf], [0.5, 0.5]),
        ([1, 2], [0.5, 0.6]),
        ([1, 2], [1.0, 0.0]),
        ([1, 2], [1.5, -0.5]),
        ([1, 2], [1.0, np.nan]),
    ],
)
def test_what_is_no_distribution_is_refused(values: list[Any], shares: list[Any]) -> None:
    with pytest.raises(ValueError):
        LengthDistribution(np.array(values, np.float64), np.array(shares, np.float64))


@pytest.mark.parametrize("j_max", [0, -1])
def test_there_is_no_fewer_than_one_bucket(j_max: int) -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        LengthDistribution.of([1, 2, 3]).in_buckets(j_max)


# --- PromptLengths --------------------------------------------------------------------------------------------------


def test_before_the_first_prompt_there_is_a_prior() -> None:
    prior = PromptLengths().distribution()
    below = prior.shares[prior.values < 60].sum()
    assert below == pytest.approx(0.5, abs=0.01)
    assert 105 < prior.mean < 130, "60 * exp(1.2^2 / 2) = 123, less the cut tails"
    assert 20 <= len(prior.values) <= 24


@given(lengths)
def test_it_is_always_a_distribution(data: list[int]) -> None:
    now = learned(data).distribution()
    assert now.shares.sum() == pytest.approx(1, abs=1e-12)
    assert (np.diff(now.values) > 0).all()
    assert 1 <= now.values[0] <= now.values[-1] <= LONGEST * (1 + 1e-12)


@given(st.lists(st.integers(1, EXACT), min_size=1, max_size=100))
def test_short_prompts_are_counted_exactly(data: list[int]) -> None:
    now = learned(data).distribution()
    for length in data:
        assert np.isclose(now.values, length, rtol=1e-12, atol=0).any()


def test_the_mean_of_long_prompts_is_kept() -> None:
    data = lognormal(1, 3000)
    weights = 2.0 ** (np.arange(3000) / HALF_LIFE)
    assert learned(data).distribution().mean == pytest.approx(np.average(data, weights=weights), rel=0.002)


def test_half_a_half_life_of_old_prompts_count_half() -> None:
    now = learned([100] * 5000 + [200] * HALF_LIFE).distribution()
    assert now.shares[np.isclose(now.values, 100)].sum() == pytest.approx(0.5, abs=0.001)


def test_the_prior_fades() -> None:
    assert learned([100] * 5).distribution().shares.max() == pytest.approx(0.5, abs=0.02)
    assert learned([100] * 3000).distribution().shares.max() > 0.9999


def test_years_of_prompts_do_not_overflow() -> None:
    now = learned([7] * 200_000 + [9]).distribution()
    assert now.values.tolist() == pytest.approx([7, 9])
    assert now.shares[1] == pytest.approx(1 - 2 ** (-1 / HALF_LIFE), rel=0.01)


@given(lengths)
def test_stored_prompt_lengths_go_on_as_before(data: list[int]) -> None:
    one = learned(data)
    two = PromptLengths.from_json(json.loads(json.dumps(one.to_json())))
    one.add(50)
    two.add(50)
    assert one.to_json() == two.to_json()
    assert (one.distribution().values == two.distribution().values).all()
    assert one.n == len(data) + 1


@pytest.mark.parametrize("length", [0, -1, float("nan"), float("inf")])
def test_no_prompt_is_shorter_than_a_token(length: Any) -> None:
    estimate = PromptLengths()
    before = estimate.to_json()
    with pytest.raises(ValueError, match="no prompt"):
        estimate.add(length)
    assert estimate.to_json() == before


@pytest.mark.parametrize(
    "change",
    [
        {"n": -1},
        {"n": "x"},
        {"n": None},
        {"weight": 0},
        {"weight": float("inf")},
        {"bins": []},
        {"bins": [[5, 1.0]]},
        {"bins": [[5, 0.0, 0.0]]},
        {"bins": [[5, -1.0, -5.0]]},
        {"bins": [[5, 1.0, 6.0]]},
        {"bins": [[5, float("nan"), 5.0]]},
        {"bins": [[5, 1.0, float("inf")]]},
        {"bins": [[5, 1.0, -1.0]]},
        {"bins": [[10**6, 1.0, 5.0]]},
        {"bins": [[-1, 1.0, 2**20]]},
        {"bins": [["5", 1.0, 5.0]]},
        {"bins": 3},
    ],
    ids=str,
)
def test_damaged_prompt_lengths_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        PromptLengths.from_json({**learned([5, 500]).to_json(), **change})
    with pytest.raises(ValueError):
        PromptLengths.from_json({})


# --- OutputLengths --------------------------------------------------------------------------------------------------


def answered(true: list[int], cut: list[int]) -> OutputLengths:
    estimate = OutputLengths()
    for length, limit in zip(true, cut, strict=True):
        estimate.add(min(length, limit), length > limit)
    return estimate


def test_before_the_first_answer_there_is_a_prior() -> None:
    curve = OutputLengths().curve()
    assert curve.quantile(0.5) == pytest.approx(150, rel=0.05)
    assert OutputLengths().expected_remaining(0) == pytest.approx(curve.mean_below(1e9))


def cuts(seed: int) -> list[int]:
    """Two readers in five leave somewhere; the others stay to the end."""
    random = np.random.default_rng(seed)
    leave = random.random(ANSWER_WINDOW) < 0.4
    return np.where(leave, random.integers(20, 800, ANSWER_WINDOW), 4096).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("generated", [0, 100, 250])
def test_censored_answers_do_not_bias_what_remains(generated: int) -> None:
    everything = np.array(lognormal(99, 200_000))
    truth = (everything[everything > generated] - generated).mean()
    errors, naive = [], []
    for seed in range(60):
        true, cut = lognormal(seed, ANSWER_WINDOW), cuts(1000 + seed)
        errors.append(answered(true, cut).expected_remaining(generated) / truth - 1)
        seen = np.minimum(true, cut)
        naive.append((seen[seen > generated] - generated).mean() / truth - 1)
    assert np.mean(naive) < -0.12, "taking the cut length for the length is biased"
    assert abs(np.mean(errors)) < 0.04


def test_where_all_are_cut_the_prior_says_how_it_goes_on() -> None:
    estimate = answered([10**6] * 100, [64] * 100)
    assert estimate.curve().at(64) > 0.97
    assert estimate.expected_remaining(64) == pytest.approx(OutputLengths().expected_remaining(64), rel=0.1)


def test_only_the_window_counts() -> None:
    old = answered([5] * 1000 + [300] * ANSWER_WINDOW, [10**9] * (1000 + ANSWER_WINDOW))
    assert old.curve().n == ANSWER_WINDOW
    assert old.curve().at(5) > 0.97
    assert old.expected_remaining(0) == pytest.approx(300, rel=0.02)


def test_the_curve_counts_the_samples_not_the_prior() -> None:
    estimate = answered([50, 60, 70, 80], [100, 100, 100, 10])
    assert (estimate.curve().n, estimate.curve().censored_share) == (4, 0.25)


def test_an_answer_cut_before_its_first_token_says_nothing() -> None:
    estimate = OutputLengths()
    estimate.add(0, censored=True)
    assert estimate.to_json() == OutputLengths().to_json()
    estimate.add(0, censored=False)
    assert estimate.curve().at(0) == pytest.approx(0.75), "a whole answer of no tokens is one"


def test_beyond_the_longest_answer_known_nothing_is_expected() -> None:
    assert answered([10], [100]).expected_remaining(10**6) == 0


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=300), st.integers(0, 5000))
def test_stored_answer_lengths_go_on_as_before(data: list[tuple[int, bool]], generated: int) -> None:
    one = OutputLengths()
    for tokens, censored in data:
        one.add(tokens, censored)
    two = OutputLengths.from_json(json.loads(json.dumps(one.to_json())))
    assert one.to_json() == two.to_json()
    assert one.expected_remaining(generated) == two.expected_remaining(generated) >= 0


@pytest.mark.parametrize("tokens", [-1, float("nan"), float("inf")])
def test_nonsense_answer_lengths_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="no answer"):
        OutputLengths().add(tokens, censored=False)
    with pytest.raises(ValueError, match="no answer"):
        OutputLengths().expected_remaining(-1)
    with pytest.raises(ValueError, match="no answer"):
        OutputLengths().expected_remaining(float("nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data", [{}, {"samples": 3}, {"samples": [[1]]}, {"samples": [["a", True]]}, {"samples": [[-1, True]]}]
)
def test_damaged_answer_lengths_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OutputLengths.from_json(data)


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.integers(1, 900)), min_size=1, max_size=60), st.data())
def test_what_is_about_expected_was_exact_a_few_answers_ago(
    answers: list[tuple[int, bool, int]], data: st.DataObject
) -> None:
    estimate, exact = OutputLengths(), list[float]()
    for answer in [*data.draw(st.sampled_from([[], answers * 4])), *answers]:
        estimate.add(*answer)
        exact.append(OutputLengths.from_json(estimate.to_json()).expected_remaining(0, 50))
        n_late = int(min(len(estimate.to_json()["samples"]) * KEPT_SHARE, MOST_KEPT))
        if data.draw(st.booleans()):
            assert estimate.about(50) in exact[-1 - n_late :]
    asked_exactly = estimate.expected_remaining(0, 50)
    assert estimate.about(50) == asked_exactly, "what was made anyway is taken"


def test_what_is_about_expected_is_made_anew_when_many_answers_have_come_since() -> None:
    estimate = OutputLengths()
    for n_tokens in lognormal(1, 1500):
        estimate.add(n_tokens, False, 40)
    before = estimate.about(40)
    for n in range(MOST_KEPT):
        estimate.add(3000, False, 40)
        assert estimate.about(40) == before, n
    estimate.add(3000, False, 40)
    assert estimate.about(40) > before
