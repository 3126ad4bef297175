"""What a controller is shown of a fleet on one machine, and what it does when a host's owner wants it back."""

from __future__ import annotations

import sys
from dataclasses import replace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.config.schema import FleetSettings
from disco_daemon.engine import wire
from disco_daemon.fleet.control import COOLDOWN_S, FleetController, FleetSeen
from disco_daemon.fleet.forecast import FleetLoad
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.placement import ModelModules
from disco_daemon.fleet.steps import BATCH_KINDS, FleetStep, StepKind
from disco_daemon.machines.fleet.layer_plan import FleetPlanInput
from disco_daemon.machines.fleet.monitor import FleetMonitor, MachineLoad, ProcessLoad, is_somebody_active
from disco_daemon.machines.fleet.observations import GIB, FleetMoment, is_closed, process_bytes, seen_of
from disco_daemon.machines.fleet.operator_records import SeenRate
from disco_daemon.machines.fleet.range_costs import MAX_RANGES, CostBook, condensed

N_CELLS, LAYER, KV = 8192, 2_000_000, 1536
MODEL = ModelModules((28_000_000, *(LAYER,) * 30, 28_000_000), KV, 2304)
GIVEN = FleetPlanInput(MODEL, 0.015, n_threads=1, n_threads_each=1, n_cells=N_CELLS, machine_bytes=16e9, n_hosts=2)
LAYOUT = FleetLayout.of_cuts((5, 12, 22), 30)
MOMENT = FleetMoment(
    LAYOUT, GIVEN, FleetSettings(enabled=True, hosts=2, cuts=(5, 12, 22)), condensed(GIVEN.costs, LAYOUT),
    FleetLoad(8.0, 200.0), N_CELLS, batch=8, full_batch=8,
)  # fmt: skip
CALM = MachineLoad(8, 0.05, int(16e9), int(12e9), processes={n: ProcessLoad(0.5, 0.5, 150_000_000) for n in range(3)})
LAYER_BYTES = LAYER + N_CELLS * KV  # as it is loaded, with its cells
PROCESS_BYTES = process_bytes(N_CELLS)


def with_gib(gib: float) -> FleetMoment:
    return replace(MOMENT, settings=FleetSettings(enabled=True, hosts=2, memory_gib=gib))


def played(
    moment: FleetMoment, seconds: int, machine: MachineLoad = CALM, *, may_scale: bool = True
) -> tuple[FleetLayout, list[FleetStep]]:
    """Let a controller look once a second, and carry out its steps at once."""
    controller, steps = FleetController(), list[FleetStep]()
    for now in range(seconds):
        seen = seen_of(moment, machine)
        for step in controller.decide(float(now), seen, may_scale=may_scale):
            steps.append(step)
            moment = replace(moment, layout=moment.layout.after(step.apply(moment.layout.placement)))
            moment = replace(moment, costs=condensed(GIVEN.costs, moment.layout))
    return moment.layout, steps


def test_a_host_s_memory_is_what_its_owner_gives_or_what_the_machine_has_whichever_is_less() -> None:
    free = seen_of(MOMENT, CALM)
    assert free.excess == (0.0, 0.0, 0.0)
    assert free.fleet.hosts[1].room_bytes == pytest.approx(0.85 * 16e9 - 4e9 + 150e6 - PROCESS_BYTES)
    tight = seen_of(with_gib(0.2), CALM)
    assert tight.fleet.hosts[0].room_bytes == free.fleet.hosts[0].room_bytes, "home is no host"
    assert tight.fleet.hosts[1].room_bytes == pytest.approx(0.2 * GIB - PROCESS_BYTES)
    assert tight.excess[2] == pytest.approx(10 * LAYER_BYTES - 0.2 * GIB + PROCESS_BYTES)
    assert tight.memory_shares[2] > free.memory_shares[2]
    assert (free.fleet.pinned, len(free.fleet.model.weights)) == (frozenset((0, 18)), 19)


def test_a_host_that_wants_a_processor_and_gets_none_is_not_vacant() -> None:
    starved = replace(CALM, processes={1: ProcessLoad(cpu_got=0.1, cpu_wanted=1.0)})
    seen = seen_of(MOMENT, starved)
    assert seen.vacancy(1) == pytest.approx(0.0)
    assert seen.vacancy(2) > 0.5


@pytest.mark.parametrize(
    ("only_idle", "only_mains", "at_work", "on_mains", "closed"),
    [
        (False, False, True, False, False), (True, False, None, True, True), (True, False, True, True, True),
        (True, False, False, True, False), (False, True, None, False, True), (False, True, None, True, False),
    ],
)  # fmt: skip
def test_hosts_compute_while_their_owner_lets_them(
    only_idle: bool, only_mains: bool, at_work: bool | None, on_mains: bool, closed: bool
) -> None:
    settings = FleetSettings(only_idle=only_idle, only_mains=only_mains)
    machine = replace(CALM, owner_at_work=at_work, on_mains=on_mains)
    assert is_closed(settings, machine) is closed
    seen = seen_of(replace(MOMENT, settings=settings), machine)
    assert seen.leaving == (frozenset((1, 2)) if closed else frozenset())
    assert [host.accepts for host in seen.fleet.hosts] == [True, not closed, not closed]


