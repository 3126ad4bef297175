from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.arrays import FloatArray
from disco_daemon.estimation.survival import Survival, asked_twice, heavy_tail, kaplan_meier, mixture


@dataclass(frozen=True)
class Samples:
    times: FloatArray
    observed: list[bool]
    weights: FloatArray

    def fit(self) -> Survival:
        return kaplan_meier(self.times, self.observed, self.weights)


# Quarters make ties common; integer weights are what lifelines takes without complaint.
one_sample = st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 5))
samples = st.lists(one_sample, min_size=1, max_size=40).map(
    lambda rows: Samples(
        np.array([row[0] / 4 for row in rows]), [row[1] for row in rows], np.array([float(row[2]) for row in rows])
    )
)
curves = samples.map(Samples.fit)
probes = st.lists(st.floats(0, 15), min_size=1, max_size=20).map(np.array)
levels = st.floats(0.001, 1)


@given(samples, probes)
def test_the_curve_is_that_of_lifelines(data: Samples, x: FloatArray) -> None:
    from lifelines import KaplanMeierFitter  # type: ignore[import-untyped] # takes as long as all other tests' modules

    reference = KaplanMeierFitter().fit(data.times, data.observed, weights=data.weights)
    np.testing.assert_allclose(data.fit().at(x), reference.survival_function_at_times(x).to_numpy(), atol=1e-9)


@given(samples)
def test_n_and_the_censored_share_are_sums_of_weights(data: Samples) -> None:
    curve = data.fit()
    assert curve.n == pytest.approx(data.weights.sum())
    assert curve.censored_share == pytest.approx(data.weights @ ~np.array(data.observed) / data.weights.sum())


@given(samples)
def test_integer_weights_are_repetitions(data: Samples) -> None:
    repeat = data.weights.astype(int)
    repeated = kaplan_meier(np.repeat(data.times, repeat), np.repeat(data.observed, repeat))
    np.testing.assert_allclose(data.fit().after, repeated.after, atol=1e-12)


@given(samples, st.integers(0, 99))
def test_the_order_of_the_samples_makes_no_difference(data: Samples, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(data.times))
    shuffled = Samples(data.times[order], [data.observed[i] for i in order], data.weights[order])
    np.testing.assert_allclose(data.fit().after, shuffled.fit().after, atol=1e-12)


@given(curves)
def test_it_is_a_survival_function(curve: Survival) -> None:
    assert np.all(np.diff(curve.times) > 0)
    assert np.all(np.diff(np.concatenate([[1.0], curve.after])) <= 0)
    assert curve.after[-1] >= 0
    assert curve.at(0.0) == 1
    assert curve.at(math.inf) == curve.after[-1]


@given(samples)
def test_no_drop_is_made_up_where_the_longest_sample_is_censored(data: Samples) -> None:
    curve = data.fit()
    longest = data.times == data.times.max()
    assert curve.times[-1] == data.times.max()
    assert (curve.after[-1] > 0) == bool(np.any(~np.array(data.observed)[longest]))


@given(curves, st.floats(0, 15))
def test_mean_below_is_the_integral_of_the_curve(curve: Survival, x: float) -> None:
    edges = np.union1d(curve.times[curve.times < x], [0.0, x])
    integral = float(np.diff(edges) @ curve.at(edges[:-1]))  # a step function: exact
    assert curve.mean_below(x) == pytest.approx(integral, abs=1e-9)


@given(samples, st.floats(0, 15))
def test_without_censoring_mean_below_is_the_mean_of_the_cut_samples(data: Samples, x: float) -> None:
    curve = kaplan_meier(data.times, np.ones(len(data.times)), data.weights)
    assert curve.mean_below(x) == pytest.approx(np.average(np.minimum(data.times, x), weights=data.weights))


@given(curves)
def test_mean_below_takes_an_endless_wait(curve: Survival) -> None:
    mean = curve.mean_below(math.inf)
    assert mean == curve.mean_below(np.array([1.0, math.inf]))[1]
    assert math.isinf(mean) if curve.after[-1] > 0 else mean == pytest.approx(curve.mean_below(float(curve.times[-1])))


@given(curves, levels)
def test_a_quantile_is_the_first_time_that_reaches_its_share(curve: Survival, p: float) -> None:
    t = curve.quantile(p)
    assert t in curve.times
    if curve.after[-1] > 1 - p + 1e-9:
        assert t == curve.times[-1], "hidden by the censored tail"
        return
    assert 1 - curve.at(t) >= p - 1e-9
    assert 1 - curve.at(np.nextafter(t, 0)) < p


@given(samples, levels)
def test_without_censoring_it_is_the_quantile_of_the_samples(data: Samples, p: float) -> None:
    curve = kaplan_meier(data.times, np.ones(len(data.times)))
    n = len(data.times)
    if abs(p * n - round(p * n)) > 1e-6:  # at an exact k/n the last bit of p decides
        assert curve.quantile(p) == np.quantile(data.times, p, method="inverted_cdf")


@pytest.mark.parametrize("n", range(1, 60))
def test_rounding_does_not_move_a_quantile_to_the_next_step(n: int) -> None:
    curve = kaplan_meier(np.arange(1.0, n + 1), np.ones(n))
    share = np.arange(1, n + 1) / n
    np.testing.assert_array_equal(curve.quantile(share), curve.times)


@given(curves, probes)
def test_arrays_and_scalars_agree(curve: Survival, x: FloatArray) -> None:
    for method in (curve.at, curve.mean_below):
        np.testing.assert_array_equal(method(x), [method(float(v)) for v in x])
        assert method(x.reshape(1, -1)).shape == (1, len(x))
    p = x / 15
    np.testing.assert_array_equal(curve.quantile(p), [curve.quantile(float(v)) for v in p])


