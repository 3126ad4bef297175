from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.scheduling.policy import POLICIES, make_policy
from disco_daemon.types import BOTH, Plan, Side

DEVICE, SERVER = Side.DEVICE, Side.SERVER
delays = st.floats(0, allow_nan=False)
lengths = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("race", Plan(0.0, 0.0)),
        ("all-device", Plan(0.0, math.inf)),
        ("all-server", Plan(math.inf, 0.0)),
        ("delay", Plan(0.3, 0.0)),
    ],
)
def test_every_policy_starts_whom_its_name_says(name: str, plan: Plan) -> None:
    assert make_policy(name, 0.3).plan(100) == plan


def test_every_policy_on_offer_can_be_made_and_knows_its_name() -> None:
    assert [make_policy(name, 1.0).name for name in POLICIES] == list(POLICIES)


@given(st.sampled_from(POLICIES), delays, lengths, lengths)
def test_a_policy_is_silent_and_forgets(name: str, delay_s: float, one: int, two: int) -> None:
    policy = make_policy(name, delay_s)
    first = policy.plan(one)
    policy.plan(two)
    assert policy.plan(one) == first
    assert policy == make_policy(name, delay_s)


@given(st.sampled_from(POLICIES), delays, lengths)
def test_every_policy_starts_somebody_at_once(name: str, delay_s: float, length: int) -> None:
    plan = make_policy(name, delay_s).plan(length)
    assert min(plan.device_s, plan.server_s) == 0


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fast'; choose one of race, all-device, all-server, delay"):
        make_policy("fast", 0)


@pytest.mark.parametrize("delay_s", [-0.1, math.nan, -math.inf])
def test_time_does_not_run_backwards(delay_s: float) -> None:
    with pytest.raises(ValueError, match="start delays must be >= 0"):
        make_policy("delay", delay_s)


@given(delays, delays, st.frozensets(st.sampled_from(Side)))
def test_a_restricted_plan_uses_only_who_is_there_and_somebody_if_there_is_one(
    device_s: float, server_s: float, available: frozenset[Side]
) -> None:
    plan = Plan(device_s, server_s)
    restricted = plan.restricted(available)
    assert all(math.isinf(restricted.delay(side)) for side in BOTH - available)
    started = [side for side in available if math.isfinite(restricted.delay(side))]
    assert bool(started) == bool(available)
    planned = [side for side in available if math.isfinite(plan.delay(side))]
    assert all(restricted.delay(side) == plan.delay(side) for side in planned)
    assert restricted.restricted(available) == restricted


@given(delays, delays)
def test_with_both_sides_there_a_plan_that_starts_somebody_stands(device_s: float, server_s: float) -> None:
    plan = Plan(device_s, server_s)
    assert plan.restricted(BOTH) == plan or math.isinf(min(device_s, server_s))


def test_each_side_has_its_own_delay() -> None:
    assert (Plan(1, 2).delay(DEVICE), Plan(1, 2).delay(SERVER)) == (1, 2)
    assert (DEVICE.other, SERVER.other) == (SERVER, DEVICE)