def test_a_drained_host_is_left_at_once_also_where_nothing_may_be_scaled() -> None:
    layout, steps = played(replace(MOMENT, drained=frozenset((1,))), 4, may_scale=False)
    assert [(step.kind, step.source) for step in steps] == [(StepKind.MOVE, 1)]
    assert layout.on(1) == []
    assert "to be left" in steps[0].why


def test_a_host_with_less_memory_gives_away_no_more_than_it_must() -> None:
    n_fit = 6
    moment = with_gib((PROCESS_BYTES + (n_fit + 0.5) * LAYER_BYTES) / GIB)
    layout, steps = played(moment, 10, may_scale=False)
    assert {step.kind for step in steps} == {StepKind.MOVE}
    assert [sum(layers.n_layers for layers in layout.on(host)) for host in (1, 2)] == [n_fit, n_fit]
    assert seen_of(replace(moment, layout=layout), CALM).excess == (0.0, 0.0, 0.0)


def test_a_drained_host_is_left_also_where_others_take_all_processors() -> None:
    busy = replace(CALM, others_share=1.0)
    layout, _ = played(replace(MOMENT, drained=frozenset((1, 2))), 5, busy, may_scale=False)
    assert layout.on(1) == layout.on(2) == []


def test_a_fleet_grows_by_itself_into_hosts_that_are_vacant() -> None:
    controller, layout, steps = FleetController(), FleetLayout(30, (PlacedRange(5, 22, (0,)),)), list[FleetStep]()
    for now in range(60):
        moment = replace(MOMENT, layout=layout, costs=condensed(GIVEN.costs, layout), n_answers=1)
        for step in controller.decide(float(now), seen_of(moment, CALM)):
            steps.append(step)
            layout = layout.after(step.apply(layout.placement))
    assert {step.kind for step in steps} <= {StepKind.MOVE, StepKind.REPLICATE, StepKind.EVICT}
    assert layout.n_away((1, 2)) > 0
    assert all(step.predicted >= 1.02 for step in steps)


def test_replicas_go_before_anything_is_copied() -> None:
    layout = FleetLayout(30, (PlacedRange(5, 12, (1, 2)), PlacedRange(12, 22, (2,))))
    moment = replace(MOMENT, layout=layout, drained=frozenset((2,)))
    after, steps = played(moment, 5, may_scale=False)
    assert [step.kind for step in steps] == [StepKind.EVICT, StepKind.MOVE]
    assert after.on(2) == []


def test_a_step_that_came_to_nothing_is_tried_again_only_after_a_rest() -> None:
    controller, moment = FleetController(), replace(MOMENT, drained=frozenset((1,)))
    seen = seen_of(moment, CALM)
    tried = [now for now in range(20) if controller.decide(float(now), seen)]
    assert tried == [0, 5, 10, 15]
    assert COOLDOWN_S == 5.0


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 12), st.booleans(), st.booleans()), min_size=5, max_size=60)
)
def test_whatever_owners_want_no_layer_is_lost_and_no_host_gets_what_it_may_not_have(
    reports: list[tuple[float, int, bool, bool]],
) -> None:
    controller, layout = FleetController(), LAYOUT
    for now, (gib, n_answers, late, drains) in enumerate(reports):
        moment = replace(with_gib(gib), layout=layout, drained=frozenset((1,) if drains else ()), n_answers=n_answers)
        seen = seen_of(replace(moment, n_late=n_answers * late, costs=condensed(GIVEN.costs, layout)), CALM)
        for step in controller.decide(float(now), seen):
            if step.kind in BATCH_KINDS:
                continue
            after = layout.after(step.apply(layout.placement))
            assert after.parallelism[: layout.first] == [1] * layout.first
            if step.target is not None:
                assert step.target not in seen.leaving
                needs = after.placement.weights_on(step.target, seen.fleet.model)
                assert needs <= seen.fleet.hosts[step.target].room_bytes
            layout = after
    assert min(layout.parallelism) >= 1


def test_memory_that_comes_and_goes_makes_no_layers_come_and_go() -> None:
    controller, layout, moves = FleetController(), LAYOUT, list[tuple[int, FleetStep]]()
    for now in range(600):
        gib = 0.15 if now // 20 % 2 else 1.0
        moment = replace(with_gib(gib), layout=layout, costs=condensed(GIVEN.costs, layout))
        for step in controller.decide(float(now), seen_of(moment, CALM)):
            moves.append((now, step))
            layout = layout.after(step.apply(layout.placement))
    assert any(step.source in (1, 2) for _, step in moves), "they left when they had to"
    back = [now for now, step in moves if step.target in (1, 2) and now > 20]
    assert len(back) <= 8, moves  # each next one waits twice as long


