from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.eval.online import play_online
from benchmarks.eval.player import Stream
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.pacer import SLACK, WINDOW, Amount, Pacer
from disco_daemon.dispatch.planner import REFIT_EVERY, Planned, Planner
from disco_daemon.dispatch.policies import FIXED, LEARNING, POLICIES
from disco_daemon.estimation.knowledge import FEW, Knowledge
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Attempt, Outcome, Plan, Readiness, Side, Usage

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PHONE = Phone("phone", prefill_tps=80.0, decode_tps=20.0)
LENGTHS = (3, 10, 20, 50, 150)
DOWN = {SERVER: Readiness(down_s=5.0)}


@dataclass
class Draws:
    """Uniform numbers that are the same each time."""

    seed: int = 0
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def __call__(self) -> float:
        return float(self.random.random())


class Recording(Pacer):
    """A pacer that keeps its books open."""

    def __init__(self, budget: float) -> None:
        super().__init__(budget, 20.0)
        self.reserved: list[tuple[Amount, Amount]] = []
        self.released: list[tuple[Amount, Amount]] = []
        self.settled: list[tuple[Amount, Amount]] = []

    def reserve(self, length: Amount, tokens: Amount) -> None:
        self.reserved.append((length, tokens))
        super().reserve(length, tokens)

    def release(self, length: Amount, tokens: Amount) -> None:
        self.released.append((length, tokens))
        super().reserve(-length, -tokens)

    def settle(self, length: Amount, spent: Amount) -> None:
        self.settled.append((length, spent))
        super().settle(length, spent)


def attempt(
    side: Side, ttft_s: float = 0.5, *, censored: bool = False, error: str | None = None, usage: Usage | None = None
) -> Attempt:
    return Attempt(side, "m", 0.0, ttft_s, censored, usage or Usage(), error)


RACE = Plan(0.0, 0.0)


def outcome(*attempts: Attempt, plan: Plan = RACE, prompt_tokens: int = 20) -> Outcome:
    return Outcome(
        request_id="r", created=0.0, model="disco", policy="p", plan=plan, prompt_tokens=prompt_tokens, winner=SERVER,
        finish_reason="stop", error=None, ttft_s=0.5, duration_s=1.0, handoffs=0, tokens={SERVER: 100},
        attempts=attempts, cost_usd=0.0, energy_j=0.0,
    )  # fmt: skip


def raced(planned: Planned, server_s: float) -> Outcome:
    """What a server that takes so long, and the phone, make of the plan."""
    plan, length = planned.plan, planned.length
    server_at, device_at = plan.server_s + server_s, plan.device_s + length / PHONE.prefill_tps
    first = min(server_at, device_at)
    attempts = []
    if plan.server_s < device_at:
        attempts.append(attempt(SERVER, first - plan.server_s, censored=device_at < server_at))
    if plan.device_s < server_at:
        attempts.append(attempt(DEVICE, first - plan.device_s, censored=server_at <= device_at))
    return outcome(*attempts, plan=plan, prompt_tokens=length)


def planner(name: str = "optimal", constrained: Side = DEVICE, budget: float = 0.3, **more: Any) -> Planner:
    return Planner(make_policy(name), constrained, budget, **more)


def serve(planner: Planner, n: int, seed: int = 0) -> list[Plan]:
    """Play `n` requests, fitting whenever it is due; the plans made."""
    random, plans = np.random.default_rng(seed), []
    for _ in range(n):
        planned = planner.plan(int(random.choice(LENGTHS)), {})
        plans.append(planned.plan)
        planner.settle(planned, raced(planned, float(0.6 * random.lognormal(0.0, 0.5))))
        if planner.due:
            planner.refit()
    return plans


def previews(planner: Planner) -> list[Plan]:
    return [planner.preview(n, {}, draw) for n in LENGTHS for draw in (0.05, 0.5, 0.95)]


