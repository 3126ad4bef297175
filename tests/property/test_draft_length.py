"""The draft length is the one with the most tokens a second, whatever the link and the chances."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.scheduler.draft_length import (
    LEAST_CHANCE,
    MAX_DRAFTS,
    SLACK,
    DraftLength,
    RunTimes,
    expected_run,
    expected_tokens,
    is_worth_drafting,
)

some_s = st.floats(1e-5, 1.0)
times_of = st.builds(RunTimes, some_s, st.floats(1e-4, 5.0), some_s)
chance_of = st.floats(0, 1)
HOME = RunTimes(edge_s=0.008, round_trip_s=0.030, partner_s=0.003)


def chosen(times: RunTimes, chances: list[float]) -> int:
    n = 0
    while n < len(chances) and is_worth_drafting(times, chances[:n], chances[n]):
        n += 1
    return n


@given(times_of, st.lists(chance_of, max_size=MAX_DRAFTS))
def test_no_other_length_yields_more_tokens_a_second(times: RunTimes, chances: list[float]) -> None:
    rates = [expected_tokens(chances[:n]) / times.run_s(n) for n in range(len(chances) + 1)]
    assert rates[chosen(times, chances)] >= max(rates) * (1 - 1e-9)


@given(times_of, chance_of, chance_of)
def test_a_better_chance_never_shortens_a_run_nor_costs_time(times: RunTimes, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert expected_run(times, less).n_drafts <= expected_run(times, more).n_drafts
    assert expected_run(times, less).token_s >= expected_run(times, more).token_s * (1 - 1e-9)


@given(times_of, chance_of, st.floats(1, 100))
def test_a_slower_link_never_shortens_a_run(times: RunTimes, chance: float, slower: float) -> None:
    slow = RunTimes(times.edge_s, times.round_trip_s * slower, times.partner_s)
    assert expected_run(times, chance).n_drafts <= expected_run(slow, chance).n_drafts <= MAX_DRAFTS


@given(times_of, chance_of)
def test_drafts_never_cost_time_against_asking_for_each_token(times: RunTimes, chance: float) -> None:
    run = expected_run(times, chance)
    assert run.token_s <= times.run_s(0) * (1 + 1e-9)
    assert run.token_s == pytest.approx(times.run_s(run.n_drafts) / run.n_tokens)
    assert 1 <= run.n_tokens <= run.n_drafts + 1


def test_a_first_draft_over_a_round_trip_of_30_ms_pays_from_a_chance_of_three_tenths_on() -> None:
    assert not is_worth_drafting(HOME, [], 0.26)
    assert is_worth_drafting(HOME, [], 0.28)


def test_nothing_is_drafted_without_a_chance_or_behind_the_end_of_the_text() -> None:
    drafting = DraftLength(HOME)
    assert expected_run(HOME, 0.0).n_drafts == 0
    assert drafting.wants_draft([0.9], 0.9)
    assert not drafting.wants_draft([0.9], 0.9, ends_text=True)
    assert not drafting.wants_draft([1.0] * MAX_DRAFTS, 1.0)


@given(times_of, st.integers(0, 2**32), st.floats(0, 0.3))
def test_the_times_of_a_link_are_learned_although_some_measurements_are_far_off(
    real: RunTimes, seed: int, share_off: float
) -> None:
    rng = random.Random(seed)
    drafting = DraftLength(RunTimes(0.5, 0.5, 0.5))
    fixed_s = real.round_trip_s / 2
    for at in range(60):
        off = 10.0 if at % 31 < share_off * 31 else 1.0  # of any 31 of them the same share
        drafting.observe_step(real.edge_s * off * rng.uniform(0.99, 1.01))
        n_rows = rng.randint(1, 9)
        busy_s = (fixed_s + n_rows * real.partner_s) * (off if share_off < 0.1 else 1.0)
        drafting.observe_round_trip(n_rows, fixed_s + busy_s, busy_s)
    assert drafting.times.edge_s == pytest.approx(real.edge_s, rel=0.02)
    if share_off == 0:
        assert drafting.times.partner_s == pytest.approx(real.partner_s, rel=1e-3)
        assert drafting.times.round_trip_s == pytest.approx(real.round_trip_s, rel=1e-3)


def test_a_partner_that_was_busy_now_and_then_is_not_taken_for_a_slow_one() -> None:
    drafting = DraftLength(RunTimes(0.1, 0.1, 0.1))
    for at in range(31):
        n_rows = 1 + at % 4
        busy_s = 0.010 + 0.003 * n_rows + (0.5 if at % 10 == 7 else 0.0)
        drafting.observe_round_trip(n_rows, 0.020 + busy_s, busy_s)
    assert drafting.times.partner_s == pytest.approx(0.003, rel=0.05)
    assert drafting.times.round_trip_s == pytest.approx(0.030, rel=0.05)


@given(st.integers(0, 2**32))
def test_the_jitter_of_a_network_makes_no_row_slow(seed: int) -> None:
    rng = random.Random(seed)
    drafting = DraftLength(HOME)
    for n_rows in (2, 1, 3, 1, 2):  # as many as an answer's first words take
        busy_s = 0.010 + 0.003 * n_rows
        drafting.observe_round_trip(n_rows, 0.020 + rng.uniform(0, 0.050) + busy_s, busy_s)
    assert drafting.times.partner_s == pytest.approx(0.003)


def test_a_new_speed_is_known_after_as_many_measurements_as_count() -> None:
    drafting = DraftLength(HOME)
    for took_s in [0.008] * 40 + [0.020] * 20:
        drafting.observe_step(took_s)
    assert drafting.times.edge_s == pytest.approx(0.020)


def test_round_trips_of_one_length_leave_the_share_of_a_row_as_it_was_believed() -> None:
    drafting = DraftLength(HOME)
    drafting.observe_round_trip(2, 0.066, 0.016)
    assert (drafting.times.edge_s, drafting.times.partner_s) == (0.008, 0.003)
    assert drafting.times.round_trip_s == pytest.approx(0.060)


@pytest.mark.parametrize("took_s", [0.0, -1.0, float("inf"), float("nan")])
def test_times_that_cannot_be_are_refused_and_change_nothing(took_s: float) -> None:
    drafting = DraftLength(HOME)
    with pytest.raises(ValueError, match="took"):
        drafting.observe_step(took_s)
    with pytest.raises(ValueError, match="took"):
        drafting.observe_round_trip(1, took_s, 0.1)
    with pytest.raises(ValueError, match="finite"):
        RunTimes(0.1, took_s, 0.1)
    assert drafting.times == HOME


def test_a_partner_is_not_believed_to_have_been_busy_for_longer_than_it_took() -> None:
    drafting = DraftLength(HOME)
    for n_rows in (1, 2, 3, 4):
        drafting.observe_round_trip(n_rows, 0.050, 9.0 * n_rows)
    assert drafting.times.run_s(1) < 0.2


@given(times_of, st.lists(chance_of, max_size=MAX_DRAFTS), st.integers(0, MAX_DRAFTS + 2))
def test_with_rows_that_are_ready_no_other_length_yields_more_either(
    times: RunTimes, chances: list[float], n_ready: int
) -> None:
    rates = [expected_tokens(chances[:n]) / times.run_s(n, n_ready) for n in range(len(chances) + 1)]
    n = 0
    while n < len(chances) and is_worth_drafting(times, chances[:n], chances[n], n_ready):
        n += 1
    assert rates[n] >= max(rates) * (1 - 1e-9)
    assert times.run_s(n, n_ready) <= times.run_s(n)


@given(times_of, st.lists(chance_of, max_size=MAX_DRAFTS), st.integers(0, 3))
def test_fewer_questions_cost_hardly_any_time(times: RunTimes, chances: list[float], n_ready: int) -> None:
    drafting, n = DraftLength(times), 0
    while n < len(chances) and drafting.wants_draft(chances[:n], chances[n], n_ready=n_ready):
        n += 1
    took_s = [times.run_s(m, n_ready) / expected_tokens(chances[:m]) for m in range(len(chances) + 1)]
    best = took_s.index(min(took_s))
    assert n >= best
    assert took_s[n] <= (1 + SLACK) * took_s[best] * (1 + 1e-9)
    if n > best + 1:
        assert math.prod(chances[:n]) >= LEAST_CHANCE


def test_while_a_verdict_is_awaited_is_drafted_what_may_be_of_use_and_is_done_in_time() -> None:
    drafting = DraftLength(HOME)
    assert drafting.wants_ahead([0.9, 0.8], 2, 0.0)
    assert not drafting.wants_ahead([0.5, 0.5], 2, 0.0)
    assert not drafting.wants_ahead([0.9, 0.8], 2, 0.0, ends_text=True)
    left_s = HOME.round_trip_s + 2 * HOME.partner_s - HOME.edge_s
    assert drafting.wants_ahead([0.9, 0.8], 2, left_s - 0.001)
    assert not drafting.wants_ahead([0.9, 0.8], 2, left_s + 0.001)


def test_while_many_drafts_are_wasted_only_those_are_made_that_save_time() -> None:
    drafting = DraftLength(HOME)
    stretched = next(c / 100 for c in range(100) if drafting.wants_draft([0.8], c / 100))
    assert not is_worth_drafting(HOME, [0.8], stretched)
    for _ in range(10):
        drafting.observe_waste(2, 2)
    assert not drafting.wants_draft([0.8], stretched)
    assert not drafting.wants_ahead([0.9, 0.8], 2, 0.0)
    assert drafting.wants_draft([0.8], 0.8)
    for _ in range(30):
        drafting.observe_waste(2, 0)
    assert drafting.wants_draft([0.8], stretched)
    assert drafting.wants_ahead([0.9, 0.8], 2, 0.0)