# --- costs ------------------------------------------------------------------------------------------------------------


def sample(first: int, last: int, batch: int, seconds: float, n: int = 1) -> wire.RunSample:
    return wire.RunSample(host=0, first=first, last=last, batch=batch, n=n, seconds=seconds)


def test_costs_are_fitted_once_all_modules_were_seen_at_two_sizes() -> None:
    book = CostBook()
    for batch in (1, 4):
        book.observe([sample(0, 5, batch, 0.005 * batch), sample(5, 12, batch, 2 * 0.0071 * batch, n=2)])
        assert book.costs(LAYOUT) is None
        book.observe([sample(12, 22, batch, 0.0101 * batch), sample(22, 30, batch, 0.02 * batch)])
    costs = book.costs(LAYOUT)
    assert costs is not None
    assert costs.layer.at(4) == pytest.approx(0.004, rel=0.02)
    assert costs.embedding.at(1) + costs.call.at(1) == pytest.approx(0.005, rel=0.02)
    assert costs.head.at(4) + costs.call.at(4) == pytest.approx(0.08, rel=0.02)
    others = [sample(first, last, batch, 1.0) for first in (1, 2, 3) for last in range(6, 22) for batch in range(1, 17)]
    assert len(others) > MAX_RANGES
    book.observe(others)
    assert book.costs(LAYOUT) is None, "what is long ago was forgotten"


def test_nothing_is_learned_from_what_is_no_run() -> None:
    book = CostBook()
    book.observe([sample(0, 5, 0, 1.0), sample(0, 5, 1, 1.0, n=0)])
    assert book.costs(LAYOUT) is None


def test_a_layout_s_modules_cost_what_the_model_does() -> None:
    costs = condensed(GIVEN.costs, LAYOUT)
    for batch in (1.0, 4.0, 8.0):
        inner = 17 * costs.layer.at(batch)
        whole = 30 * GIVEN.costs.layer.at(batch) + GIVEN.costs.head.at(batch)
        assert costs.embedding.at(batch) + inner + costs.head.at(batch) == pytest.approx(whole)


def test_the_rate_is_of_the_tokens_between_two_reports() -> None:
    rate = SeenRate()
    stats = wire.Stats(
        running=2, paused=0, swapped=0, waiting=0, cells_used=0, saved_bytes=0, prompt_tokens=0, cached_tokens=0,
        completion_tokens=100, busy_s=0, python_share=0, iteration_s=0, iterations=0, preemptions=0,
    )  # fmt: skip
    assert rate.observe(1.0, stats, 2) == 0.0
    later = wire.Stats(**{name: getattr(stats, name) for name in stats.__struct_fields__} | {"completion_tokens": 150})
    assert rate.observe(3.0, later, 2) == 25.0
    assert rate.observe(4.0, later, 2) == 25.0, "no report since"
    assert rate.observe(5.0, later, 0) == 0.0
    assert rate.observe(5.0, None, 2) == 0.0


# --- the machine ------------------------------------------------------------------------------------------------------


def test_somebody_is_at_work_in_a_session_that_is_neither_idle_nor_locked() -> None:
    idle = "Class=user\nState=active\nIdleHint=yes\nLockedHint=no\n"
    locked = "Class=user\nState=active\nIdleHint=no\nLockedHint=yes\n"
    greeter = "Class=greeter\nState=active\nIdleHint=no\nLockedHint=no\n"
    closing = "Class=user\nState=closing\nIdleHint=no\nLockedHint=no\n"
    assert not is_somebody_active("\n".join((idle, locked, greeter, closing)))
    assert is_somebody_active("\n".join((idle, "Class=user\nState=online\nIdleHint=no\nLockedHint=no\n")))
    assert not is_somebody_active("")


@pytest.mark.skipif(sys.platform != "linux", reason="the times that a process waited are Linux' own")
def test_a_monitor_sees_what_a_process_got_and_forgets_one_that_has_gone() -> None:
    times = iter((1.0, 2.0))
    monitor = FleetMonitor(clock=lambda: next(times))
    own = psutil.Process().pid
    first = monitor.look({0: own, 1: 2**22 + 1})
    assert first.processes[0].rss_bytes > 0
    assert first.processes[0].cpu_got == 0.0
    assert 1 not in first.processes
    sum(range(2_000_000))
    second = monitor.look({0: own})
    assert 0 < second.processes[0].cpu_got <= second.processes[0].cpu_wanted
    assert 0 <= second.others_share <= 1
    assert second.memory_free_bytes <= second.memory_bytes


def test_what_is_shown_is_what_a_controller_takes() -> None:
    assert isinstance(seen_of(MOMENT, CALM), FleetSeen)