# --- planning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", LEARNING)
def test_plans_are_the_same_for_the_same_draws(name: str, constrained: Side) -> None:
    one, two = (serve(planner(name, constrained, draw=Draws(7)), 60) for _ in range(2))
    assert one == two
    other = planner(name, constrained, draw=Draws(7))
    for _ in range(60):
        other.preview(20, {}, 0.5)
    assert serve(other, 60) == one, "a preview commits to nothing"


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", POLICIES)
def test_somebody_starts_at_once(name: str, constrained: Side) -> None:
    assert all(min(p.device_s, p.server_s) == 0 for p in serve(planner(name, constrained, draw=Draws()), 60))


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", LEARNING)
def test_while_the_server_asks_not_to_be_asked_the_device_starts_at_once(name: str, constrained: Side) -> None:
    asking = planner(name, constrained)
    assert asking.plan(20, DOWN).plan == Plan(0.0, math.inf)
    assert asking.plan(20, DOWN | {DEVICE: Readiness(down_s=1.0)}).plan == asking.plan(20, {}).plan, "both are down"


@pytest.mark.parametrize("name", LEARNING)
def test_a_server_that_mostly_fails_is_asked_but_not_waited_for(name: str) -> None:
    asking = planner(name, budget=0.01)
    for _ in range(20):
        asking.knowledge.learn(outcome(attempt(SERVER, 0.1, censored=True, error="server_error")))
    assert asking.plan(20, {}).plan == Plan(0.0, 0.0)
    for _ in range(100):
        asking.knowledge.learn(outcome(attempt(SERVER)))
    asking.refit()
    assert asking.plan(20, {}).plan != Plan(0.0, 0.0)


def test_a_scarce_server_that_mostly_fails_still_keeps_to_its_budget() -> None:
    asking = planner(constrained=SERVER, budget=0.3, draw=Draws())
    for _ in range(2 * WINDOW):
        planned = asking.plan(20, {})
        failure = [attempt(SERVER, 0.1, censored=True, error="broken")] if planned.plan.server_s == 0 else []
        asking.settle(planned, outcome(attempt(DEVICE), *failure, plan=planned.plan))
        if asking.due:
            asking.refit()
    assert asking.knowledge.server.availability() < 0.5
    assert asking.pacer.realised()["last_200"] <= 0.3 + SLACK


@pytest.mark.parametrize("constrained", Side)
def test_when_the_window_is_full_the_scarce_side_stays_out(constrained: Side) -> None:
    asking = planner(constrained=constrained, budget=0.1)
    for _ in range(WINDOW):
        asking.settle(Planned(Plan(0.0, 0.0), 20, constrained, asking.pacer), outcome(attempt(constrained)))
    plan = asking.plan(20, {}).plan
    assert math.isinf(plan.delay(constrained))
    assert plan.delay(constrained.other) == 0


def test_a_device_that_is_loading_or_busy_is_expected_later_and_not_started_sooner() -> None:
    asking = Planner(make_policy("optimal", kappa=0.0), DEVICE, 0.3, draw=Draws())
    serve(asking, 100)
    for n in LENGTHS:
        idle, loading, busy = Readiness(), Readiness(load_s=2.0), Readiness(n_busy=3)
        assert asking.device_s(n, loading) == pytest.approx(asking.device_s(n, idle) + 2)
        assert asking.device_s(n, busy) > asking.device_s(n, idle)
        waits = [asking.preview(n, {DEVICE: ready}, 0.5).device_s for ready in (idle, loading, busy)]
        assert min(waits[1:]) >= waits[0]
    hopeless = [Readiness(load_s=100.0), Readiness(n_busy=1000)]
    first, *later = (asking.preview(10, {DEVICE: ready}, 0.5).device_s for ready in (Readiness(), *hopeless))
    assert min(later) > first


def test_after_slow_answers_another_context_holds_and_other_plans_are_made() -> None:
    asking, random = planner(draw=Draws()), np.random.default_rng(8)
    slow = np.repeat(np.tile([0.0, 1.0], 10), 10)  # the server's hours: ten answers quick, ten slow
    for log_ttft in slow + random.normal(0.0, 0.1, len(slow)):
        asking.knowledge.server.add(0.4 * math.exp(log_ttft), censored=False)
    asking.refit()
    told = []
    for log_ttft in (0.0, 1.0):
        for _ in range(8):
            asking.knowledge.server.add(0.4 * math.exp(log_ttft), censored=False)
        told.append((asking.explain(10, {})["context"], tuple(previews(asking))))
    (quick, quick_plans), (slower, slower_plans) = told
    assert quick < slower
    assert quick_plans != slower_plans


