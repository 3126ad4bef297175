from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.arrays import BoolArray, FloatArray
from disco_daemon.dispatch.pacer import FLOOR, SLACK, WINDOW, Amount, Pacer

Spender = Callable[[int, Amount, FloatArray], BoolArray]  # number of the request, budget handed out, a draw each

N = 2000
MEAN = 18.0  # tokens, as in Alpaca
BUDGETS = np.array([0.05, 0.1, 0.2, 0.3, 0.4])
seeds = st.integers(0, 2**32 - 1)
budgets = st.floats(0, 1)


def prompts(seed: int, lanes: int, n: int = N) -> FloatArray:
    """Whole lengths of mean MEAN, none longer than eight times that; [n, lanes]."""
    sigma = 0.54  # of Alpaca's logarithms
    lengths = MEAN * np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, (n, lanes))
    return np.clip(np.rint(lengths), 1, 8 * MEAN)


def run(pacer: Pacer, lengths: FloatArray, spender: Spender, seed: int = 0) -> FloatArray:
    """What each request spent, [n, lanes]: its tokens if the spender wanted to and the pacer allowed it."""
    draws = np.random.default_rng([seed, 1]).random(lengths.shape)
    spent = np.zeros_like(lengths)
    for i, (length, draw) in enumerate(zip(lengths, draws, strict=True)):
        wanted = spender(i, pacer.handed_out(), draw)
        spent[i] = np.where(wanted & pacer.allows(length), length, 0.0)
        pacer.settle(length, spent[i])
    return spent


def worst_window(spent: FloatArray, lengths: FloatArray) -> FloatArray:
    """The highest ratio over any WINDOW consecutive requests, [lanes]."""
    start = np.zeros((1, lengths.shape[1]))
    s, n = np.vstack([start, spent.cumsum(axis=0)]), np.vstack([start, lengths.cumsum(axis=0)])
    highest: FloatArray = ((s[WINDOW:] - s[:-WINDOW]) / (n[WINDOW:] - n[:-WINDOW])).max(axis=0)
    return highest


def by_coin(i: int, budget: Amount, draw: FloatArray) -> BoolArray:
    return np.asarray(draw < budget)


def twice_as_often_from_the_middle(i: int, budget: Amount, draw: FloatArray) -> BoolArray:
    return np.asarray(draw < np.asarray(budget) * (2 if i > N / 2 else 1))


def greedy(i: int, budget: Amount, draw: FloatArray) -> BoolArray:
    return np.ones(draw.shape, dtype=np.bool_)


# --- the window -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spender", [by_coin, twice_as_often_from_the_middle])
def test_any_200_requests_stay_within_two_points_of_the_budget(spender: Spender, seed: int) -> None:
    lengths = prompts(seed, len(BUDGETS))
    spent = run(Pacer(BUDGETS, MEAN), lengths, spender, seed)
    assert np.all(worst_window(spent, lengths) <= BUDGETS + SLACK)


def test_any_200_requests_stay_within_two_points_however_greedy_the_spender() -> None:
    lengths = prompts(0, len(BUDGETS))
    spent = run(Pacer(BUDGETS, MEAN), lengths, greedy)
    assert np.all(worst_window(spent, lengths) <= BUDGETS + SLACK)


def test_the_greediest_spender_overdraws_a_window_by_no_more_than_the_lengths_vary() -> None:
    lengths = prompts(0, len(BUDGETS))
    spent = run(Pacer(BUDGETS, MEAN), lengths, greedy)
    assert np.all(worst_window(spent, lengths) <= (BUDGETS + SLACK) * 1.2)
    assert np.all(spent.sum(axis=0) / lengths.sum(axis=0) <= BUDGETS + SLACK)


@given(seeds, st.floats(0, 1), st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.8]))
def test_with_prompts_of_one_length_the_promise_holds_whoever_spends(seed: int, often: float, budget: float) -> None:
    random = np.random.default_rng(seed)
    bursts = (np.arange(450) // random.integers(1, 300) + random.integers(2)) % 2 == 0
    pacer, lengths = Pacer(np.array([budget]), MEAN), np.full((450, 1), MEAN)
    spent = run(pacer, lengths, lambda i, _, draw: np.asarray(bursts[i] & (draw < often)), seed)
    assert worst_window(spent, lengths)[0] <= budget + SLACK


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5])
def test_when_the_window_is_full_rescues_keep_a_floor(budget: float) -> None:
    pacer = Pacer(budget, MEAN)
    while pacer.allows(MEAN):
        pacer.settle(MEAN, MEAN)
    assert pacer.handed_out() == min(FLOOR, budget)


def test_the_budget_handed_out_shrinks_before_anything_is_refused() -> None:
    pacer, handed_out = Pacer(0.3, MEAN), []
    while pacer.allows(MEAN):
        handed_out.append(float(pacer.handed_out()))
        pacer.settle(MEAN, MEAN)
    assert handed_out[0] == 0.3
    assert handed_out[-1] == FLOOR
    assert sorted(handed_out, reverse=True) == handed_out


@pytest.mark.parametrize("budget", [0.1, 0.5, 0.9])
def test_a_prompt_longer_than_a_whole_window_may_spend_is_refused(budget: float) -> None:
    pacer = Pacer(budget, MEAN)
    limit = (budget + SLACK) * WINDOW * MEAN
    assert pacer.allows(limit / 2)
    assert not pacer.allows(limit / (1 - budget - SLACK))


def test_everything_is_allowed_when_everything_is_the_budget() -> None:
    lengths = prompts(0, 1, 500)
    assert np.array_equal(run(Pacer(np.ones(1), MEAN), lengths, greedy), lengths)


