"""Exits in numbers: maps from sums, gradients by hand, prompts in disjoint parts, and what an exit is worth."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from disco_daemon.exits import quality
from disco_daemon.exits.fit import RidgeSums, best_map
from disco_daemon.exits.head import ExitHead, FfnBlock, Floats
from disco_daemon.exits.prompts import PromptPart, prompts
from disco_daemon.exits.training import Adam, ToldWords, loss_and_gradients, told, weights_of, with_weights
from disco_daemon.machines.split.trained_exits import parse_calibration

D, FF, VOCAB, EPS = 8, 12, 20, 1e-5


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def head(*, block: bool) -> ExitHead:
    ffn = FfnBlock(1 + 0.1 * normal(1, D), normal(2, FF, D), normal(3, FF, D), 0.3 * normal(4, D, FF))
    return ExitHead(1 + 0.1 * normal(5, D), normal(6, D, D), EPS, ffn if block else None)


def test_sums_that_were_streamed_give_the_map_that_made_the_targets() -> None:
    features, true = normal(0, 400, D), normal(1, D, D)
    sums = RidgeSums.empty(D)
    for part in np.array_split(features, 7):
        sums.add(part, part @ true.T)
    assert sums.n == 400
    np.testing.assert_allclose(sums.map(1e-9), true, atol=1e-4)


def test_the_ridge_is_picked_by_agreement_on_rows_kept_apart() -> None:
    true, output = normal(1, D, D), normal(2, VOCAB, D)
    features = normal(3, 300, D)
    sums = RidgeSums.empty(D)
    sums.add(features, features @ true.T)
    kept = normal(4, 200, D)
    _, share = best_map(sums, kept, (kept @ true.T @ output.T).argmax(1), output)
    assert share > 0.97


def test_no_rows_give_no_map() -> None:
    with pytest.raises(ValueError, match="no rows"):
        RidgeSums.empty(3).map(0.1)


@pytest.mark.parametrize("block", [False, True])
def test_the_gradients_are_those_of_finite_differences(block: bool) -> None:
    rows, output = 2 * normal(7, 5, D), normal(8, VOCAB, D)
    targets = told(normal(9, 5, D), output)
    start = head(block=block)
    _, gradients = loss_and_gradients(start, rows, targets, output)
    for name, gradient in gradients.items():
        direction = normal(10, *gradient.shape)
        losses = []
        for sign in (-1, 1):
            weights = weights_of(start)
            weights[name] += np.float32(sign * 1e-3) * direction
            losses.append(loss_and_gradients(with_weights(start, weights), rows, targets, output)[0])
        slope = (losses[1] - losses[0]) / 2e-3
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=0.02, abs=2e-3), name


def test_training_lowers_the_loss_on_what_it_is_trained_on() -> None:
    rows, output = normal(7, 64, D), normal(8, VOCAB, D)
    targets = ToldWords(np.random.default_rng(1).integers(VOCAB, size=(64, 1)), np.ones((64, 1), np.float32))
    now = head(block=True)
    before, _ = loss_and_gradients(now, rows, targets, output)
    weights, adam = weights_of(now), Adam()
    for _ in range(200):
        adam.step(weights, loss_and_gradients(with_weights(now, weights), rows, targets, output)[1], 0.01)
    assert loss_and_gradients(with_weights(now, weights), rows, targets, output)[0] < 0.3 * before


def test_a_folded_output_gives_the_logits_of_map_and_output() -> None:
    found, rows, output = head(block=True), normal(1, 6, D), normal(2, VOCAB, D)
    np.testing.assert_allclose(
        found.features(rows) @ found.folded(output).T, found.logits(rows, output), rtol=1e-4, atol=1e-4
    )


def test_prompts_of_three_parts_share_neither_a_prompt_nor_a_subject() -> None:
    patterns = (files("disco_daemon.profiles") / "exit_prompts.toml").read_text("utf-8")
    parts = {part: list(prompts(patterns, part)) for part in PromptPart}
    assert len(parts[PromptPart.TRAIN]) > 2000
    assert min(len(parts[part]) for part in PromptPart) > 300
    assert all(len(set(found)) > 0.98 * len(found) for found in parts.values())
    assert len(set().union(*map(set, parts.values()))) == sum(len(set(found)) for found in parts.values())
    assert list(prompts(patterns, PromptPart.JUDGE)) == parts[PromptPart.JUDGE]


def test_a_round_trip_gives_the_right_drafts_and_one_token_more() -> None:
    one = np.zeros(8, np.int64)
    sure, right = np.full(8, 0.99), np.ones(8, np.bool_)
    assert quality.tokens_per_round_trip(right, sure, one) == 8
    assert quality.tokens_per_round_trip(~right, sure, one) == 1
    assert quality.tokens_per_round_trip(right, np.zeros(8), one) == 1
    half = np.array([True, False] * 4)
    assert quality.tokens_per_round_trip(half, sure, one) == 2
    assert quality.tokens_per_round_trip(right, sure, np.arange(8)) == 1


def test_an_answer_counts_until_it_says_a_run_of_tokens_again() -> None:
    run = list(range(quality.REPEAT))
    assert quality.length_until_repeat([99, *run, 5, *run]) == len(run) + 2
    assert quality.length_until_repeat(run) == len(run)


def test_rouge_l_is_the_share_of_words_in_the_same_order() -> None:
    assert quality.rouge_l("A b, c d.", "a b c d") == 1.0
    assert quality.rouge_l("a x c", "a b c") == pytest.approx(2 / 3)
    assert quality.rouge_l("", "a") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '{"coefficients": [1, 2, 3], "scores": [0], "shares": [0.5]}',
        '{"coefficients": [1, 2, 3, 4], "scores": [0, 1], "shares": [0.5]}',
        '{"coefficients": [1, 2, 3, 4], "scores": [1, 0], "shares": [0.5, 0.5]}',
        '{"coefficients": [1, 2, 3, 4], "scores": [0], "shares": [1.5]}',
        '{"coefficients": [1, 2, 3, 4], "scores": [0], "shares": [0.5], "coverage": 1.5}',
        '{"coefficients": [1, 2, 3, 4], "scores": [], "shares": []}',
    ],
)
def test_a_calibration_from_elsewhere_that_cannot_be_is_none(text: str) -> None:
    assert parse_calibration(text) is None