def test_a_profiled_line_goes_before_the_speed_of_a_start_and_behind_what_was_seen() -> None:
    asking = planner()
    asking.knowledge.use_profile(0.004, 0.3)
    asking.plan(20, {DEVICE: Readiness(prefill_tps=400.0)})
    assert (asking.knowledge.device.k, asking.knowledge.device.c) == pytest.approx((0.004, 0.3))
    for _ in range(40):
        asking.knowledge.device.add(100, 2.0)
    seen = asking.knowledge.device.k
    asking.knowledge.use_profile(0.004, 0.3)
    assert asking.knowledge.device.k == seen


@pytest.mark.parametrize("wanted", [(Side.DEVICE, 0.5), (Side.SERVER, 0.1)])
def test_another_limit_is_in_force_with_the_next_fit_and_old_plans_settle_where_they_were_made(
    wanted: tuple[Side, float],
) -> None:
    asking = planner(constrained=Side.SERVER, budget=0.5)
    planned, pacer = asking.plan(20, {}), asking.pacer
    asking.constrain(*wanted)
    assert asking.due
    assert (asking.constrained, asking.budget, asking.pacer) == (Side.SERVER, 0.5, pacer), "not in the middle of a plan"
    asking.refit()
    assert (asking.constrained, asking.budget) == wanted
    assert asking.pacer is not pacer
    before = asking.pacer.realised()
    asking.settle(planned, outcome(attempt(Side.SERVER)))
    assert asking.pacer.realised() == before, "that request was of the other account"
    assert pacer.realised()["requests"] == 1
    asking.constrain(*wanted)
    assert asking.begin_fit().constrained is wanted[0]


@pytest.mark.parametrize(
    ("name", "knob", "value"), [("paper", "alpha", 0.3), ("optimal", "kappa", 5.0), ("optimal", "kappa", 0.0)]
)
def test_a_knob_of_the_policy_is_in_force_with_the_next_fit_and_the_account_goes_on(
    name: str, knob: str, value: float
) -> None:
    asking = planner(name, draw=Draws())
    serve(asking, 60)
    asking.refit()
    before, pacer, was = previews(asking), asking.pacer, asking.policy
    asking.pursue(make_policy(name))
    due = [asking.due]
    wanted = make_policy(name, **{knob: value})
    asking.pursue(wanted)
    assert [*due, asking.due] == [False, True], "the first was the policy in force"
    assert (asking.policy, previews(asking)) == (was, before), "not before there is a table for it"
    asking.refit()
    assert (asking.policy, asking.pacer, asking.due) == (wanted, pacer, False)
    assert previews(asking) != before
    asking.constrain(Side.SERVER, 0.1)
    asking.refit()
    assert asking.policy == wanted, "another limit leaves the knob alone"


def test_a_knob_that_the_policy_does_not_have_makes_no_fit_due() -> None:
    asking = planner("paper")
    asking.pursue(make_policy("paper", kappa=3.0))
    assert not asking.due


def test_the_speed_that_the_engine_measured_is_news_until_there_are_samples() -> None:
    asking, due = planner(), []
    for _ in range(2):
        asking.plan(20, {DEVICE: Readiness(prefill_tps=400.0)})
        due.append(asking.due)
        asking.refit()
    assert due == [True, False]
    assert asking.device_s(400, Readiness()) == pytest.approx(1, abs=0.05)
    for _ in range(FEW):
        asking.knowledge.learn(outcome(attempt(DEVICE, 0.05)))
    before = asking.knowledge.device.k
    asking.plan(20, {DEVICE: Readiness(prefill_tps=1.0)})
    assert asking.knowledge.device.k == before


