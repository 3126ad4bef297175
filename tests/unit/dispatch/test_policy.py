from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.baselines import Stochastic
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.policies import FIXED, LEARNING, POLICIES
from disco_daemon.dispatch.policy import PolicyInput
from disco_daemon.dispatch.table import RequestContext, Table, edges_of
from disco_daemon.estimation.ttft_context import Contexts
from disco_daemon.types import BOTH, Plan, Side
from tests.fixtures.scheduling import estimated, policy_input, spend

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PROMPTS = [5, 8, 12, 12, 20, 40, 150]
delays = st.floats(0, allow_nan=False)
lengths = st.integers(0, 10**6)
shares = st.floats(0, 1)
draws = st.floats(0, 1, exclude_max=True)
requests = st.builds(RequestContext, budget=shares, score=st.floats(-3, 3), draw=draws)
names, sides = st.sampled_from(POLICIES), st.sampled_from(Side)


@cache
def expected(constrained: Side, budget: float = 0.3) -> PolicyInput:
    quick, slow = estimated(1, 0.4), estimated(2, 0.9)
    contexts = Contexts(np.array([0.0]), np.array([0.5, 0.5]), (quick, slow))
    return policy_input(estimated(3), PROMPTS, budget, constrained, contexts=contexts)


@cache
def fitted(name: str, constrained: Side) -> Table:
    return make_policy(name).fit(expected(constrained))


# --- the policies by name -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("race", Plan(0.0, 0.0)),
        ("all-device", Plan(0.0, math.inf)),
        ("all-server", Plan(math.inf, 0.0)),
        ("delay", Plan(0.3, 0.0)),
    ],
)
def test_every_fixed_policy_starts_whom_its_name_says(name: str, plan: Plan) -> None:
    table = make_policy(name, delay_s=0.3).fit(expected(DEVICE))
    assert table.plan(100, RequestContext(0.5)) == plan


def test_every_policy_on_offer_can_be_made_and_knows_its_name() -> None:
    assert make_policy("paper").name == "paper-paced", "the daemon's has feedback"
    assert [make_policy(name).name.removesuffix("-paced") for name in POLICIES] == list(POLICIES)
    assert [make_policy(name).learns for name in POLICIES] == [name in LEARNING for name in POLICIES]
    assert {*LEARNING, *FIXED} == set(POLICIES)


@given(names, sides, lengths, requests, lengths, requests)
def test_a_policy_is_silent_and_forgets(
    name: str, constrained: Side, one: int, now: RequestContext, two: int, then: RequestContext
) -> None:
    table = fitted(name, constrained)
    first = table.plan(one, now)
    table.plan(two, then)
    assert table.plan(one, now) == first


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", POLICIES)
def test_fitting_changes_nothing_and_gives_the_same_again(name: str, constrained: Side) -> None:
    policy = make_policy(name)
    one, two = policy.fit(expected(constrained)), policy.fit(expected(constrained))
    np.testing.assert_array_equal(one.device_s, two.device_s)
    np.testing.assert_array_equal(one.server_s, two.server_s)
    np.testing.assert_array_equal(one.budgets, two.budgets)
    assert policy == make_policy(name)


@given(names, sides, lengths, requests)
def test_every_policy_starts_somebody_at_once(
    name: str, constrained: Side, length: int, context: RequestContext
) -> None:
    plan = fitted(name, constrained).plan(length, context)
    assert min(plan.device_s, plan.server_s) == 0


@given(st.sampled_from(FIXED), delays, lengths, requests)
def test_a_fixed_policy_heeds_nothing(name: str, delay_s: float, length: int, context: RequestContext) -> None:
    table = make_policy(name, delay_s=delay_s).fit(expected(SERVER))
    assert table.plan(length, context) == table.plan(1, RequestContext(0.0))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fast'; choose one of optimal, paper, stochastic, "):
        make_policy("fast")


@pytest.mark.parametrize("delay_s", [-0.1, math.nan, -math.inf])
def test_time_does_not_run_backwards(delay_s: float) -> None:
    with pytest.raises(ValueError, match="start delays must be >= 0"):
        make_policy("delay", delay_s=delay_s)


# --- the paper's baselines ------------------------------------------------------------------------------------------


@given(sides, shares, draws, lengths, st.booleans())
def test_stochastic_uses_the_constrained_side_when_the_draw_is_below_the_budget(
    constrained: Side, budget: float, draw: float, length: int, concurrent: bool
) -> None:
    table = Stochastic(concurrent=concurrent).fit(expected(constrained))
    plan = table.plan(length, RequestContext(budget, draw=draw))
    used = draw < budget
    assert plan.delay(constrained) == (0 if used else math.inf)
    assert plan.delay(constrained.other) == (math.inf if used and not concurrent else 0)