@given(budgets, seeds)
def test_without_the_window_nothing_is_refused(budget: float, seed: int) -> None:
    lengths = prompts(seed, 1, 50)
    pacer = Pacer(np.array([budget]), MEAN, windowed=False)
    pacer.reserve(0.0, 1e9)
    assert np.array_equal(run(pacer, lengths, greedy), lengths)
    assert pacer.handed_out() == 0, "but nothing is handed out either"


def test_without_the_window_each_lane_has_its_own_answer() -> None:
    pacer = Pacer(BUDGETS, MEAN, windowed=False)
    assert np.array_equal(pacer.allows(1e9), np.ones(len(BUDGETS), dtype=np.bool_))


# --- the long run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("bias", [-0.1, 0.0, 0.1])
def test_a_biased_policy_is_brought_back_to_the_budget(bias: float, windowed: bool) -> None:
    wanted = np.array([0.1, 0.2, 0.3, 0.5, 0.7])
    lengths = prompts(5, len(wanted), 4000)
    pacer = Pacer(wanted, MEAN, windowed=windowed)
    spent = run(pacer, lengths, lambda _, budget, draw: np.asarray(draw < np.asarray(budget) + bias))
    np.testing.assert_allclose(spent.sum(axis=0) / lengths.sum(axis=0), wanted, atol=0.01)


@given(budgets)
def test_who_spends_what_is_handed_out_is_handed_out_the_budget(budget: float) -> None:
    pacer = Pacer(budget, MEAN)
    for _ in range(50):
        assert pacer.handed_out() == pytest.approx(budget, abs=1e-9)
        pacer.settle(MEAN, budget * MEAN)


@given(st.floats(0.05, 0.9))
def test_what_was_saved_is_handed_out_and_what_was_overspent_is_kept_back(budget: float) -> None:
    saver, spender = Pacer(budget, MEAN), Pacer(budget, MEAN)
    saver.settle(MEAN, 0.0)
    spender.settle(MEAN, MEAN)
    assert spender.handed_out() < budget < saver.handed_out() <= 1


# --- reservations ---------------------------------------------------------------------------------------------------


@given(budgets, st.lists(st.integers(1, 200), min_size=1, max_size=30), st.permutations(range(30)))
def test_what_is_reserved_is_kept_back_until_it_is_settled(budget: float, lengths: list[int], order: list[int]) -> None:
    reserving, plain = Pacer(budget, MEAN), Pacer(budget, MEAN)
    for length in lengths:
        before = reserving.handed_out(), reserving.allows(length)
        reserving.reserve(float(length), float(length))
        assert reserving.handed_out() <= before[0]
        assert reserving.allows(length) <= before[1]
    for i in order:
        if i < len(lengths):
            reserving.release(float(lengths[i]), float(lengths[i]))
            reserving.settle(float(lengths[i]), 0.0)
            plain.settle(float(lengths[i]), 0.0)
    assert reserving.handed_out() == pytest.approx(float(plain.handed_out()), abs=1e-9)
    assert reserving.allows(MEAN) == plain.allows(MEAN)


@pytest.mark.parametrize(("at_once", "unused"), [(5, 0.01), (30, 0.05)])
def test_the_promises_hold_with_many_answers_under_way(at_once: int, unused: float) -> None:
    budget, lengths = 0.3, prompts(3, 1, 4000)
    draws = np.random.default_rng(4).random(len(lengths))
    pacer, spent, under_way = Pacer(budget, MEAN), np.zeros_like(lengths), deque[tuple[int, float]]()
    for i, length in enumerate(lengths[:, 0].tolist()):
        if len(under_way) == at_once:
            number, reserved = under_way.popleft()
            pacer.release(float(lengths[number, 0]), reserved)
            pacer.settle(float(lengths[number, 0]), reserved)
        spent[i] = length * bool(draws[i] < pacer.handed_out() and pacer.allows(length))
        pacer.reserve(length, float(spent[i, 0]))
        under_way.append((i, float(spent[i, 0])))
    assert worst_window(spent, lengths)[0] <= budget + SLACK
    assert budget - unused <= spent.sum() / lengths.sum() <= budget + 0.01


# --- lanes and figures ----------------------------------------------------------------------------------------------


@given(seeds, st.booleans())
def test_lanes_do_not_know_of_each_other(seed: int, windowed: bool) -> None:
    lengths = prompts(seed, len(BUDGETS), 250)
    together = run(Pacer(BUDGETS, MEAN, windowed=windowed), lengths, by_coin, seed)
    draws = np.random.default_rng([seed, 1]).random(lengths.shape)
    lane = seed % len(BUDGETS)
    alone = Pacer(float(BUDGETS[lane]), MEAN, windowed=windowed)
    for length, draw, spent in zip(lengths[:, lane].tolist(), draws[:, lane], together[:, lane], strict=True):
        wants = bool(draw < alone.handed_out() and alone.allows(length))
        assert length * wants == spent
        alone.settle(length, float(spent))


def test_the_realised_ratio_is_told_over_all_and_over_the_last_200() -> None:
    pacer, lengths = Pacer(0.3, MEAN), prompts(1, 1, 500)
    assert pacer.realised() == {"requests": 0, "ratio": None, "last_200": None}
    spent = np.where(np.arange(500)[:, None] % 3 == 0, lengths, 0.0)
    for i, (length, used) in enumerate(zip(lengths[:, 0].tolist(), spent[:, 0].tolist(), strict=True)):
        pacer.settle(length, used)
        if i + 1 in (1, 150, 200, 201, 400, 500):
            last = slice(max(0, i + 1 - WINDOW), i + 1)
            assert pacer.realised() == {
                "requests": i + 1,
                "ratio": round(spent[: i + 1].sum() / lengths[: i + 1].sum(), 4),
                "last_200": round(spent[last].sum() / lengths[last].sum(), 4),
            }