@pytest.mark.parametrize("n", [1, 5, FEW - 1])
def test_a_few_samples_of_short_prompts_do_not_shut_out_the_measured_speed(n: int) -> None:
    late, early = planner(), planner()
    early.plan(20, {DEVICE: Readiness(prefill_tps=800.0)})
    for one in (late, early):
        for i in range(n):
            one.knowledge.learn(outcome(attempt(DEVICE, 0.03 + 0.0001 * i), prompt_tokens=20))
    late.plan(20, {DEVICE: Readiness(prefill_tps=800.0)})
    assert late.device_s(1000, Readiness()) == pytest.approx(early.device_s(1000, Readiness()), rel=0.02)
    assert late.device_s(1000, Readiness()) == pytest.approx(1.3, abs=0.3)
    assert late.knowledge.device.n == n


# --- reserving and settling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", LEARNING)
def test_each_plan_reserves_and_each_settlement_releases_once(name: str, constrained: Side) -> None:
    asking = planner(name, constrained, draw=Draws())
    asking.pacer = books = Recording(0.3)
    under_way = [asking.plan(n, {}) for n in LENGTHS * 5]
    assert books.reserved == [(planned.length, planned.reserved) for planned in under_way]
    for planned in reversed(under_way):
        asking.settle(planned, raced(planned, 0.6))
    assert [length for length, _ in books.settled] == [planned.length for planned in reversed(under_way)]
    assert books.released == books.reserved[::-1]


def test_what_starts_at_once_is_reserved_in_full_what_waits_in_part_and_what_is_not_started_not_at_all() -> None:
    waiting = Planner(make_policy("paper"), DEVICE, 0.05).plan(200, {})
    assert (0 < waiting.plan.device_s < math.inf, waiting.reserved) == (True, 200 * 0.05)
    asking = Planner(make_policy("stochastic"), DEVICE, 0.5, draw=iter((0.1, 0.9)).__next__)
    drawn = [asking.plan(200, {}), asking.plan(200, {})]
    assert [(p.plan, p.reserved) for p in drawn] == [(Plan(0.0, math.inf), 200), (Plan(math.inf, 0.0), 0)]


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize(
    ("sides", "spent"),
    [((DEVICE,), {DEVICE}), ((SERVER,), {SERVER}), ((SERVER, DEVICE), {DEVICE, SERVER}), ((DEVICE, DEVICE), {DEVICE})],
)
def test_what_was_really_started_is_booked_once(constrained: Side, sides: tuple[Side, ...], spent: set[Side]) -> None:
    asking = planner(constrained=constrained)
    asking.pacer = books = Recording(0.3)
    planned = asking.plan(40, {})
    asking.settle(planned, outcome(*map(attempt, sides), prompt_tokens=44))
    assert books.settled == [(40, 40 * (constrained in spent))]
    assert books.released == books.reserved == [(40, planned.reserved)]


CACHED = {DEVICE: Readiness(cached=90)}


@pytest.mark.parametrize(
    ("told", "booked"),
    [
        ([Usage(10, cached_tokens=90)], 10),
        ([Usage(4, cached_tokens=90)], 4),  # cancelled in the middle
        ([Usage(60, cached_tokens=90)], 10),  # the rest of it was the answer so far, at a handoff
        ([Usage(30, cached_tokens=120)], 0),  # so was all of this
        ([Usage(100)], 100),  # the cache was gone by then
        ([Usage()], 10),  # an endpoint that tells nothing
        ([Usage(10, cached_tokens=90), Usage(100)], 100),  # and once more, by an engine that was restarted
        ([], 0),
    ],
)
def test_the_device_is_booked_with_what_it_computed_of_a_prompt(told: list[Usage], booked: int) -> None:
    asking = planner(constrained=DEVICE)
    asking.pacer = books = Recording(0.3)
    planned = asking.plan(100, CACHED)
    asking.settle(planned, outcome(attempt(SERVER), *(attempt(DEVICE, usage=usage) for usage in told)))
    assert books.settled == [(100, booked)], "and the whole prompt was there to be processed"
    assert books.released == books.reserved == [(100, planned.reserved)]


