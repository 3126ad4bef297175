from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.paper import PACED_RUNGS, Paper, device_waits
from disco_daemon.dispatch.table import RequestContext
from disco_daemon.estimation.survival import Survival
from disco_daemon.types import Side
from tests.fixtures.scheduling import lognormal, observed, policy_input, spend

N = 500  # samples of F; a quantile of it is off by 1 / N at most
FINE = np.linspace(0, 1, 2001)[:-1] + 0.5 / 2000  # draws
prompts = st.lists(st.integers(1, 400), min_size=1, max_size=60)
shares = st.floats(0, 1)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def servers(draw: st.DrawFn) -> Survival:
    """Lognormal, exponential or stalling TTFTs, all distinct."""
    random = np.random.default_rng(draw(seeds))
    kind = draw(st.sampled_from(["lognormal", "exponential", "stalling"]))
    if kind == "lognormal":
        return observed(random.lognormal(-0.5, draw(st.floats(0.05, 1.5)), N))
    if kind == "exponential":
        return observed(0.01 + random.exponential(1.0, N))
    stalled = random.random(N) < draw(st.floats(0, 0.5))
    return observed(np.where(stalled, random.normal(4.5, 0.1, N), random.normal(0.35, 0.02, N)))


# --- Algorithm 2: device-constrained --------------------------------------------------------------------------------


def waits_as_printed(server: Survival, budget: float, alpha: float) -> float:
    """The published search for one single length: the least w with F(w) >= what is left, of what it needs."""
    return float(server.quantile(budget - alpha))


def test_one_length_spends_its_budget_and_not_95_percent_as_printed() -> None:
    ahead = policy_input(lognormal(1, 1000), [25], 0.1)
    (wait,) = device_waits(ahead, 0.1, 0.05)
    assert ahead.server.at(wait) == pytest.approx(0.1, abs=1e-9)
    printed = waits_as_printed(ahead.server, 0.1, 0.05)
    assert ahead.server.at(printed) == pytest.approx(0.95, abs=1e-9)


def test_with_nothing_left_the_device_waits_for_the_tail_where_the_printed_search_starts_it_at_once() -> None:
    ahead = policy_input(lognormal(1, 1000), [25], 0.05)
    (wait,) = device_waits(ahead, 0.05, 0.05)
    assert ahead.server.at(wait) == pytest.approx(0.05, abs=1e-9)
    assert ahead.server.at(waits_as_printed(ahead.server, 0.05, 0.05)) >= 0.999


def test_of_three_lengths_the_shortest_start_at_once_and_one_is_in_between() -> None:
    ahead = policy_input(lognormal(2, 2000), [10, 20, 30], 0.3)
    waits = device_waits(ahead, 0.3, 0.05)
    assert spend(Paper().fit(ahead), ahead) == pytest.approx(0.3, abs=1 / 2000)
    assert waits[0] == 0 < waits[1] < waits[2] == ahead.server.quantile(0.95)


@given(servers(), prompts, shares, shares)
def test_it_spends_the_budget(server: Survival, lengths: list[int], budget: float, alpha: float) -> None:
    ahead = policy_input(server, lengths, budget)
    assert spend(Paper(alpha).fit(ahead), ahead) == pytest.approx(budget, abs=1 / N + 1e-9)


@given(servers(), prompts, shares, shares)
def test_no_wait_is_longer_than_that_for_the_tail_and_longer_prompts_wait_no_less(
    server: Survival, lengths: list[int], budget: float, alpha: float
) -> None:
    waits = device_waits(policy_input(server, lengths, budget), budget, alpha)
    assert waits.min() >= 0
    assert waits.max() <= server.quantile(1 - min(alpha, budget))
    assert np.all(np.diff(waits) >= 0)


@given(servers(), prompts, shares, shares)
def test_a_budget_that_the_tail_uses_up_gives_every_length_the_same_wait(
    server: Survival, lengths: list[int], one: float, two: float
) -> None:
    budget, alpha = sorted((one, two))
    waits = device_waits(policy_input(server, lengths, budget), budget, alpha)
    assert set(waits.tolist()) == {server.quantile(1 - budget)}


