"""A second request to a silent server: when it is worth one, and the share of the prompt tokens that it keeps to."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.hedge import LEAST_SAMPLES, SHARE, HedgeAllowance, expected_gain, fit, hedged, silence_s
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.planner import Planner
from disco_daemon.dispatch.policy import PolicyInput
from disco_daemon.estimation.lengths import LengthDistribution
from disco_daemon.estimation.survival import kaplan_meier
from disco_daemon.types import Attempt, Outcome, Plan, Readiness, Side, Usage

DEVICE, SERVER = Side.DEVICE, Side.SERVER
OPTIMAL = make_policy("optimal")
STALLS = [*np.linspace(0.2, 0.4, 190).tolist(), *([6.0] * 10)]  # one answer in twenty takes ages
STEADY = np.linspace(0.30, 0.32, 200).tolist()
READY = {SERVER: Readiness(hedgeable=True)}

prompts = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=400)


def inputs(ttft_s: list[float], constrained: Side = DEVICE, budget: float = 0.1) -> PolicyInput:
    lengths = LengthDistribution.of(np.array([20, 40, 80, 160]))
    server = kaplan_meier(ttft_s, np.ones(len(ttft_s), dtype=np.bool_))
    return PolicyInput(server, lengths, lengths.values / 30.0, constrained, budget)


# --- how much --------------------------------------------------------------------------------------------------------


@given(prompts, st.floats(0.0, 1.0))
def test_never_more_than_the_share_of_the_prompt_tokens_is_sent_twice(
    requests: list[tuple[int, bool]], share: float
) -> None:
    allowance = HedgeAllowance(share)
    for length, is_slow in requests:
        allowance.offer(length)
        if is_slow and allowance.allows(length):
            allowance.take(length)
        assert allowance.n_sent <= share * allowance.n_offered * (1 + 1e-9)
    assert allowance.n_offered == sum(length for length, _ in requests)


@given(prompts, prompts)
def test_a_quiet_time_saves_up_no_more_than_a_window_of_it(
    quiet: list[tuple[int, bool]], stalled: list[tuple[int, bool]]
) -> None:
    allowance = HedgeAllowance(SHARE)
    for length, _ in quiet * 5:
        allowance.offer(length)
    saved = SHARE * 200 * max((length for length, _ in quiet), default=0)
    before, offered = allowance.n_sent, 0
    for length, _ in stalled:
        allowance.offer(length)
        offered += length
        if allowance.allows(length):
            allowance.take(length)
    assert allowance.n_sent - before <= saved + SHARE * offered + 1e-6


@given(prompts)
def test_a_share_of_nothing_is_never(requests: list[tuple[int, bool]]) -> None:
    allowance = HedgeAllowance(0.0)
    for length, _ in requests:
        allowance.offer(length)
        assert not allowance.allows(length)
    assert allowance.used == 0.0
    with pytest.raises(ValueError, match="second time"):
        allowance.take(1)


def test_all_of_the_share_is_used_where_every_request_is_slow() -> None:
    allowance = HedgeAllowance(SHARE)
    for _ in range(2000):
        allowance.offer(50)
        if allowance.allows(50):
            allowance.take(50)
    assert allowance.used == pytest.approx(SHARE, abs=0.004)


# --- whether, and after how long --------------------------------------------------------------------------------------


def test_the_silence_is_the_quantile_that_the_share_leaves() -> None:
    server = inputs(STALLS).server
    assert silence_s(server, SHARE) == server.quantile(0.92)
    assert silence_s(server, 0.0) == math.inf


def test_a_server_that_stalls_is_asked_again_and_the_waits_are_fitted_to_that() -> None:
    once = inputs(STALLS)
    table = fit(OPTIMAL, once, SHARE)
    assert table.hedge_s == silence_s(once.server, SHARE)
    twice = hedged(once, table.hedge_s)
    assert expected_gain(once, twice, table) > 0.01
    np.testing.assert_array_equal(table.device_s, OPTIMAL.fit(twice).device_s)


@pytest.mark.parametrize(
    ("ttft_s", "constrained", "policy", "share"),
    [
        pytest.param(STEADY, DEVICE, "optimal", SHARE, id="a steady server: less than 1 % is gained"),
        pytest.param(STALLS, SERVER, "optimal", SHARE, id="the server's input is the dear part"),
        pytest.param(STALLS, DEVICE, "paper", SHARE, id="not our policy"),
        pytest.param(STALLS, DEVICE, "optimal", 0.0, id="never"),
        pytest.param(STALLS[-int(LEAST_SAMPLES) + 1 :], DEVICE, "optimal", SHARE, id="too few samples"),
    ],
)
def test_a_server_is_asked_once_where_twice_is_not_worth_it(
    ttft_s: list[float], constrained: Side, policy: str, share: float
) -> None:
    once, chosen = inputs(ttft_s, constrained), make_policy(policy)
    table = fit(chosen, once, share)
    assert table.hedge_s == math.inf
    np.testing.assert_array_equal(table.device_s, chosen.fit(once).device_s)


# --- in the plan ------------------------------------------------------------------------------------------------------


def served(planner: Planner, ttft_s: float, *more: Attempt, readiness: dict[Side, Readiness] = READY) -> Plan:
    planned = planner.plan(40, readiness)
    attempts = (Attempt(SERVER, "m", 0.0, ttft_s, False, Usage()), *more)
    planner.settle(
        planned,
        Outcome(
            request_id="r", created=0.0, model="disco", policy="p", plan=planned.plan, prompt_tokens=40, winner=SERVER,
            finish_reason="stop", error=None, ttft_s=ttft_s, duration_s=1.0, handoffs=0, tokens={SERVER: 100},
            attempts=attempts, cost_usd=0.0, energy_j=0.0,
        ),
    )  # fmt: skip
    if planner.due:
        planner.refit()
    return planned.plan


def stalling(share: float = SHARE) -> Planner:
    planner = Planner(OPTIMAL, DEVICE, 0.01, hedge_share=share)
    for i in range(100):
        served(planner, 6.0 if i % 25 == 0 else 0.2 + 37 * i % 100 / 1000)
    return planner


def test_the_plan_says_after_how_long_the_server_is_asked_again() -> None:
    planner = stalling()
    plan = planner.plan(40, READY).plan
    assert 0.2 < plan.hedge_s < 6.0
    assert planner.explain(40, READY)["plan"]["hedge_s"] == plan.hedge_s
    assert planner.state()["hedge"] == {"share": SHARE, "after_s": plan.hedge_s, "used": 0.0}
    assert planner.explain(40, READY, waited_s=plan.hedge_s / 2)["plan"]["hedge_s"] == plan.hedge_s / 2
    assert plan.restricted(frozenset({SERVER})).hedge_s == plan.hedge_s


def test_a_share_of_nothing_holds_at_once_and_the_next_fit_is_for_one_request() -> None:
    assert stalling(0.0).plan(40, READY).plan.hedge_s == math.inf
    planner = stalling()
    planner.allow_hedges(0.0)
    assert planner.plan(40, READY).plan.hedge_s == math.inf
    assert planner.due
    planner.refit()
    assert planner.table.hedge_s == math.inf
    assert not planner.due


def test_a_server_that_has_no_room_is_asked_once_and_the_waits_are_fitted_to_that() -> None:
    planner, full = stalling(), {SERVER: Readiness(hedgeable=False)}
    assert planner.plan(40, full).plan.hedge_s == math.inf
    assert planner.due
    planner.refit()
    assert planner.table.hedge_s == math.inf
    served(planner, 0.2)
    assert planner.plan(40, READY).plan.hedge_s < math.inf, "it has room again, and a fit followed at once"


def test_where_the_budget_of_the_device_is_used_up_the_server_may_still_be_asked_again() -> None:
    planner = stalling()
    while planner.pacer.allows(40, 40):
        planner.pacer.reserve(0, 40)
    assert planner.plan(40, READY).plan.hedge_s < math.inf


def test_nothing_is_learned_from_second_requests() -> None:
    one, two = stalling(), stalling()
    served(one, 0.3)
    served(two, 0.3, replace(Attempt(SERVER, "m", 0.0, 9.0, False, Usage()), hedge="lost"))
    assert one.knowledge.to_json() == two.knowledge.to_json()


def test_another_planner_in_the_same_place_goes_on_with_the_account() -> None:
    before = stalling()
    before.hedges.take(40)
    after = Planner(OPTIMAL, DEVICE, 0.01, hedge_share=0.02)
    after.succeed(before)
    assert (after.hedges.n_sent, after.hedges.share) == (40, 0.02)