def test_of_a_cached_prompt_the_rest_is_reserved_on_the_device_and_all_of_it_on_the_server() -> None:
    device = Planner(make_policy("stochastic"), DEVICE, 0.5, draw=lambda: 0.1).plan(100, CACHED)
    server = Planner(make_policy("stochastic"), SERVER, 0.5, draw=lambda: 0.1).plan(100, CACHED)
    assert (device.plan, device.reserved) == (Plan(0.0, math.inf), 10)
    assert (server.plan, server.reserved) == (Plan(math.inf, 0.0), 100)


def test_the_server_is_booked_with_the_whole_prompt_however_much_the_device_has_of_it() -> None:
    asking = planner(constrained=SERVER)
    asking.pacer = books = Recording(0.3)
    asking.settle(asking.plan(100, CACHED), outcome(attempt(SERVER, usage=Usage(40)), attempt(DEVICE)))
    assert books.settled == [(100, 100)]


def test_a_full_window_has_room_for_the_rest_of_a_cached_prompt_where_it_has_none_for_all_of_it() -> None:
    limited = {side: planner(constrained=side, budget=0.1) for side in Side}
    for side, asking in limited.items():
        while asking.allows(side, 100):
            asking.pacer.settle(100, 100)
    assert limited[DEVICE].allows(DEVICE, 100, cached=99)
    assert not limited[SERVER].allows(SERVER, 100, cached=99), "it bills them all"
    assert math.isfinite(limited[DEVICE].plan(100, {DEVICE: Readiness(cached=99)}).plan.device_s)
    assert math.isinf(limited[SERVER].plan(100, {DEVICE: Readiness(cached=99)}).plan.server_s)


def test_a_server_is_not_asked_at_the_price_of_a_long_prompt_for_the_gain_of_a_short_one() -> None:
    asking = Planner(make_policy("optimal"), SERVER, 0.2, draw=lambda: 0.5)
    asking.knowledge.use_profile(1 / 4000, 1.0)  # a device that takes a second to begin, whatever the prompt
    for i in range(60):
        asking.knowledge.learn(outcome(attempt(SERVER, 0.3 + 0.001 * i), prompt_tokens=(100, 2000)[i % 4 > 0]))
    asking.refit()
    short, long = asking.preview(100, {}, 0.5), asking.preview(2000, {}, 0.5)
    cached = asking.preview(2000, {DEVICE: Readiness(cached=1900)}, 0.5)
    assert short.server_s == 0, "a hundred tokens are worth the second that they save"
    assert math.isinf(cached.server_s), "two thousand are not, where the device computes a hundred as well"
    assert long.device_s == short.device_s == cached.device_s == 0


def test_a_disturbed_attempt_teaches_nothing_but_is_paid_for() -> None:
    asking = planner()
    asking.settle(asking.plan(20, {}), outcome(replace(attempt(DEVICE), disturbed=True)))
    assert asking.knowledge.device.n == 0
    assert asking.pacer.realised()["ratio"] == 1


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_policy_is_not_paced_and_never_fitted_but_its_answers_are_learned_from(name: str) -> None:
    asking = planner(name, budget=0.01)
    asking.pacer = books = Recording(0.01)
    serve(asking, 3 * REFIT_EVERY)
    assert books.reserved == books.settled == []
    assert not asking.due
    assert asking.knowledge.prompts.n == 3 * REFIT_EVERY


# --- learning -------------------------------------------------------------------------------------------------------


def learned(*attempts: Attempt) -> Knowledge:
    knowledge = Knowledge()
    knowledge.learn(outcome(*attempts))
    return knowledge


@pytest.mark.parametrize("how", ["disturbed", "continued"])
@pytest.mark.parametrize("side", Side)
def test_disturbed_attempts_and_continuations_say_nothing_of_a_first_token(side: Side, how: str) -> None:
    knowledge = learned(replace(attempt(side), disturbed=how == "disturbed", continued=how == "continued"))
    assert (knowledge.server.n, knowledge.device.n) == (0, 0)
    assert knowledge.server.availability() == Knowledge().server.availability()
    assert knowledge.prompts.n == 1


