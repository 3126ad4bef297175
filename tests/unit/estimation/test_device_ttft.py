from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.estimation.device_ttft import DeviceTtft

K, C, G = 2e-3, 0.03, 0.7

samples = st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 1e6), st.integers(0, 20)), max_size=80)


class Device:
    """A device that answers prompts of lognormal length."""

    def __init__(self, seed: int, noise: float = 0.01, outliers: float = 0.1, busy: float = 0.3) -> None:
        self._random = np.random.default_rng(seed)
        self._noise, self._outliers, self._busy = noise, outliers, busy

    def teach(self, estimate: DeviceTtft, n: int, k: float = K, c: float = C, g: float = G) -> DeviceTtft:
        """Let `estimate` see n answers."""
        for _ in range(n):
            x = int(max(1, self._random.lognormal(math.log(80), 1.2)))
            busy = int(self._random.integers(1, 4)) if self._random.random() < self._busy else 0
            ttft = (c + k * x * (1 + g * busy)) * math.exp(self._noise * self._random.standard_normal())
            slow = self._random.uniform(2, 10) if self._random.random() < self._outliers else 1.0
            estimate.add(x, ttft * slow, busy)
        return estimate


def taught(seed: int, n: int, prior: float = 1.2 * K, **options: float) -> DeviceTtft:
    return Device(seed, **options).teach(DeviceTtft(prior), n)


@pytest.mark.parametrize("prior", [K / 10, K, 3 * K])
def test_k_c_and_g_are_found_under_outliers(prior: float) -> None:
    """One sample in ten is 2 to 10 times too slow; the prior is wrong."""
    found = [taught(seed, 400, prior) for seed in range(20)]
    errors = np.abs([(e.k / K - 1, e.c / C - 1, e.g / G - 1) for e in found])
    assert np.median(errors, axis=0) == pytest.approx(0, abs=0.02)
    assert np.quantile(errors, 0.9, axis=0) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_leaves_no_bias(seed: int) -> None:
    estimate = taught(seed, 300, noise=0.05, outliers=0.0)
    assert estimate.k == pytest.approx(K, rel=0.04)
    assert estimate.predict(1000, 2) == pytest.approx(C + K * 1000 * (1 + 2 * G), rel=0.04)


def test_about_five_samples_outweigh_the_prior() -> None:
    estimate = DeviceTtft(2 * K)
    for x in (50, 100, 200, 400, 800):
        estimate.add(x, C + K * x)
    assert estimate.k == pytest.approx(K, rel=0.2)


@pytest.mark.parametrize("times", [0, 0.1, 10, 1000])
@pytest.mark.parametrize("x", [20, 300, 5000])
def test_an_outlier_hardly_moves_k(times: float, x: int) -> None:
    for seed in range(10):
        estimate = taught(seed, 60, noise=0.05)
        before = estimate.k
        estimate.add(x, (C + K * x) * times)
        assert estimate.k == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("speed", [3.0, 1.5, 0.5])
def test_a_device_that_changes_its_speed_is_followed(speed: float) -> None:
    """Battery or heat: a window of 100 samples alone would still be a third off after 100."""
    errors = []
    for seed in range(20):
        device = Device(seed, noise=0.03)
        estimate = device.teach(DeviceTtft(K), 200)
        device.teach(estimate, 25, k=speed * K, c=speed * C)
        errors.append(abs(estimate.predict(200) / (speed * (C + 200 * K)) - 1))
    assert np.median(errors) < 0.05


def test_contention_that_never_happened_keeps_its_prior() -> None:
    estimate = taught(0, 1000, busy=0.0)
    assert estimate.g == pytest.approx(1.0, rel=0.01), "a share as large as ours, of the k that was learned"
    assert DeviceTtft(K).g == pytest.approx(1.0)


def test_without_contention_g_is_learned_to_be_nothing() -> None:
    estimate = Device(0, outliers=0.0).teach(DeviceTtft(K), 300, g=0.0)
    assert estimate.g == pytest.approx(0, abs=0.02)


def test_prompts_of_one_length_only_leave_the_rest_to_the_prior() -> None:
    estimate = DeviceTtft(K)
    for _ in range(2000):
        estimate.add(100, 0.5, 1)
    assert estimate.predict(100, 1) == pytest.approx(0.5, rel=0.01)
    assert estimate.predict(200, 1) < 1.1, "not wound up"
    assert estimate.predict(0) < 0.5