@given(curves, st.floats(0, 12), probes)
def test_given_beyond_is_the_curve_divided_by_what_is_left(curve: Survival, x: float, more: FloatArray) -> None:
    left = curve.at(x)
    beyond = curve.given_beyond(x)
    assert beyond.at(x) == 1
    if left > 0 and x < curve.times[-1]:
        np.testing.assert_allclose(beyond.at(x + more), curve.at(x + more) / left)
        assert beyond.n == pytest.approx(curve.n * left)
    else:
        assert beyond.n == 0, "nothing was seen there"
        assert np.all(beyond.at(x + more) == 1)


@given(samples, st.floats(0, 12))
def test_expected_remaining_is_the_mean_of_those_still_waiting(data: Samples, x: float) -> None:
    curve = kaplan_meier(data.times, np.ones(len(data.times)), data.weights)
    waiting = data.times > x
    rest = np.average(data.times[waiting] - x, weights=data.weights[waiting]) if waiting.any() else 0.0
    assert curve.expected_remaining(x) == pytest.approx(rest, abs=1e-9)


@given(curves, st.floats(0, 12))
def test_expected_remaining_stops_at_the_last_step(curve: Survival, x: float) -> None:
    assert 0 <= curve.expected_remaining(x) <= max(curve.times[-1] - x, 0) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 9), curves), min_size=1, max_size=4), probes)
def test_a_mixture_is_the_weighted_mean_of_its_parts(parts: list[tuple[int, Survival]], x: FloatArray) -> None:
    total = sum(weight for weight, _ in parts)
    if not total:
        with pytest.raises(ValueError, match="positive"):
            mixture(parts)
        return
    mixed = mixture(parts)
    for measure in (Survival.at, Survival.mean_below):
        mean = sum(weight / total * measure(part, x) for weight, part in parts)
        np.testing.assert_allclose(measure(mixed, x), mean, atol=1e-9)
    assert mixed.n == pytest.approx(sum(part.n for weight, part in parts if weight))
    assert np.all(np.diff(mixed.after) <= 0)


@given(st.floats(0.01, 100), st.floats(0.5, 5), st.floats(0.01, 5))
def test_the_prior_is_log_logistic(median: float, shape: float, ratio: float) -> None:
    prior = heavy_tail(median, shape, n=1000)
    assert prior.at(ratio * median) == pytest.approx(1 / (1 + ratio**shape), abs=1e-3)
    assert prior.n == prior.censored_share == 0


def test_the_sooner_of_two_requests_is_as_drawn() -> None:
    rng = np.random.default_rng(4)
    times = rng.lognormal(0, 0.7, 300)
    curve = kaplan_meier(times, np.ones(300))
    first, second = rng.choice(times, 200_000), rng.choice(times, 200_000)
    drawn = np.minimum(first, 1.5 + second)
    found = asked_twice(curve, 1.5)
    for x in (0.5, 1.4, 1.6, 2.0, 3.0):
        assert found.at(x) == pytest.approx(float((drawn > x).mean()), abs=0.005)
    assert found.mean_below(50.0) == pytest.approx(float(drawn.mean()), rel=0.01)


def test_under_the_prior_every_further_second_costs_something() -> None:
    prior = heavy_tail(0.6)
    cost = prior.mean_below(np.linspace(0, 6, 60))
    assert np.all(np.diff(cost) > 0)
    assert prior.after[-1] == 0
    assert prior.times[-1] > 10 * 0.6


def test_a_sample_of_no_weight_is_left_out() -> None:
    curve = kaplan_meier([1.0, 2.0, 9.0], [True, True, False], [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(curve.times, [1, 2])
    np.testing.assert_array_equal(curve.after, [0.5, 0])
    assert curve.censored_share == 0


@pytest.mark.parametrize(
    ("times", "observed", "weights"),
    [
        pytest.param([], [], None, id="empty"),
        pytest.param([1.0, math.nan], [True, True], None, id="a time is not a number"),
        pytest.param([1.0, math.inf], [True, True], None, id="an endless time"),
        pytest.param([1.0, -1.0], [True, True], None, id="a negative time"),
        pytest.param([math.nan, 1.0], [True, True], [0.0, 1.0], id="nonsense of no weight"),
        pytest.param([1.0, 2.0], [True], None, id="a flag is missing"),
        pytest.param([1.0, 2.0], [True, True], [1.0], id="a weight is missing"),
        pytest.param([1.0, 2.0], [True, True], [1.0, -1.0], id="a negative weight"),
        pytest.param([1.0, 2.0], [True, True], [1.0, math.nan], id="a weight is not a number"),
        pytest.param([1.0, 2.0], [True, True], [1.0, math.inf], id="an endless weight"),
        pytest.param([1.0, 2.0], [True, True], [0.0, 0.0], id="no weight at all"),
        pytest.param([[1.0, 2.0]], [[True, True]], None, id="a table"),
    ],
)
def test_nonsense_is_refused(times: list[float], observed: list[bool], weights: list[float] | None) -> None:
    with pytest.raises(ValueError):
        kaplan_meier(times, observed, weights)


@pytest.mark.parametrize("arguments", [(0.0, 2.0, 64), (math.inf, 2.0, 64), (1.0, 0.0, 64), (1.0, 2.0, 0)])
def test_a_prior_needs_positive_numbers(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        heavy_tail(*arguments)


@pytest.mark.parametrize("weights", [(), (-1.0, 2.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_a_mixture_needs_weights(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights"):
        mixture([(weight, heavy_tail(1.0)) for weight in weights])