def test_a_cancelled_prefill_enters_only_where_it_took_longer_than_was_thought() -> None:
    thought = Knowledge().device.predict(20)
    assert learned(attempt(DEVICE, 0.9 * thought, censored=True)).device.n == 0
    assert learned(attempt(DEVICE, 2.0 * thought, censored=True)).device.predict(20) > thought
    assert learned(attempt(DEVICE, 0.9 * thought)).device.n == 1


def test_a_cancelled_request_to_the_server_enters_as_slower_than_that() -> None:
    server = learned(attempt(SERVER, 0.5, censored=True)).server
    assert (server.n, server.censored_share) == (1, 1)
    assert learned(attempt(SERVER, 0.5)).server.censored_share == 0
    assert learned(attempt(SERVER, 1e-6, censored=True)).server.n == 0, "cancelled in the same instant"


def test_a_time_out_is_a_long_silence_and_any_other_failure_is_none() -> None:
    usual = Knowledge().server.availability()
    timeout = learned(attempt(SERVER, 30.0, censored=True, error="timeout")).server
    broken = learned(attempt(SERVER, 0.1, censored=True, error="server_error")).server
    assert (timeout.n, timeout.censored_share, broken.n) == (1, 1, 0)
    assert timeout.availability() < usual
    assert broken.availability() < usual


def test_a_request_that_the_server_refuses_says_nothing_of_the_server() -> None:
    one = learned(*[attempt(SERVER, 0.1, censored=True, error="refused")] * 30)
    assert one.server.availability() == Knowledge().server.availability()
    assert one.server.n == 0


@pytest.mark.parametrize(("reason", "whole"), [("stop", True), ("tool_calls", True), ("length", False), (None, False)])
def test_a_tool_call_is_the_end_of_a_whole_answer(reason: str | None, whole: bool) -> None:
    knowledge = Knowledge()
    knowledge.learn(replace(outcome(attempt(SERVER)), finish_reason=reason))
    assert knowledge.outputs.curve().censored_share == (0 if whole else 1)


def test_what_the_device_waited_for_its_model_is_not_its_speed() -> None:
    knowledge = learned(replace(attempt(DEVICE, 2.5), load_s=2.0))
    assert knowledge.device.predict(20) < 1


# --- fitting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNING)
def test_a_fit_is_due_after_so_many_answers(name: str) -> None:
    asking = planner(name)
    due = []
    for _ in range(REFIT_EVERY):
        due.append(asking.due)
        asking.settle(asking.plan(20, {}), outcome(attempt(SERVER, 0.5)))
    assert (due, asking.due) == ([False] * REFIT_EVERY, True)
    asking.begin_fit()
    assert not asking.due


def test_a_regime_shift_makes_a_fit_due_sooner() -> None:
    asking, random = planner(draw=Draws()), np.random.default_rng(1)
    serve(asking, 100)
    asking.refit()
    n_new = 0
    while not asking.due:
        asking.knowledge.server.add(float(5.0 * random.lognormal(0.0, 0.3)), censored=False)
        if asking.knowledge.server.n_shifts:
            asking.settle(asking.plan(20, {}), outcome(attempt(SERVER, 5.0)))
            n_new += 1
        assert n_new < REFIT_EVERY


def test_a_table_is_in_force_until_the_next_one_is_adopted() -> None:
    asking = planner(draw=Draws())
    serve(asking, 50)
    before, snapshot = asking.table, asking.begin_fit()
    first = asking.fit(snapshot)
    for _ in range(5):
        asking.settle(asking.plan(20, {}), outcome(attempt(SERVER, 20.0)))
    assert asking.table is before
    later = asking.fit(snapshot)
    np.testing.assert_array_equal(first.device_s, later.device_s)
    asking.adopt(snapshot, later)
    assert asking.table is later