@given(samples)
def test_parameters_stay_physical_whatever_comes(data: list[tuple[int, float, int]]) -> None:
    estimate = DeviceTtft(K)
    for sample in data:
        estimate.add(*sample)
    assert estimate.n == len(data)
    assert estimate.k > 0
    assert estimate.c >= 0
    assert estimate.g >= 0
    x = np.array([0, 1, 10, 1e3, 1e6])
    for busy in (0, 1, 8):
        prediction = estimate.predict(x, busy)
        assert np.isfinite(prediction).all()
        assert (np.diff(prediction) > 0).all(), "a longer prompt takes longer"


def test_a_line_that_falls_is_clipped_in_what_is_predicted_not_in_what_is_known() -> None:
    estimate = DeviceTtft(K)
    for x in (10, 500, 1000) * 20:
        estimate.add(x, 2.0 - 1e-3 * x)
    assert estimate.k == pytest.approx(1e-3 * K)
    assert estimate.predict(1000) > estimate.predict(10)
    Device(1).teach(estimate, 300)
    assert estimate.k == pytest.approx(K, rel=0.05)


def test_predictions_take_scalars_and_arrays() -> None:
    estimate = DeviceTtft(1e-3, 0.05)
    assert estimate.predict(100) == pytest.approx(0.15)
    assert estimate.predict(100, 2, load_s=1.5) == pytest.approx(1.85)
    assert type(estimate.predict(100)) is float
    assert estimate.predict(np.array([0, 100]), np.array([[0], [1]])) == pytest.approx(
        np.array([[0.05, 0.15], [0.05, 0.25]])
    )
    assert math.isinf(estimate.predict(100, load_s=math.inf)), "a model that never loads"


@given(samples, samples)
def test_a_stored_estimate_goes_on_as_before(
    before: list[tuple[int, float, int]], after: list[tuple[int, float, int]]
) -> None:
    one = DeviceTtft(K, 0.01)
    for sample in before:
        one.add(*sample)
    two = DeviceTtft.from_json(json.loads(json.dumps(one.to_json())))
    for sample in after:
        one.add(*sample)
        two.add(*sample)
    assert one.to_json() == two.to_json()
    assert one.predict(500, 1) == two.predict(500, 1)


@pytest.mark.parametrize("k", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_priors_are_refused(k: float) -> None:
    with pytest.raises(ValueError, match="prior"):
        DeviceTtft(k)
    with pytest.raises(ValueError, match="prior"):
        DeviceTtft(1e-3, k - 1e-3 if k == 0 else k)


@pytest.mark.parametrize(
    "sample",
    [
        (-1, 1.0, 0),
        (10, -1.0, 0),
        (10, math.nan, 0),
        (10, math.inf, 0),
        (10, 1.0, -1),
        (math.nan, 1.0, 0),
        (10**12, 1.0, 0),
    ],
)
def test_nonsense_samples_are_refused_and_nothing_is_learned(sample: Any) -> None:
    estimate = taught(0, 10)
    before = estimate.to_json()
    with pytest.raises(ValueError, match="no TTFT sample"):
        estimate.add(*sample)
    assert estimate.to_json() == before


@pytest.mark.parametrize(
    "question", [(-1,), (math.nan,), (1, -1), (1, 0, -1.0), (1, 0, math.nan), (np.array([1, -1]),)]
)
def test_nonsense_questions_are_refused(question: Any) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        DeviceTtft(K).predict(*question)


@pytest.mark.parametrize(
    "change",
    [
        {"prior": [1e-3]},
        {"prior": [0, 0.1]},
        {"prior": None},
        {"n": -1},
        {"n": "many"},
        {"info": [0.0] * 6},
        {"info": [-1.0] * 6},
        {"info": [1.0] * 6},
        {"info": [math.nan] * 6},
        {"vector": [1.0, 2.0]},
        {"vector": [1.0, 2.0, math.inf]},
        {"recent": [[1.0] * 4]},
        {"recent": 5},
        {"scale": 0},
        {"spread": -1},
    ],
    ids=str,
)
def test_damaged_estimates_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DeviceTtft.from_json({**taught(0, 30).to_json(), **change})
    with pytest.raises(ValueError):
        DeviceTtft.from_json({})
