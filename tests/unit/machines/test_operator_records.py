"""What a fleet's operator keeps between two looks, each record by itself."""

from __future__ import annotations

from dataclasses import replace

from disco_daemon.config.schema import FleetSettings
from disco_daemon.fleet.steps import FleetStep, StepKind
from disco_daemon.machines.fleet.layer_plan import StepDone
from disco_daemon.machines.fleet.observations import seen_of
from disco_daemon.machines.fleet.operator_records import (
    MAX_REST_S,
    MAX_STEPS,
    REST_S,
    AnswerLimit,
    OwnerWishes,
    StepLog,
)
from tests.unit.machines.test_fleet_seen import CALM, LAYOUT, MOMENT

AUTO, MANUAL = FleetSettings(mode="auto"), FleetSettings(mode="manual")


def test_layers_stay_where_they_lay_when_they_stopped_moving_by_themselves() -> None:
    later = replace(LAYOUT, inner=LAYOUT.inner[:1])
    wishes = OwnerWishes(AUTO, paused=True, drained=frozenset({2})).following(MANUAL, LAYOUT)
    assert wishes.placed is LAYOUT
    assert wishes.following(replace_mode(MANUAL), later).placed is LAYOUT
    again = wishes.following(AUTO, later)
    assert (again.placed, again.paused, again.drained) == (None, True, frozenset({2}))
    assert again.following(MANUAL, later).placed is later


def replace_mode(settings: FleetSettings) -> FleetSettings:
    """Return other settings in the same mode."""
    return FleetSettings(mode=settings.mode, hosts=3)


def test_after_each_further_failure_the_fleet_rests_twice_as_long_and_an_hour_at_most() -> None:
    log = StepLog()
    for n in range(12):
        log.count(0.0, failed=True, moves=True)
        rest_s = min(MAX_REST_S, REST_S * 2**n)
        assert log.rests(rest_s - 1.0)
        assert not log.rests(rest_s)
    assert log.n_moves == 0
    log.count(0.0, failed=False, moves=True)
    log.count(0.0, failed=False, moves=False)
    assert log.n_moves == 1
    log.count(0.0, failed=True, moves=True)
    assert not log.rests(REST_S), "a step that went through is the end of a row of failures"


def test_the_latest_steps_are_shown_with_what_came_of_them() -> None:
    log = StepLog(measured={MAX_STEPS - 1.0: 1.23456})
    for number in range(MAX_STEPS + 2):
        log.note(float(number), StepDone("move", number, number + 1, "home", "attic", "why", 1.5))
    shown = log.shown()
    assert [step["first"] for step in shown] == list(range(2, MAX_STEPS + 2))
    assert [step["measured"] for step in shown][-3:] == [1.235, None, None]


def test_a_limit_is_one_until_as_many_answers_may_run_as_ran_before_it() -> None:
    limit, seen = AnswerLimit(), seen_of(MOMENT, CALM)
    limit.see(8)
    limit.follow(FleetStep(StepKind.LOWER_BATCH, batch=4), seen)
    limit.see(2)
    assert (limit.n_answers, limit.full_batch) == (4, 8), "what runs under a limit says nothing of what would without"
    limit.follow(FleetStep(StepKind.OFFLOAD), seen)
    assert limit.offloaded
    limit.follow(FleetStep(StepKind.RAISE_BATCH, batch=6), seen)
    assert (limit.n_answers, limit.offloaded) == (6, False)
    limit.follow(FleetStep(StepKind.RAISE_BATCH, batch=8), seen)
    assert limit.n_answers == 0