def test_plans_follow_what_was_learned() -> None:
    asking, fast = planner(budget=0.1), planner(budget=0.1)
    for _ in range(100):
        asking.knowledge.learn(outcome(attempt(SERVER, 3.0)))
        fast.knowledge.learn(outcome(attempt(SERVER, 0.1)))
    asking.refit()
    fast.refit()
    assert asking.preview(20, {}, 0.5).device_s > fast.preview(20, {}, 0.5).device_s


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", LEARNING)
def test_what_was_saved_gives_the_same_plans(name: str, constrained: Side) -> None:
    teacher = planner(name, constrained, draw=Draws())
    serve(teacher, 60)
    saved = json.dumps(teacher.knowledge.to_json(), allow_nan=False)
    again = planner(name, constrained)
    again.restore(Knowledge.from_json(json.loads(saved)))
    fresh = planner(name, constrained, knowledge=teacher.knowledge)
    assert previews(again) == previews(fresh)
    assert json.dumps(again.knowledge.to_json()) == saved


@pytest.mark.parametrize("constrained", Side)
def test_who_takes_a_planner_s_place_keeps_its_account_of_the_same_limit(constrained: Side) -> None:
    before = planner(constrained=constrained, budget=0.3, draw=Draws())
    serve(before, 30)
    under_way = before.plan(20, {})
    again = planner(constrained=constrained, budget=0.3)
    again.succeed(before)
    assert again.pacer.realised() == before.pacer.realised()
    before.settle(under_way, outcome(attempt(constrained)))
    assert again.pacer.realised()["requests"] == 31, "what was under way counts in the one account there is"
    for other in (planner(constrained=constrained, budget=0.4), planner(constrained=constrained.other, budget=0.3)):
        other.succeed(before)
        assert other.pacer.realised()["requests"] == 0
        assert float(np.asarray(other.pacer.budget)) == other.budget


def test_after_a_restart_usual_prompts_are_not_refused_as_too_long() -> None:
    knowledge = Knowledge()
    for _ in range(300):
        knowledge.learn(outcome(prompt_tokens=5000))
    again = planner(budget=0.1)
    again.restore(knowledge)
    assert previews(again) == previews(planner(budget=0.1, knowledge=knowledge))
    assert math.isfinite(again.preview(5000, {}, 0.5).device_s)


# --- explaining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", POLICIES)
def test_the_explanation_is_json_and_tells_what_would_be_done(name: str, constrained: Side) -> None:
    asking = planner(name, constrained)
    for n in (0, 1, 60):
        serve(asking, n)
        told = json.loads(json.dumps(asking.explain(20, {DEVICE: Readiness(n_busy=1)}, 0.0), allow_nan=False))
        assert set(told) == {
            "tokens", "plan", "device_ttft_s", "grades", "readiness", "context", "contexts", "picture", "learned"
        }  # fmt: skip
        assert told["tokens"] == 20
        assert 0 <= told["context"] < told["contexts"]
        assert told["learned"]["policy"] == asking.policy.name
        assert told["learned"]["prompts"]["n"] == asking.knowledge.prompts.n
        quantiles = list(told["learned"]["server_ttft"]["quantiles_s"].values())
        assert sorted(quantiles) == quantiles
        pictured = [entry["tokens"] for entry in told["picture"]]
        assert pictured == sorted(set(pictured))
        plan = asking.plan(20, {DEVICE: Readiness(n_busy=1)}).plan
        assert told["plan"] == {
            side: delay if math.isfinite(delay) else None
            for side, delay in (("device_s", plan.device_s), ("server_s", plan.server_s), ("hedge_s", plan.hedge_s))
        }


def told(planner: Planner, length: int, readiness: dict[Side, Readiness], waited_s: float = 0.0) -> Plan:
    plan = planner.explain(length, readiness, waited_s)["plan"]
    return Plan(*(math.inf if plan[key] is None else plan[key] for key in ("device_s", "server_s")))


@pytest.mark.parametrize(("length", "readiness"), [(50_000, {}), (20, DOWN)])
def test_a_fixed_policy_is_explained_as_it_plans(length: int, readiness: dict[Side, Readiness]) -> None:
    for name in FIXED:
        asking = planner(name)
        assert told(asking, length, readiness) == asking.plan(length, readiness).plan, name


