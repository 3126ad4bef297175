"""The stated confidence is the probability to agree, and stays so when the text changes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from disco_daemon.exits.calibrate import (
    LEAST,
    VerdictLearner,
    calibrate,
    calibration_error,
    coverage,
    signals,
)


def drafts(seed: int, n: int, shift: float, slope: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return signals of logits, and verdicts whose odds depend on them, by `shift` and `slope`."""
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(n, 60)) * random.uniform(0.5, 4, size=(n, 1))).astype(np.float32)
    found = signals(logits)
    odds = slope * found[:, 0] - 0.3 * found[:, 2] + shift
    return found, random.random(n) < 1 / (1 + np.exp(-odds))


def test_signals_are_those_of_the_distribution() -> None:
    [[odds, margin, entropy]] = signals(np.log(np.array([[0.5, 0.25, 0.25]], np.float32)))
    assert odds == pytest.approx(0.0, abs=1e-5)
    assert margin == pytest.approx(np.log(2), abs=1e-5)
    assert entropy == pytest.approx(1.5 * np.log(2), abs=1e-5)


def test_the_confidence_is_the_share_that_agrees_on_tokens_it_never_saw() -> None:
    fitted = calibrate(*drafts(1, 4000, 0.5, 1.2))
    found, agrees = drafts(2, 8000, 0.5, 1.2)
    confidence = fitted.confidence(found)
    assert calibration_error(confidence, agrees) <= 0.03
    for theta in (0.8, 0.9):
        left = confidence >= theta
        assert coverage(confidence, theta) == left.mean() > 0
        assert (~agrees[left]).mean() <= 1 - theta + 0.02


@pytest.mark.parametrize(("shift", "slope"), [(-1.0, 1.2), (2.0, 0.6), (0.0, 0.2), (-2.0, 2.0)])
def test_after_a_change_of_the_text_it_is_right_again_within_two_thousand_verdicts(shift: float, slope: float) -> None:
    learner = VerdictLearner(calibrate(*drafts(1, 4000, 0.5, 1.2)))
    learner.learn(*drafts(2, 3000, 0.5, 1.2))
    found, agrees = drafts(3, 8000, shift, slope)
    before = calibration_error(learner.confidence(found), agrees)
    learner.learn(*drafts(4, 2000, shift, slope))
    after = calibration_error(learner.confidence(found), agrees)
    assert before > 0.03
    assert after <= 0.03


def test_verdicts_that_are_all_the_same_do_not_make_it_certain() -> None:
    found, _ = drafts(1, 1000, 0.5, 1.2)
    confidence = calibrate(found, np.ones(1000, np.bool_)).confidence(found)
    assert np.all(confidence < 1)
    assert np.all(np.isfinite(confidence))


def test_too_few_tokens_are_refused() -> None:
    found, agrees = drafts(1, LEAST - 1, 0.5, 1.2)
    with pytest.raises(ValueError, match="too few"):
        calibrate(found, agrees)
