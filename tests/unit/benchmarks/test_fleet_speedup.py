"""The paper's model of a fleet and its two algorithms, on instances that can be reckoned by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet.grow import (
    equal_hosts_objective,
    join_steps,
    n_replicas_that_fit,
    scale_up,
    sort_by_continuity,
    unequal_hosts_objective,
)
from benchmarks.fleet.speedup import equal_hosts_speedup, overhead, speedup, split_evenly
from disco_daemon.fleet.placement import FleetHost, ModelModules, Placement, runs
from disco_daemon.fleet.reduction import (
    BATCH_STEP,
    FleetView,
    ReducedState,
    filter_modules,
    reductions,
    undo_reduction,
)
from disco_daemon.fleet.steps import BATCH_KINDS, FleetStep, Pressure, StepKind

MODEL = ModelModules((100, *[10] * 8, 100), kv_bytes=1, row_bytes=4)
HOME, SECOND, THIRD = (FleetHost(name, 1.0, 1000.0 / 0.85) for name in ("home", "second", "third"))


def small(name: str, room: float, *, accepts: bool = True) -> FleetHost:
    return FleetHost(name, 1.0, room / 0.85, accepts=accepts)


# --- Equations 1 to 4 -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=80),
    *[st.floats(0.1, 1e4) for _ in range(4)],
    st.floats(0.0, 10.0),
)
def test_both_forms_of_the_speedup_agree_on_equal_hosts(
    parallelism: list[int], batch: float, compute: float, bandwidth: float, width: float, transitions: float
) -> None:
    begin = split_evenly([1] * len(parallelism), batch, compute, bandwidth)
    layers = split_evenly(parallelism, batch, compute, bandwidth)
    general = speedup(begin, layers, width, 17.0, transitions)
    gamma = overhead(transitions, compute, width, bandwidth)
    assert general == pytest.approx(equal_hosts_speedup(parallelism, gamma), rel=1e-12)


def test_the_papers_own_settings_give_these_speedups() -> None:
    for n_layers, degree, expected in ((15, 2, 1.2308), (20, 2, 1.3333), (25, 2, 1.4545), (30, 2, 1.6), (20, 4, 1.6)):
        parallelism = [degree] * n_layers + [1] * (40 - n_layers)
        assert equal_hosts_speedup(parallelism, 0.0) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.floats(0, 0.99), st.data())
def test_a_replica_never_lowers_the_printed_speedup(parallelism: list[int], gamma: float, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(parallelism) - 1))
    more = [p + (i == at) for i, p in enumerate(parallelism)]
    assert equal_hosts_speedup(more, gamma) > equal_hosts_speedup(parallelism, gamma)


def test_the_printed_speedup_does_not_know_which_layers_are_replicated() -> None:
    in_one_run, scattered = [2, 2, 2, 1, 1, 1], [2, 1, 2, 1, 2, 1]
    assert equal_hosts_speedup(in_one_run, 0.3) == equal_hosts_speedup(scattered, 0.3)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def test_candidates_are_sorted_by_the_longest_run_then_by_index() -> None:
    placement = Placement.at_home(10).add((3, 7), 1)  # the second host lacks 1-2, 4-6 and 8
    assert sort_by_continuity(placement, 1, 99) == [4, 5, 6, 1, 2, 8]
    assert sort_by_continuity(placement, 1, 4) == [4, 5, 6, 1]


def test_a_host_gets_as_many_layers_as_memory_and_compute_allow() -> None:
    hosts, placement = [HOME, small("b", 35)], Placement.at_home(10)
    assert n_replicas_that_fit(1, hosts, placement, MODEL) == 3
    assert n_replicas_that_fit(1, hosts, placement, MODEL, layer_compute=0.35) == 2
    assert n_replicas_that_fit(1, hosts, placement.add((1, 2, 3), 1), MODEL) == 0


def test_scale_up_fills_every_host_since_the_printed_speedup_always_rises() -> None:
    hosts = [HOME, small("b", 35), small("c", 25)]
    placement, steps = scale_up(Placement.at_home(10), hosts, MODEL, equal_hosts_objective(0.2), [1, 2])
    assert placement.parallelism == (1, 3, 3, 2, 1, 1, 1, 1, 1, 1)
    assert [(s.first, s.last, s.target) for s in join_steps(steps)] == [(1, 4, 1), (1, 3, 2)]
    assert all(step.predicted > 1 for step in steps)


def test_on_unequal_hosts_a_layer_is_taken_only_if_the_general_speedup_rises() -> None:
    fast, behind_a_slow_link = FleetHost("b", 1.0, 1e4), FleetHost("c", 1.0, 1e4, bytes_per_s=1e-6)
    for other, n_expected in ((fast, 8), (behind_a_slow_link, 0)):
        objective = unequal_hosts_objective([HOME, other], batch=16, width=8, length=1, transitions=2)
        _, steps = scale_up(Placement.at_home(10), [HOME, other], MODEL, objective, [1])
        assert len(steps) == n_expected


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def scale_down(
    state: ReducedState,
    source: int,
    pressure: Pressure,
    view: FleetView,
    is_violating: Callable[[ReducedState], bool],
) -> tuple[ReducedState, list[FleetStep]]:
    """Run Algorithm 2 to its end: the steps it takes until `is_violating` is false, and the state they lead to."""
    steps = []
    for step in reductions(state, source, pressure, view, state.batch):
        if not is_violating(state):
            break
        steps.append(step)
        state = state.after(step)
    return state, steps


def layers_on(placement: Placement) -> list[float]:
    return [float(len(placement.on(host))) for host in range(3)]


VIEW = FleetView((HOME, SECOND, THIRD), MODEL, layers_on)


def test_the_phases_follow_each_other_until_the_violation_ends() -> None:
    begin = ReducedState(Placement.at_home(10).add((1, 2), 1), batch=12)
    state, steps = scale_down(begin, 0, Pressure.MEMORY, VIEW, lambda _: True)
    kinds = [step.kind for step in steps]
    assert kinds == [
        StepKind.MOVE,
        StepKind.EVICT,
        StepKind.LOWER_BATCH,
        StepKind.OFFLOAD,
        StepKind.LOWER_BATCH,
        StepKind.LOWER_BATCH,
    ]
    assert (state.batch, state.offloaded) == (1, True)  # mended: it stops at 1, and is returned
    assert all(mask for mask in state.placement.masks)
    for n in range(len(steps)):
        taken = iter([*[True] * n, False])
        _, fewer = scale_down(begin, 0, Pressure.MEMORY, VIEW, lambda _, taken=taken: next(taken))  # type: ignore[misc]
        assert fewer == steps[:n]


def test_the_first_step_of_each_state_is_the_next_one() -> None:
    """A controller takes one step, waits, and asks anew."""
    begin = state = ReducedState(Placement.at_home(10).add((1, 2), 1), batch=12)
    _, all_at_once = scale_down(begin, 0, Pressure.MEMORY, VIEW, lambda _: True)
    one_by_one = list[FleetStep]()
    while step := next(reductions(state, 0, Pressure.MEMORY, VIEW, begin.batch), None):
        if step.kind in BATCH_KINDS:
            one_by_one.append(step)
        state = state.after(step)
    assert one_by_one == [step for step in all_at_once if step.kind in BATCH_KINDS]
    assert StepKind.OFFLOAD in {step.kind for step in one_by_one}


def test_the_batch_that_ends_the_violation_is_returned() -> None:
    begin = ReducedState(Placement.at_home(10), batch=20)
    view = FleetView((HOME,), MODEL, layers_on)
    state, _ = scale_down(begin, 0, Pressure.COMPUTE, view, lambda s: s.batch > 20 - BATCH_STEP)
    assert state.batch == 20 - BATCH_STEP


def test_short_memory_moves_fewer_layers_at_a_time_than_short_compute() -> None:
    state = ReducedState(Placement.at_home(10), 8)
    assert [len(run) for run in filter_modules(state, 0, Pressure.COMPUTE, VIEW)] == [4]
    assert [len(run) for run in filter_modules(state, 0, Pressure.MEMORY, VIEW)] == [2]


def test_modules_go_to_the_host_that_leaves_the_busiest_least_busy_and_to_none_that_is_closed_or_full() -> None:
    begin = ReducedState(Placement.at_home(10).add((8,), 1), batch=5)
    for second, third, target in (
        (SECOND, THIRD, 2),
        (SECOND, small("c", 5), 1),
        (SECOND, small("c", 99, accepts=False), 1),
    ):
        view = FleetView((HOME, second, third), MODEL, lambda p: layers_on(p)[1:])
        _, steps = scale_down(begin, 0, Pressure.MEMORY, view, lambda s: s == begin)
        assert (steps[0].kind, steps[0].target) == (StepKind.MOVE, target)


def test_a_reduction_is_taken_back_step_by_step() -> None:
    state, limits = ReducedState(Placement.at_home(10), batch=1, offloaded=True), []
    while step := undo_reduction(state, full_batch=12):
        state = state.after(step)
        limits.append(state.batch)
    assert limits == [6, 11, 12]
    assert not state.offloaded


# --- values -----------------------------------------------------------------------------------------------------------


def test_the_last_replica_of_a_module_cannot_be_evicted() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Placement.at_home(3).evict((1,), 0)


@given(st.sets(st.integers(0, 30)))
def test_runs_are_all_the_numbers_in_order_and_never_touch(numbers: set[int]) -> None:
    found = list(runs(sorted(numbers)))
    assert [n for run in found for n in run] == sorted(numbers)
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))