@pytest.mark.parametrize(
    "name",
    [
        "optimal",
        "paper",
    ],
)
def test_the_longer_the_server_was_waited_for_the_sooner_the_device_starts(name: str) -> None:
    asking = planner(name, budget=0.05)
    wait = told(asking, 60, {}).device_s
    assert 0 < wait < math.inf
    assert told(asking, 60, {}, wait / 2).device_s == pytest.approx(wait / 2)
    assert told(asking, 60, {}, wait).device_s == 0


# --- online ---------------------------------------------------------------------------------------------------------


def stream(seed: int, n: int = 1500, shift_at: int | None = None) -> Stream:
    """One lane: lognormal TTFTs of median 0.6 s, of 1.5 s from `shift_at` on, and prompts of about 18 tokens."""
    random = np.random.default_rng(seed)
    ttft = 0.6 * random.lognormal(0.0, 0.5, n)
    if shift_at is not None:
        ttft[shift_at:] *= 2.5
    prompt = np.clip(np.rint(18 * random.lognormal(-0.15, 0.54, n)), 1, 144)
    return Stream(prompt[:, None], np.full((n, 1), 200.0), ttft[:, None], random.random((n, 1)))


def tokens_used(
    asking: Planner, requests: Stream, *, shadow: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens that the constrained side processed for each request, and all of them."""
    seen = list(play_online(requests, 0, PHONE, asking, shadow=shadow))
    ran = np.array([s.device_ran if asking.constrained is DEVICE else s.server_ran for s in seen])
    prompt = requests.prompt[:, 0]
    return prompt * ran, prompt


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("name", ["optimal", "paper"])
def test_learning_as_it_goes_it_keeps_to_the_budget(name: str, constrained: Side, shadow: bool) -> None:
    used, offered = tokens_used(planner(name, constrained, draw=Draws(1)), stream(3), shadow=shadow)
    assert used.sum() / offered.sum() <= 0.3 + 0.01
    assert used.sum() / offered.sum() >= 0.3 - 0.02, "and does not leave it unused"
    windows = [used[i : i + WINDOW].sum() / offered[i : i + WINDOW].sum() for i in range(len(used) - WINDOW + 1)]
    assert max(windows) <= 0.3 + SLACK


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("budget", [0.1, 0.3])
def test_after_a_regime_shift_it_does_not_overspend(budget: float, constrained: Side) -> None:
    asking = planner("optimal", constrained, budget, draw=Draws(2))
    used, offered = tokens_used(asking, stream(4, shift_at=1000))
    assert asking.knowledge.server.n_shifts > 0
    assert used[1000:].sum() / offered[1000:].sum() <= budget + 0.05


class Eavesdropper(Planner):
    """Remembers what it was told."""

    def settle(self, planned: Planned, outcome: Outcome) -> None:
        self.heard = [*getattr(self, "heard", ()), outcome]
        super().settle(planned, outcome)


@pytest.mark.parametrize("shadow", [True, False])
def test_it_is_told_no_more_than_the_daemon_could_see(shadow: bool) -> None:
    asking, requests = Eavesdropper(make_policy("paper"), DEVICE, 0.3, draw=Draws(1)), stream(3, 200)
    tokens_used(asking, requests, shadow=shadow)
    times = {SERVER: requests.server_s[:, 0], DEVICE: PHONE.ttft_s(requests.prompt[:, 0])}
    hidden: set[Side] = set()
    for i, heard in enumerate(asking.heard):
        assert heard.ttft_s is not None
        for one in heard.attempts:
            if one.censored:
                hidden.add(one.side)
                assert one.side is not heard.winner
                assert one.started_s + one.ttft_s == pytest.approx(heard.ttft_s), "cancelled at the first token"
                assert one.ttft_s <= times[one.side][i]
            else:
                assert one.ttft_s == times[one.side][i]
    assert hidden == ({DEVICE} if shadow else {DEVICE, SERVER})


def test_without_the_window_the_long_run_holds_all_the_same() -> None:
    used, offered = tokens_used(planner(draw=Draws(3), windowed=False), stream(5))
    assert used.sum() / offered.sum() == pytest.approx(0.3, abs=0.02)
