"""The fit of TTFT against prompt length: right on known curves, calm under outliers, honest about its errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.arrays import FloatArray
from disco_daemon.estimation.prefill_curve import Line, fit, mean95, t95

C, K, Q = 0.02, 1.2e-3, 1e-7  # s, s/token, s/token^2: a small model on one core
LENGTHS = np.repeat([32.0, 64, 128, 256, 512, 1024, 2048], 3)


def curve(q: float = Q, lengths: FloatArray = LENGTHS) -> FloatArray:
    return C + K * lengths + q * lengths**2


def noisy(seed: int, q: float = Q, outliers: float = 0.1) -> FloatArray:
    """Noise of 3 %, and one sample in ten 2 to 8 times too slow."""
    rng = np.random.default_rng(seed)
    seconds = curve(q) * np.exp(0.03 * rng.standard_normal(len(LENGTHS)))
    return np.where(rng.random(len(LENGTHS)) < outliers, seconds * rng.uniform(2, 8, len(LENGTHS)), seconds)


@pytest.mark.parametrize("q", [0.0, Q])
def test_a_noiseless_curve_is_found_to_the_digit(q: float) -> None:
    found = fit(LENGTHS, curve(q))
    assert (found.c_s, found.k_s_per_token, found.q_s_per_token2) == pytest.approx((C, K, q), rel=1e-6)
    assert found.r2 == pytest.approx(1.0, abs=1e-12)
    assert (found.n, found.n_outliers) == (21, 0)
    assert found.predict(777) == pytest.approx(C + K * 777 + q * 777**2, rel=1e-6)


def test_outliers_hardly_move_the_curve() -> None:
    found = [fit(LENGTHS, noisy(seed)) for seed in range(60)]
    at = np.array([32.0, 200, 512, 2048])
    errors = np.abs([[line.predict(n) for n in at] / curve(lengths=at) - 1 for line in found])
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.95) < 0.06
    without = fit(LENGTHS, noisy(3, outliers=0.0))
    with_one = noisy(3, outliers=0.0)
    with_one[10] *= 20
    assert fit(LENGTHS, with_one).n_outliers > without.n_outliers
    assert fit(LENGTHS, with_one).predict(512) == pytest.approx(without.predict(512), rel=0.01)


def test_q_is_kept_where_it_is_there_and_seldom_where_it_is_not() -> None:
    assert all(fit(LENGTHS, noisy(seed)).q_s_per_token2 > 0 for seed in range(30))
    assert sum(fit(LENGTHS, noisy(seed, q=0.0)).q_s_per_token2 > 0 for seed in range(60)) <= 12


def test_what_bends_does_not_make_short_prompts_absurd() -> None:
    """A straight line through a bent curve has its c below 0: ours has none, and its short prompts are right."""
    bent = curve(4e-7)
    straight = np.polyfit(LENGTHS, bent, 1)
    assert straight[1] < 0
    found = fit(LENGTHS, bent)
    assert found.c_s == pytest.approx(C, rel=1e-3)
    assert found.predict(16) == pytest.approx(C + K * 16, rel=0.01)


def test_no_c_below_0_for_a_machine_that_is_slower_with_long_prompts_only() -> None:
    seconds = np.maximum(1e-3, K * (LENGTHS - 30))
    found = fit(LENGTHS, seconds)
    assert found.c_s == 0.0
    assert found.interval(0)[0] == 0.0


def test_intervals_of_95_percent_hold_the_truth_nearly_so_often() -> None:
    """Asymptotic, of an estimate that also chose its curve: a little less often than they say."""
    found = [fit(LENGTHS, noisy(1000 + seed)) for seed in range(150)]
    for i, truth in enumerate((C, K)):
        assert np.mean([low <= truth <= high for low, high in (line.interval(i) for line in found)]) > 0.85
    speed = 512 / (K * 512 + Q * 512**2)
    assert np.mean([low <= speed <= high for _, (low, high) in (line.speed(512) for line in found)]) > 0.85


def test_speed_is_that_of_the_prompt_without_its_start() -> None:
    found = fit(LENGTHS, noisy(1))
    tps, (low, high) = found.speed(512)
    assert tps == pytest.approx(512 / (found.predict(512) - found.c_s))
    assert low < tps < high


def test_an_interval_that_reaches_down_to_nothing_still_ends() -> None:
    wild = Line(0.0, 1e-3, 0.0, 0.5, 0.5, 9, 0, ((0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)), 2.0)
    tps, (low, high) = wild.speed(512)
    assert 0 < low < tps < high < 1e6


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_coefficients_are_never_negative_and_follow_the_unit_of_time(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 3000, 24).astype(np.float64)
    seconds = rng.uniform(0.01, 1.0) + lengths * rng.uniform(1e-4, 1e-2) * np.exp(rng.normal(0, 0.2, 24))
    found, scaled = fit(lengths, seconds), fit(lengths, factor * seconds)
    both = [(line.c_s, line.k_s_per_token, line.q_s_per_token2) for line in (found, scaled)]
    assert min(both[0]) >= 0
    assert max(both[0][1:]) > 0
    assert both[1] == pytest.approx([factor * value for value in both[0]], rel=1e-4, abs=factor * 1e-9)
    assert scaled.r2 == pytest.approx(found.r2, abs=1e-6)


@pytest.mark.parametrize(
    ("tokens", "seconds", "why"),
    [
        ([32, 64, 128], [1, 2, 3], "needs 6 samples"),
        ([32, 64] * 4, [1, 2] * 4, "needs 6 samples"),
        ([32, 64, 128] * 3, [1, 2] * 4, "needs 6 samples"),
        ([32, 64, 128] * 3, [1, 2, 0] * 3, "above 0 s"),
        ([32, -64, 128] * 3, [1, 2, 3] * 3, "at least 0 tokens"),
        ([32, 64, 128] * 3, [1, 2, float("nan")] * 3, "finite"),
        ([32, 64, 128] * 3, [3, 2, 1] * 3, "do not grow"),
    ],
)
def test_what_is_no_measurement_is_refused(tokens: list[float], seconds: list[float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fit(tokens, seconds)


@pytest.mark.parametrize(("n", "t"), [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (100, 1.984)])
def test_students_t_is_that_of_the_tables(n: int, t: float) -> None:
    assert t95(n) == pytest.approx(t, abs=3e-3)


def test_a_mean_tells_how_far_it_can_be_trusted() -> None:
    mean, interval = mean95([1.0, 2.0, 3.0])
    assert interval is not None
    assert mean == 2.0
    assert interval == pytest.approx((max(0.0, 2 - 4.303 / 3**0.5), 2 + 4.303 / 3**0.5))
    assert mean95([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="mean of nothing"):
        mean95([])