@given(servers(), prompts, st.integers(0, PACED_RUNGS - 1), shares)
def test_at_its_rungs_the_paced_table_is_the_published_one(
    server: Survival, lengths: list[int], rung: int, alpha: float
) -> None:
    budget = float(np.linspace(0, 1, PACED_RUNGS)[rung])
    ahead = policy_input(server, lengths, budget)
    published, paced = Paper(alpha).fit(ahead), Paper(alpha, paced=True).fit(ahead)
    np.testing.assert_array_equal(paced.device_s[paced.rung(budget, 0.0)], published.device_s[0])


@given(servers(), prompts, shares, shares)
def test_between_its_rungs_the_paced_table_spends_the_budget_too(
    server: Survival, lengths: list[int], budget: float, alpha: float
) -> None:
    ahead = policy_input(server, lengths, 0.5)
    assert spend(Paper(alpha, paced=True).fit(ahead), ahead, budget) == pytest.approx(budget, abs=1 / N + 1e-9)


@given(servers(), prompts, shares, shares)
def test_the_server_is_asked_at_once_when_the_device_is_scarce(
    server: Survival, lengths: list[int], budget: float, draw: float
) -> None:
    table = Paper().fit(policy_input(server, lengths, budget))
    assert all(table.plan(length, RequestContext(budget, draw=draw)).server_s == 0 for length in lengths)


# --- Algorithm 3: server-constrained --------------------------------------------------------------------------------


@given(prompts, shares, st.booleans())
def test_the_server_gets_exactly_its_share_of_the_tokens(lengths: list[int], budget: float, paced: bool) -> None:
    ahead = policy_input(observed([1.0]), lengths, budget, Side.SERVER)
    table = Paper(paced=paced).fit(ahead)
    assert spend(table, ahead) == pytest.approx(budget, abs=1e-9)
    _, server = table.delays(ahead.lengths.values[:, None], np.full(1, budget), np.zeros(1), FINE)
    drawn = float(ahead.lengths.token_shares @ np.isfinite(server).mean(axis=1))
    assert drawn == pytest.approx(budget, abs=1 / len(FINE))


@given(prompts, shares, shares, st.booleans())
def test_a_longer_prompt_is_never_served_less(lengths: list[int], budget: float, draw: float, paced: bool) -> None:
    table = Paper(paced=paced).fit(policy_input(observed([1.0]), lengths, budget, Side.SERVER))
    plans = [table.plan(length, RequestContext(budget, draw=draw)) for length in sorted(lengths)]
    assert np.all(table.server_s[:, :, 1:] <= table.server_s[:, :, :-1])
    assert sorted((plan.server_s for plan in plans), reverse=True) == [plan.server_s for plan in plans]
    assert {plan.device_s for plan in plans} == {0.0}


@given(prompts, shares, shares)
def test_at_its_budget_the_paced_threshold_is_the_published_one(lengths: list[int], budget: float, draw: float) -> None:
    ahead = policy_input(observed([1.0]), lengths, budget, Side.SERVER)
    published, paced = Paper().fit(ahead), Paper(paced=True).fit(ahead)
    request = RequestContext(budget, draw=draw)
    assert [paced.plan(n, request) for n in lengths] == [published.plan(n, request) for n in lengths]


@pytest.mark.parametrize("paced", [False, True])
def test_the_boundary_length_is_split_at_random(paced: bool) -> None:
    # Of 60 tokens the longest prompt has 30, the next 20: half the budget of 40 is left for it.
    table = Paper(paced=paced).fit(policy_input(observed([1.0]), [10, 20, 30], 40 / 60, Side.SERVER))

    def served(length: int) -> float:
        plans = [table.plan(length, RequestContext(40 / 60, draw=draw)) for draw in FINE.tolist()]
        return float(np.mean([math.isfinite(plan.server_s) for plan in plans]))

    assert [served(length) for length in (10, 20, 30)] == [0, pytest.approx(0.5, abs=1e-3), 1]


def test_its_name_says_whether_it_is_paced() -> None:
    assert (Paper().name, Paper(paced=True).name) == ("paper", "paper-paced")
