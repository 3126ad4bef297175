"""What `python -m benchmarks.split.exits` says of tokens that left, and of changed text, by what is known of tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from benchmarks.split.exit_figures import (  # fmt: skip
    ASKED_ERROR,
    MOST,
    JudgedTokens,
    error_of,
    errors_after_change,
    replay_verdicts,
    share_that_differs,
)
from benchmarks.split.exits import own_prompts
from disco_daemon.exits.calibrate import VerdictLearner, calibrate
from disco_daemon.exits.quality import LONGEST_DRAFT


def drawn(n: int, shift: float, seed: int) -> JudgedTokens:
    """Return tokens of answers of 50, right with a chance that their signals tell, by `shift` less often."""
    random = np.random.default_rng(seed)
    score = random.normal(1.0, 2.0, n)
    found = np.stack([score, np.abs(score) + random.normal(0, 0.2, n), -score + random.normal(0, 0.2, n)], axis=1)
    agrees = random.random(n) < 1 / (1 + np.exp(-(score - shift)))
    return JudgedTokens(found, agrees, np.zeros(n, np.bool_), np.arange(n) // 50)


def test_the_share_that_differs_is_of_tokens_that_left() -> None:
    agrees, left = np.array([True, False, True, False]), np.array([True, True, False, False])
    tokens = JudgedTokens(np.zeros((4, 3)), agrees, left, np.zeros(4, np.int64))
    assert share_that_differs(tokens) == 0.5
    assert share_that_differs(tokens.where(~left)) is None


def test_each_verdict_tells_of_drafts_up_to_the_first_wrong_one_or_of_the_token_behind_them() -> None:
    tokens = drawn(2000, 0.0, 1)
    counts = list(replay_verdicts(VerdictLearner(calibrate(tokens.found, tokens.agrees)), tokens))
    assert all(1 <= b - a <= LONGEST_DRAFT for a, b in pairwise([0, *counts]))
    assert counts[-1] == len(tokens.agrees)  # of each token that the answers have


def test_an_exit_that_is_too_sure_of_other_text_learns_it_from_verdicts() -> None:
    first, then = drawn(3000, 0.0, 2), drawn(12_000, 1.5, 3)
    errors = errors_after_change(calibrate(first.found, first.agrees), first, then)
    assert errors[0][0] == 0
    assert errors[0][1] > 0.1
    assert errors[-1][0] >= MOST
    assert errors[-1][1] <= ASKED_ERROR


def test_a_calibration_holds_for_text_like_its_own() -> None:
    first, other = drawn(6000, 0.0, 4), drawn(6000, 0.0, 5)
    assert error_of(calibrate(first.found, first.agrees), other) <= ASKED_ERROR


def test_own_prompts_are_of_two_kinds() -> None:
    found = own_prompts()
    assert {prompt.data for prompt in found} == {"questions", "texts"}
