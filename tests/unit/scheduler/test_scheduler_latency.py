from __future__ import annotations

import numpy as np
import pytest

from disco_daemon.scheduler.latency import IterationLatency, IterationLoad

TRUE = (0.006, 0.008, 0.0012, 2e-6)
PRIOR = (0.02, 0.004, 0.003, 0.0)


def took(load: IterationLoad, true: tuple[float, float, float, float] = TRUE) -> float:
    return true[0] + true[1] * load.n_decode + true[2] * load.n_prefill + true[3] * load.n_context


def loads(seed: int, n: int) -> list[IterationLoad]:
    random = np.random.default_rng(seed)
    decoding = random.integers(0, 17, n)
    prefill = np.where((random.random(n) < 0.2) | (decoding == 0), random.choice([16, 64, 512], n), 0)
    context = decoding * random.integers(50, 2000, n)
    return [IterationLoad(*row) for row in zip(decoding.tolist(), prefill.tolist(), context.tolist(), strict=True)]


def learned(prior: tuple[float, float, float, float] = PRIOR, n: int = 300, noise: float = 0.03) -> IterationLatency:
    random, latency = np.random.default_rng(7), IterationLatency(prior)
    for load in loads(1, n):
        latency.observe(load, took(load) * float(np.exp(random.normal(0, noise))))
    return latency


def test_before_the_first_sample_it_is_the_prior() -> None:
    latency = IterationLatency(PRIOR)
    assert latency.coefficients == pytest.approx(PRIOR)
    assert latency.predict(2, 10) == pytest.approx(0.02 + 0.008 + 0.03)


def test_one_that_begins_anew_is_as_a_new_one() -> None:
    again, new = learned(), IterationLatency(PRIOR)
    assert again.coefficients != pytest.approx(PRIOR)
    again.begin(PRIOR)
    for load in loads(3, 20):
        assert again.predict(load.n_decode, load.n_prefill, load.n_context) == new.predict(
            load.n_decode, load.n_prefill, load.n_context
        )
        again.observe(load, took(load))
        new.observe(load, took(load))
    assert again.n == new.n == 20
    with pytest.raises(ValueError, match="prior"):
        again.begin((0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_it_learns_the_machine_whatever_the_prior(scale: float) -> None:
    latency = learned((PRIOR[0] * scale, PRIOR[1] * scale, PRIOR[2] * scale, 0.0))
    for load in loads(2, 50):
        assert latency.predict(load.n_decode, load.n_prefill, load.n_context) == pytest.approx(took(load), rel=0.1)


def test_coefficients_are_never_negative() -> None:
    latency, random = IterationLatency(PRIOR), np.random.default_rng(3)
    for load in loads(4, 200):  # the time has nothing to do with the load
        latency.observe(load, float(random.uniform(0.001, 0.1)))
    assert min(latency.coefficients) >= 0
    assert latency.predict(0) > 0


def test_arrays_are_predicted_at_once() -> None:
    latency = learned()
    sizes = np.arange(1, 9)
    one_by_one = [latency.predict(int(size), 0, 100 * int(size)) for size in sizes]
    np.testing.assert_allclose(latency.predict(sizes, 0, 100 * sizes), one_by_one)


def test_one_iteration_in_which_the_machine_stood_still_is_no_speed() -> None:
    latency = learned()
    before = latency.predict(8, 0, 4000)
    latency.observe(IterationLoad(8, 0, 4000), 50 * took(IterationLoad(8, 0, 4000)))
    assert latency.predict(8, 0, 4000) == pytest.approx(before, rel=0.2)


def test_a_new_speed_is_learned() -> None:
    latency = learned()
    for load in loads(5, 300):
        latency.observe(load, 2.5 * took(load))
    assert latency.predict(8, 64, 4000) == pytest.approx(2.5 * took(IterationLoad(8, 64, 4000)), rel=0.1)


def test_an_hour_of_decoding_does_not_unlearn_prefill() -> None:
    latency = learned()
    before = latency.coefficients[2]
    for i in range(5000):
        load = IterationLoad(1 + i % 4, 0, 500 * (1 + i % 4))
        latency.observe(load, took(load))
    assert latency.coefficients[2] == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("took_s", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_is_learned_from(took_s: float) -> None:
    latency = IterationLatency(PRIOR)
    with pytest.raises(ValueError, match="iteration"):
        latency.observe(IterationLoad(1, 0, 10), took_s)
    assert latency.n == 0
    assert latency.coefficients == pytest.approx(PRIOR)


def test_a_prior_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="prior"):
        IterationLatency((0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="prior"):
        IterationLatency((0.1, -0.1, 0.0, 0.0))
    with pytest.raises(ValueError, match="share"):
        IterationLatency(PRIOR, forget=0.0)
