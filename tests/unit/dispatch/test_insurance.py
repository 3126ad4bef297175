"""A server that turns slow or silent after an hour of quick answers, in the simulator: nobody waits for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.eval.online import Seen, planner, play_online
from benchmarks.eval.player import Stream
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.planner import DEVICE_BEYOND, DEVICE_ENOUGH, DEVICE_LEAST_S, Planner
from disco_daemon.dispatch.policies import FIXED, LEARNING
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Attempt, Outcome, Plan, Readiness, Side, Usage

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PHONE = Phone("phone", prefill_tps=400.0, decode_tps=20.0)
PROMPT = 120  # tokens: 0.3 s of the device's
BEFORE, SHIFT, AFTER = 600, 20, 600
SILENT = 1e6  # s


def played(budget: float, slow_s: float, seed: int, *, shadow: bool = True) -> tuple[list[Seen], NDArray[np.float64]]:
    """All requests, and which of them the device ran for; the server is slow for SHIFT of them."""
    random = np.random.default_rng(seed)
    server_s = 0.05 * random.lognormal(0.0, 0.2, BEFORE + SHIFT + AFTER)
    server_s[BEFORE : BEFORE + SHIFT] = slow_s
    n = len(server_s)
    lane = [np.full(n, float(PROMPT)), np.full(n, 50.0), server_s, random.random(n)]
    stream = Stream(*(column[:, None] for column in lane))
    one = planner(make_policy("optimal"), DEVICE, budget, seed)
    seen = list(play_online(stream, 0, PHONE, one, shadow=shadow))
    return seen, np.array([s.device_ran for s in seen], np.float64)


def over_any_500(ran: NDArray[np.float64]) -> float:
    sums = np.concatenate([[0.0], ran.cumsum()])
    return float((sums[500:] - sums[:-500]).max()) / 500


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [0.0, 0.05, 0.1, 0.3])
def test_a_server_that_turns_from_50_ms_to_6_s_is_not_waited_for_until_ten_of_these_were_seen(
    budget: float, seed: int
) -> None:
    seen, ran = played(budget, 6.0, seed)
    assert [s.ttft_s for s in seen[BEFORE : BEFORE + 10] if s.ttft_s > 1.0 + PROMPT / PHONE.prefill_tps] == []
    assert over_any_500(ran) <= budget + 0.03
    assert ran[BEFORE + SHIFT :].mean() <= budget + 0.005, "what it cost is saved again"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3])
def test_a_server_that_turns_silent_is_a_failure_and_the_device_serves_all_it_leaves(budget: float, seed: int) -> None:
    seen, ran = played(budget, SILENT, seed)
    within_s = 1.0 + PROMPT / PHONE.prefill_tps
    assert max(s.ttft_s for s in seen[BEFORE : BEFORE + SHIFT]) <= within_s
    assert over_any_500(ran) <= budget + SHIFT / 500, "these 20 have nobody else, and are 4 points of 500 by themselves"
    assert ran[BEFORE + SHIFT :].mean() <= budget + 0.005


def test_a_loser_that_nobody_hears_to_the_end_is_silent_for_all_that_is_known() -> None:
    seen, _ = played(0.0, 6.0, 0, shadow=False)
    assert max(s.ttft_s for s in seen[BEFORE : BEFORE + SHIFT]) <= 1.0 + PROMPT / PHONE.prefill_tps


# --- the plan -------------------------------------------------------------------------------------------------------


def outcome(*attempts: Attempt, length: int = PROMPT) -> Outcome:
    return Outcome(
        request_id="r", created=0.0, model="disco", policy="optimal", plan=Plan(0.0, 0.0), prompt_tokens=length,
        winner=SERVER, finish_reason="stop", error=None, ttft_s=0.05, duration_s=1.0, handoffs=0, tokens={SERVER: 50},
        attempts=attempts, cost_usd=0.0, energy_j=0.0,
    )  # fmt: skip


def used_up(constrained: Side, name: str = "optimal", n: int = 40) -> Planner:
    """Both sides known to be quick, and the window of the scarce one full."""
    one = Planner(make_policy(name), constrained, 0.1, draw=lambda: 0.5)
    server = Attempt(SERVER, "m", 0.0, 0.05, censored=False, usage=Usage())
    device = replace(server, side=DEVICE, ttft_s=0.3)
    for i in range(n):
        one.knowledge.learn(outcome(server, replace(device, ttft_s=0.3 + 0.0001 * (i % 7))))
    one.refit()
    while one.pacer.allows(PROMPT):
        one.pacer.settle(PROMPT, PROMPT)
    return one


@pytest.mark.parametrize("name", LEARNING)
def test_the_device_starts_at_the_end_of_patience_though_its_budget_is_used_up(name: str) -> None:
    one = used_up(DEVICE, name)
    planned = one.plan(PROMPT, {})
    assert planned.plan == Plan(0.5, 0.0)
    assert planned.reserved == 0, "hardly ever needed"
    assert one.preview(PROMPT, {}, 0.5, waited_s=0.4).device_s == pytest.approx(0.1)
    assert one.preview(PROMPT, {}, 0.5, waited_s=3.0).device_s == 0


def test_what_the_rescue_computed_is_booked() -> None:
    one = used_up(DEVICE)
    one.pacer.settle(PROMPT, 0)
    before = one.pacer.realised()["ratio"]
    late = Attempt(SERVER, "m", 0.0, 0.8, censored=True, usage=Usage())
    device = Attempt(DEVICE, "m", 0.5, 0.3, censored=False, usage=Usage(PROMPT))
    one.settle(one.plan(PROMPT, {}), outcome(late, device))
    assert one.pacer.realised()["ratio"] > before


def test_such_a_silence_counts_as_a_failure_of_the_server() -> None:
    one = used_up(DEVICE)
    usual = one.knowledge.server.availability()
    one.knowledge.learn(outcome(Attempt(SERVER, "m", 0.0, 0.4, censored=True, usage=Usage())))
    assert one.knowledge.server.availability() >= usual
    one.knowledge.learn(outcome(Attempt(SERVER, "m", 0.0, 0.8, censored=True, usage=Usage())))
    assert one.knowledge.server.availability() < usual


def test_of_a_server_that_mostly_fails_nobody_expects_more_than_half_a_second() -> None:
    one = used_up(DEVICE, n=0)
    assert math.isinf(one.preview(PROMPT, {}, 0.5).device_s), "of a server that nobody knows"
    for _ in range(20):
        one.knowledge.learn(outcome(Attempt(SERVER, "m", 0.0, 20.0, censored=True, usage=Usage(), error="timeout")))
    assert one.preview(PROMPT, {}, 0.5) == Plan(0.5, 0.0)


def test_a_scarce_server_is_asked_when_the_device_is_silent_beyond_anything_seen() -> None:
    one = used_up(SERVER)
    for length in (1, PROMPT, 10 * PROMPT):
        patience_s = max(DEVICE_LEAST_S, DEVICE_BEYOND * one.device_s(length, Readiness()))
        plan = one.plan(length, {}).plan
        assert plan.device_s == 0
        assert plan.server_s == pytest.approx(patience_s)
    loading = {DEVICE: Readiness(load_s=5.0)}
    assert one.plan(PROMPT, loading).plan.server_s > 15
    down = {SERVER: Readiness(down_s=9.0)}
    assert one.plan(PROMPT, down).plan == Plan(0.0, math.inf), "not a server that asks to be left alone"
    assert math.isinf(used_up(SERVER, n=DEVICE_ENOUGH - 1).plan(PROMPT, {}).plan.server_s)


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_policy_is_what_it_says(name: str) -> None:
    one = Planner(make_policy(name), DEVICE, 0.1)
    for _ in range(40):
        one.knowledge.learn(outcome(Attempt(SERVER, "m", 0.0, 0.05, censored=False, usage=Usage())))
    before = Planner(make_policy(name), DEVICE, 0.1).plan(PROMPT, {}).plan
    assert one.plan(PROMPT, {}).plan == before