@given(sides, shares)
def test_stochastic_spends_its_budget(constrained: Side, budget: float) -> None:
    for concurrent in (False, True):
        table = Stochastic(concurrent=concurrent).fit(expected(constrained))
        assert spend(table, expected(constrained), budget) == pytest.approx(budget, abs=1e-9)


# --- the table ------------------------------------------------------------------------------------------------------


@given(
    names, sides, st.lists(st.tuples(st.integers(1, 200) | st.integers(1, 10**6), requests), min_size=1, max_size=20)
)
def test_looking_up_many_is_looking_up_each(
    name: str, constrained: Side, asked: list[tuple[int, RequestContext]]
) -> None:
    table = fitted(name, constrained)
    rows = np.array([(length, m.budget, m.score, m.draw) for length, m in asked])
    device, server = table.delays(*rows.T)
    plans = [table.plan(length, context) for length, context in asked]
    assert [Plan(d, s) for d, s in zip(device.tolist(), server.tolist(), strict=True)] == plans


@given(st.lists(shares, min_size=2, max_size=8).map(sorted), shares)
def test_between_two_rungs_the_mean_of_what_they_spend_is_the_budget(budgets: list[float], budget: float) -> None:
    zeros = np.zeros((len(budgets), 1, 1))
    table = Table(np.empty(0), np.array(budgets), zeros, zeros)
    drawn = [budgets[table.rung(budget, (i + 0.5) / 1000)] for i in range(1000)]
    assert np.mean(drawn) == pytest.approx(min(max(budget, budgets[0]), budgets[-1]), abs=1e-3)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9, unique=True).map(sorted), lengths, st.integers(0, 600))
def test_a_length_is_looked_up_at_the_nearest_one_and_what_is_cached_does_not_count(
    known: list[int], length: int, cached: int
) -> None:
    values = np.array(known, dtype=np.float64)
    table = Table(edges_of(values), np.zeros(1), values.reshape(1, 1, -1), np.zeros((1, 1, len(known))))
    found = table.plan(length, RequestContext(0.5, cached=cached)).device_s
    to_prefill = max(1, length - cached)
    assert abs(found - to_prefill) == min(abs(value - to_prefill) for value in known)


@pytest.mark.parametrize(
    ("context", "unusual"),
    [
        (RequestContext(0.3, score=2.0, draw=0.9, cached=7), False),
        (RequestContext(0.3, load_s=0.1), True),
        (RequestContext(0.3, slowdown=2.0), True),
        (RequestContext(0.3, waited_s=0.1), True),
    ],
)
def test_only_a_busy_or_loading_device_and_a_silent_server_are_unusual(context: RequestContext, unusual: bool) -> None:
    assert context.unusual is unusual


@pytest.mark.parametrize("budget", [-0.1, 1.1, math.nan])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(ValueError, match="the budget is a share"):
        expected(DEVICE, budget)


def test_a_policy_input_has_one_device_time_for_each_length() -> None:
    good = expected(DEVICE)
    with pytest.raises(ValueError, match="one device TTFT per length"):
        PolicyInput(good.server, good.lengths, good.device_s[1:], DEVICE, 0.3)


# --- plans ----------------------------------------------------------------------------------------------------------


@given(delays, delays, st.frozensets(sides))
def test_a_restricted_plan_uses_only_who_is_there_and_somebody_if_there_is_one(
    device_s: float, server_s: float, available: frozenset[Side]
) -> None:
    plan = Plan(device_s, server_s)
    restricted = plan.restricted(available)
    assert all(math.isinf(restricted.delay(side)) for side in BOTH - available)
    started = [side for side in available if math.isfinite(restricted.delay(side))]
    assert bool(started) == bool(available)
    if len(available) == 1:
        assert all(restricted.delay(side) == 0 for side in available), "it has nobody to wait for"
    assert restricted.restricted(available) == restricted


@given(delays, delays)
def test_with_both_sides_there_a_plan_that_starts_somebody_stands(device_s: float, server_s: float) -> None:
    plan = Plan(device_s, server_s)
    assert plan.restricted(BOTH) == plan or math.isinf(min(device_s, server_s))


def test_each_side_has_its_own_delay() -> None:
    assert (Plan(1, 2).delay(DEVICE), Plan(1, 2).delay(SERVER)) == (1, 2)
    assert (DEVICE.other, SERVER.other) == (SERVER, DEVICE)
