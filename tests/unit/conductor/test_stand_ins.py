"""Sides of unequal quality on scripted endpoints: who begins, when the stand-in does, and where answers move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from disco_daemon.conductor import AnswerContext
from disco_daemon.conductor.plan import LATE_LOAD, LATE_S, NOT_THE_SERVER, fitted, insured
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.dispatch.mover import CostMover, Forced, Stay
from disco_daemon.errors import EndpointError
from disco_daemon.types import (
    EQUAL,
    Continuation,
    Delivery,
    Finish,
    Outcome,
    Plan,
    Readiness,
    Reason,
    Relation,
    Side,
    Unequal,
)
from tests.fixtures.jumping import in_jumps
from tests.unit.conductor.test_answer_run import LONG, STALL_S, Page, Scripted, Step, asked, context, played, words

DEVICE, SERVER = Side.DEVICE, Side.SERVER
TTFT_S = 0.3  # of a server as it is known: it is patiently waited for three times as long
PATIENCE_S = 3 * TTFT_S
COSTS = Costs(device_prefill=1e-9, device_decode=2e-8, server_prefill=1.5e-7, server_decode=6e-7)


def stands(lower: Side, unequal: Unequal = Unequal.STAND_IN) -> Relation:
    return Relation(lower, "It is one.", unequal)


def says(side: Side, *before: Step) -> Scripted:
    """An endpoint that says who it is, once it has done what is before that."""
    return Scripted(side, [*before, *words(f"{side} ", "is ", "here"), Finish("stop")])


def knowing(on: AnswerContext, relation: Relation) -> AnswerContext:
    """The same context, in which the server is known and one side is a stand-in."""
    for _ in range(200):
        on.planner.knowledge.server.add(TTFT_S, censored=False)
    on.relation = lambda: relation
    return on


def unequal(device: Scripted, server: Scripted, relation: Relation, **more: Any) -> AnswerContext:
    return knowing(context(device, server, policy="optimal", **more), relation)


def held_back(on: AnswerContext) -> AnswerContext:
    """The same context, with enough text held back to bridge a move."""
    on.defaults = replace(on.defaults, delivery=Delivery.RESERVE, pace_tps=20.0, stall_s=60.0)
    on.mover = Stay(CostMover(on.planner, lambda *_: COSTS))
    return on


async def heard(on: AnswerContext, **more: Any) -> tuple[str, Outcome, Reason]:
    page = Page()
    text, outcome = await played(on, asked(**more), page)
    assert outcome.reason is not None
    return text, outcome, outcome.reason


@pytest.mark.parametrize("lower", Side)
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@in_jumps
async def test_the_better_side_begins_and_the_stand_in_is_not_asked_whatever_the_budget_is(
    lower: Side, budget: float
) -> None:
    sides = {side: says(side, 0.1) for side in Side}
    on = unequal(sides[DEVICE], sides[SERVER], stands(lower), budget=budget)
    text, outcome, reason = await heard(on)
    assert text == f"{lower.other} is here"
    assert (sides[lower].asked, reason) == ([], Reason.GRADE)
    assert outcome.to_json()["stand_in"] == {"side": lower.value, "why": "It is one."}


@in_jumps
async def test_a_budget_that_is_used_up_pushes_no_answer_to_the_stand_in() -> None:
    device, server = says(DEVICE), says(SERVER, 0.1)
    on = unequal(device, server, stands(DEVICE), budget=0.0)
    while on.planner.pacer.allows(10):
        on.planner.pacer.reserve(0, 1)
    assert (await heard(on))[0] == "server is here"
    assert device.asked == []


@in_jumps
async def test_a_silence_beyond_all_that_was_seen_starts_the_stand_in() -> None:
    device, server = says(DEVICE), says(SERVER, 3 * PATIENCE_S)
    text, outcome, reason = await heard(unequal(device, server, stands(DEVICE)))
    assert (text, reason) == ("device is here", Reason.STAND_IN)
    assert [a.started_s for a in outcome.attempts if a.side is DEVICE] == [pytest.approx(PATIENCE_S, abs=0.01)]


@in_jumps
async def test_a_server_that_has_failed_often_and_is_back_is_waited_for() -> None:
    device, server = says(DEVICE), says(SERVER, 0.9 * PATIENCE_S)
    on = unequal(device, server, stands(DEVICE))
    for _ in range(400):
        on.planner.knowledge.server.add_failure(None)
    assert (await heard(on))[0] == "server is here"
    assert device.asked == []


@in_jumps
async def test_a_server_that_wants_to_be_left_alone_is_said_not_to_have_been_there() -> None:
    device, server = says(DEVICE), Scripted(SERVER, [Finish("stop")], Readiness(down_s=60.0))
    text, outcome, reason = await heard(unequal(device, server, stands(DEVICE)))
    assert (text, reason) == ("device is here", Reason.ONLY)
    assert [a.side for a in outcome.attempts] == [DEVICE]


@in_jumps
async def test_a_silence_that_is_usual_does_not() -> None:
    device, server = says(DEVICE), says(SERVER, 0.9 * PATIENCE_S)
    assert (await heard(unequal(device, server, stands(DEVICE))))[0] == "server is here"
    assert device.asked == []


@pytest.mark.parametrize("lower", Side)
@in_jumps
async def test_a_better_side_that_fails_is_stood_in_for_and_the_reason_says_so(lower: Side) -> None:
    sides = {lower: says(lower), lower.other: Scripted(lower.other, [EndpointError(lower.other, "unreachable", "!")])}
    text, _, reason = await heard(unequal(sides[DEVICE], sides[SERVER], stands(lower)))
    assert (text, reason) == (f"{lower} is here", Reason.FAILURE)


@in_jumps
async def test_over_a_cap_the_stand_in_answers_alone() -> None:
    device, server = says(DEVICE), says(SERVER)
    text, _, reason = await heard(unequal(device, server, stands(DEVICE), usd_per_day=0.0))
    assert (text, server.asked, reason) == ("device is here", [], Reason.ONLY)


@in_jumps
async def test_a_server_that_asks_to_be_left_alone_is_stood_in_for_at_once() -> None:
    device, server = says(DEVICE), says(SERVER)
    server.ready = Readiness(down_s=30.0)
    text, outcome, _ = await heard(unequal(device, server, stands(DEVICE)))
    assert (text, server.asked) == ("device is here", [])
    assert outcome.attempts[0].started_s < 0.01


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"prefers": DEVICE}, Reason.ROUTE),
        ({"allowed": frozenset({DEVICE})}, Reason.ROUTE),
        ({"allowed": frozenset({DEVICE}), "private": True}, Reason.PRIVATE),
    ],
)
@in_jumps
async def test_what_is_pinned_to_the_stand_in_is_its_own(wish: dict[str, Any], reason: Reason) -> None:
    device, server = says(DEVICE), says(SERVER)
    text, _, why = await heard(unequal(device, server, stands(DEVICE)), **wish)
    assert (text, server.asked, why) == ("device is here", [], reason)


@pytest.mark.parametrize("lower", Side)
@in_jumps
async def test_no_answer_moves_to_a_stand_in_for_money(lower: Side) -> None:
    slowly: list[Step] = [step for i in range(20) for step in (*words(f"{i} "), 0.05)]
    for relation, moved in ((stands(lower), False), (stands(lower, Unequal.RACE), True)):
        sides = {lower: says(lower), lower.other: Scripted(lower.other, [*slowly, Finish("stop")])}
        on = unequal(sides[DEVICE], sides[SERVER], relation)
        on.planner.pursue(make_policy(f"all-{lower.other}"))
        on.planner.refit()
        on.defaults = replace(on.defaults, delivery=Delivery.RESERVE, pace_tps=0.1, stall_s=60.0)
        on.mover = Forced(CostMover(on.planner, lambda *_: COSTS), 3, 3)
        _, outcome, _ = await heard(on)
        assert [move.reason for move in outcome.moves] == ["cost"] * moved
        assert bool(sides[lower].asked) is moved


@in_jumps
async def test_a_server_that_is_heard_after_its_silence_goes_on_with_what_the_stand_in_has_begun() -> None:
    device = Scripted(DEVICE, [*[step for i in range(40) for step in (*words(f"{i} "), 0.05)], Finish("stop")])
    server = Scripted(SERVER, [PATIENCE_S + 0.2, *words("and ", "so on"), Finish("stop")])
    on = held_back(unequal(device, server, stands(DEVICE)))
    on.shadow = True
    page = Page()

    def is_there_again(*_: object) -> None:
        server.script = [0.1, *words("and ", "so on"), Finish("stop")]

    page.route = is_there_again  # type: ignore[assignment]
    text, outcome = await played(on, asked(), page)
    assert outcome.reason is Reason.STAND_IN
    assert [(move.reason, move.target, move.dropped) for move in outcome.moves] == [("grade", SERVER, None)]
    assert text.startswith("0 1 2")
    assert text.endswith("and so on")


@in_jumps
async def test_a_stand_in_that_stalls_is_left_for_the_better_side_though_the_budget_is_used_up() -> None:
    device = Scripted(DEVICE, [*words("one ", "two "), LONG, *words("three"), Finish("stop")])
    server = Scripted(SERVER, [PATIENCE_S + 0.1, *words("and ", "so on"), Finish("stop")])
    on = unequal(device, server, stands(DEVICE), budget=0.0)
    while on.planner.pacer.allows(10):
        on.planner.pacer.reserve(0, 1)
    server.script = [2 * PATIENCE_S, *words("never")]
    page = Page()

    def answers_then() -> None:
        server.script = [*words("and ", "so on"), Finish("stop")]

    page.route = lambda *_: answers_then()  # type: ignore[method-assign]
    text, outcome = await played(on, asked(), page)
    assert text == "one two and so on"
    assert [move.reason for move in outcome.moves] == ["stall"]


@pytest.mark.parametrize("continuation", [Continuation.EXACT, Continuation.NONE, Continuation.UNTRIED])
@in_jumps
async def test_first_words_are_the_stand_ins_only_where_the_better_side_can_go_on(continuation: Continuation) -> None:
    device = Scripted(DEVICE, [*[step for i in range(40) for step in (*words(f"{i} "), 0.05)], Finish("stop")])
    server = Scripted(SERVER, [0.2, *words("and ", "so on"), Finish("stop")], continuation=continuation)
    text, outcome, reason = await heard(held_back(unequal(device, server, stands(DEVICE, Unequal.FIRST_WORDS))))
    if continuation is Continuation.EXACT:
        assert reason is Reason.STAND_IN
        assert [(move.reason, move.target) for move in outcome.moves] == [("grade", SERVER)]
        assert text.startswith("0 1 2")
        assert text.endswith("and so on")
        assert device.asked[0].answer_so_far == ""
        assert text.startswith(server.asked[0].answer_so_far)
    else:
        assert (text, device.asked, reason) == ("and so on", [], Reason.GRADE)


@in_jumps
async def test_an_answer_keeps_the_relation_that_it_began_with() -> None:
    device = Scripted(DEVICE, [EndpointError(DEVICE, "engine_gone", "!")])
    server = says(SERVER, 0.1)
    on = unequal(device, server, stands(DEVICE))
    page = Page()

    def turn(n_tokens: int) -> None:
        on.relation = lambda: stands(SERVER)

    page.prompt = turn  # type: ignore[method-assign]
    text, outcome = await played(on, asked(), page)
    assert (text, device.asked) == ("server is here", [])
    assert outcome.relation == stands(DEVICE)
    assert (await played(on))[1].relation == stands(SERVER)


@in_jumps
async def test_a_race_is_one_and_a_policy_of_the_users_own_starts_sides_as_it_says() -> None:
    for on in (
        unequal(says(DEVICE), says(SERVER, 0.2), stands(DEVICE, Unequal.RACE)),
        knowing(context(says(DEVICE), says(SERVER, 0.2), policy="race"), stands(DEVICE)),
    ):
        _, outcome, reason = await heard(on)
        assert reason in {Reason.RACE, Reason.PLAN}
        assert outcome.winner is DEVICE


@in_jumps
async def test_for_equal_sides_every_plan_is_the_one_that_it_was() -> None:
    on = knowing(context(says(DEVICE), says(SERVER), policy="optimal"), EQUAL)
    for length in (1, 10, 100, 1000, 4000):
        for load_s in (0.0, 3.0):
            for down_s in (0.0, 5.0):
                readiness = {DEVICE: Readiness(load_s=load_s, n_ctx=8192), SERVER: Readiness(down_s=down_s)}
                plan = on.planner.preview(length, readiness, 0.5)
                for relation in (EQUAL, Relation(), stands(DEVICE, Unequal.RACE)):
                    assert repr(fitted(plan, asked(), length, readiness, on, relation)) == repr(
                        fitted(plan, asked(), length, readiness, on)
                    )
                    assert on.planner.graded(plan, relation, length, readiness[DEVICE], goes_on=True) is plan


@in_jumps
async def test_a_server_stands_in_for_a_large_model_that_is_loading_only_late() -> None:
    on = knowing(context(says(DEVICE), says(SERVER), policy="optimal"), stands(SERVER))
    readiness = {DEVICE: Readiness(load_s=20.0), SERVER: Readiness()}
    plan = fitted(on.planner.preview(10, readiness, 0.5), asked(), 10, readiness, on, stands(SERVER))
    assert plan == Plan(0.0, math.inf, plan.hedge_s)
    assert insured(plan, readiness).server_s == LATE_S + LATE_LOAD * 20.0


@in_jumps
async def test_where_the_better_server_is_down_the_plan_is_the_devices() -> None:
    on = knowing(context(says(DEVICE), says(SERVER), policy="optimal"), stands(DEVICE))
    readiness = {DEVICE: Readiness(), SERVER: Readiness(down_s=9.0)}
    plan = fitted(on.planner.preview(10, readiness, 0.5), asked(), 10, readiness, on, stands(DEVICE))
    assert (plan.device_s, plan.server_s) == (NOT_THE_SERVER.device_s, NOT_THE_SERVER.server_s)


@in_jumps
async def test_the_plan_that_is_shown_is_the_one_that_is_made() -> None:
    on = knowing(context(says(DEVICE), says(SERVER), policy="optimal"), stands(DEVICE))
    readiness = {DEVICE: Readiness(), SERVER: Readiness()}
    shown = on.planner.explain(10, readiness, relation=stands(DEVICE))
    assert shown["plan"]["server_s"] == 0
    assert shown["plan"]["device_s"] == pytest.approx(PATIENCE_S)
    assert shown["grades"]["stand_in"] == "device"
    assert on.planner.explain(10, readiness)["grades"]["stand_in"] is None


assert STALL_S < PATIENCE_S
