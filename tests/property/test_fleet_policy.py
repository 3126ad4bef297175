"""The policy `measured` on random fleets: never worse, near the best there is, steady when the load comes and goes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet.figures import plan_steps
from benchmarks.fleet.grow import grow_paper
from disco_daemon.fleet.busiest import best_shares, least_load
from disco_daemon.fleet.control import (
    COOLDOWN_S,
    MINUTE_S,
    MOVES_PER_MINUTE,
    NO_REVERSAL_S,
    FleetController,
    FleetSeen,
    Grow,
    grow_measured,
)
from disco_daemon.fleet.costs import CostCurve, CostSample, ModuleCosts, fit_costs
from disco_daemon.fleet.forecast import FleetLoad, FleetModel
from disco_daemon.fleet.measured import LEAST_GAIN, next_steps
from disco_daemon.fleet.placement import CPU_SHARE, MEMORY_SHARE, FleetHost, ModelModules, Placement
from disco_daemon.fleet.reduction import FleetView, ReducedState
from disco_daemon.fleet.returning import returning
from disco_daemon.fleet.steps import BATCH_KINDS, FleetStep, StepKind

COSTS = ModuleCosts(
    CostCurve((1.0,), (1e-5,)),
    CostCurve((1, 4, 8, 16), (0.3e-3, 0.8e-3, 1.4e-3, 2.5e-3)),  # SmolLM2-135M, one thread, as the design measured it
    CostCurve((1, 4, 8, 16), (6e-3, 8e-3, 11e-3, 20e-3)),
    CostCurve((1.0,), (1e-4,)),
)


def random_fleet(seed: int, n_hosts: int, n_layers: int) -> FleetModel:
    """A fleet whose home has room for the model, with hosts of any speed, room and link."""
    random = np.random.default_rng(seed)
    layer = 10_000_000
    model = ModelModules((30_000_000, *[layer] * n_layers, 30_000_000), kv_bytes=2_000, row_bytes=4_096)
    whole = sum(model.weights)
    hosts = []
    for number in range(n_hosts):
        room = (whole if number == 0 else random.uniform(0, whole)) + random.uniform(1e6, 5e7)
        hosts.append(
            FleetHost(
                f"host{number}",
                float(random.uniform(0.3, 3.0)),
                room / MEMORY_SHARE,
                cpu_used=float(random.choice([0.0, 0.3])),
                delay_s=float(random.choice([1e-5, 1e-3])) if number else 0.0,
                bytes_per_s=float(random.choice([1e7, 1e9])),
            )
        )
    load = FleetLoad(float(random.integers(1, 65)), float(random.uniform(50, 400)))
    return FleetModel(tuple(hosts), model, COSTS, load, frozenset({0, n_layers + 1}))


# --- the busiest host -------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(1, 63), st.floats(0.01, 10), min_size=1, max_size=12),
    st.lists(st.floats(0.1, 5), min_size=6, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_shares_reach_the_least_load_there_is(work: dict[int, float], speeds: list[float]) -> None:
    shares = best_shares(work, speeds)
    loads = sum((shares[mask] * amount for mask, amount in work.items()), np.zeros(6)) / speeds
    assert max(loads) == pytest.approx(least_load(work, speeds), rel=1e-6)
    for mask, share in shares.items():
        assert share.sum() == pytest.approx(1)
        assert all(share[host] == 0 or mask >> host & 1 for host in range(6))


def test_the_least_load_is_that_of_the_linear_programme() -> None:
    # Host 0 alone can do 3, both can do 5: 4 each. With 6 for host 0 alone it is the busiest, with 6.
    assert least_load({0b01: 3.0, 0b11: 5.0}, [1.0, 1.0]) == pytest.approx(4.0)
    assert least_load({0b01: 6.0, 0b11: 5.0}, [1.0, 1.0]) == pytest.approx(6.0)
    many = {0b01: 1.0, 0b10: 1.0, 0b11: 1.0, 0b101: 1.0, 0b110: 1.0}  # more masks than hosts, and all sets are tried
    assert least_load(many, [1.0, 1.0, 2.0]) == least_load({**many, 0b111: 0.0}, [1.0, 1.0, 2.0])


def test_work_that_nobody_can_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="no host"):
        best_shares({0b10: 1.0}, [1.0, 0.0])
    with pytest.raises(ValueError, match="16 hosts"):
        least_load({1: 1.0}, [1.0] * 17)


# --- forecasts and plans ----------------------------------------------------------------------------------------------


def test_costs_are_fitted_to_measured_segments() -> None:
    samples = [
        CostSample(a, n, b, batch, 1e-4 + a * 2e-5 + n * 3e-4 * batch + b * 5e-3)
        for batch in (1, 8)
        for a, n, b in ((True, 10, False), (False, 10, False), (False, 20, False), (False, 10, True), (True, 30, True))
    ]
    costs = fit_costs(samples)
    assert costs.layer.at(1) == pytest.approx(3e-4)
    assert costs.layer.at(4.5) == pytest.approx(4.5 * 3e-4)
    assert costs.layer.at(16) == pytest.approx(16 * 3e-4)
    assert costs.head.at(1) == pytest.approx(5e-3)


def test_a_host_alone_is_as_fast_as_its_costs_say() -> None:
    fleet = random_fleet(1, 1, 30)
    fleet = replace(
        fleet, load=FleetLoad(1, 100), hosts=(replace(fleet.hosts[0], compute=1 / CPU_SHARE, cpu_used=0.0),)
    )
    found = fleet.forecast(Placement.at_home(32))
    assert found.tokens_per_s == pytest.approx(1 / (1e-5 + 30 * 0.3e-3 + 6e-3 + 1e-4))
    assert found.crossings == 0


def two_equal_hosts(n_sequences: float) -> FleetModel:
    fleet = random_fleet(1, 2, 30)
    hosts = tuple(
        replace(host, compute=1 / CPU_SHARE, cpu_used=0.0, delay_s=0.0, bytes_per_s=inf) for host in fleet.hosts
    )
    return replace(fleet, hosts=hosts, load=FleetLoad(n_sequences, 10), max_flights=2)


@given(st.integers(8, 22))
@settings(deadline=None)
def test_two_flights_take_as_long_as_mean_value_analysis_says_or_as_the_busier_host_needs(n_there: int) -> None:
    fleet = two_equal_hosts(64)  # of few sequences one flight is quicker
    found = fleet.forecast(Placement((1, *[1] * (30 - n_there), *[2] * n_there, 1)))
    home_s, there_s = found.busy / found.n_flights
    assert found.n_flights == 2
    alone_s = home_s + there_s
    # A flight finds the other one at a host as often as that is there when it is alone, and waits for half of its run.
    waits_s = alone_s + home_s / 2 * home_s / alone_s + there_s / 2 * there_s / alone_s
    assert found.round_s == pytest.approx(max(2 * home_s, 2 * there_s, waits_s))


def test_rows_that_go_on_at_the_same_host_with_other_layers_pass_home_and_wait_there() -> None:
    fleet = two_equal_hosts(2)
    straight = fleet.forecast(Placement((1, *[3] * 15, *[3] * 15, 1)))
    passing = fleet.forecast(Placement((1, *[3] * 15, *[2] * 15, 1)))
    there = fleet.forecast(Placement((1, *[2] * 30, 1)))
    assert there.crossings == 2
    assert passing.crossings > straight.crossings
    assert passing.tokens_per_s < straight.tokens_per_s


def test_one_answer_alone_gains_nothing_from_equal_hosts_and_stays_at_home() -> None:
    fleet = random_fleet(1, 3, 12)
    hosts = tuple(replace(host, compute=1.0, cpu_used=0.0) for host in fleet.hosts)
    assert next_steps(replace(fleet, hosts=hosts, load=FleetLoad(1, 100)), Placement.at_home(14)) == []


@given(st.integers(0, 100_000), st.integers(2, 6), st.integers(2, 24))
@settings(max_examples=20, deadline=None)
def test_a_plan_never_lowers_the_rate_and_respects_every_hosts_room(seed: int, n_hosts: int, n_layers: int) -> None:
    fleet, placement = random_fleet(seed, n_hosts, n_layers), Placement.at_home(n_layers + 2)
    rate = begin = fleet.forecast(placement).tokens_per_s
    end, steps = plan_steps(fleet, placement)
    for step in steps:
        placement = step.apply(placement)
        found = fleet.forecast(placement)
        assert found.tokens_per_s >= rate * (1 - 1e-6)
        rate = found.tokens_per_s
        for number, host in enumerate(fleet.hosts):
            assert placement.weights_on(number, fleet.model) <= MEMORY_SHARE * host.memory_bytes * (1 + 1e-9)
        assert all(placement.has(module, 0) for module in fleet.pinned)
    assert placement == end
    assert not steps or rate >= begin * (1 + LEAST_GAIN) * (1 - 1e-9)


def test_hosts_that_accept_nothing_get_nothing() -> None:
    for seed in range(5):
        fleet = random_fleet(seed, 3, 6)
        hosts = (fleet.hosts[0], *(replace(host, accepts=False) for host in fleet.hosts[1:]))
        assert plan_steps(replace(fleet, hosts=hosts), Placement.at_home(8))[1] == []


def best_rate(fleet: FleetModel) -> float:
    """The highest rate over all placements, tried one by one; of two mirror images, which are as fast, one is."""
    n_hosts, n = len(fleet.hosts), fleet.model.n_layers
    best = 0.0
    for masks in itertools.product(range(1, 1 << n_hosts), repeat=n):
        if masks > masks[::-1]:  # all layers cost the same, and every way begins and ends at home
            continue
        placement = Placement((1, *masks, 1))
        fits = all(placement.weights_on(h, fleet.model) <= host.room_bytes for h, host in enumerate(fleet.hosts))
        if fits:
            best = max(best, fleet.forecast(placement).tokens_per_s)
    return best


SHAPES = ((2, 2), (2, 3), (2, 4), (3, 2), (2, 2), (2, 3), (2, 4), (3, 2), (2, 3), (3, 3))  # hosts and free layers


def ratios_to_best(seeds: range) -> list[float]:
    """The rate of the policy's plan / the best one's, on instances that are small enough to try everything."""
    found = []
    for seed in seeds:
        n_hosts, n_layers = SHAPES[seed % len(SHAPES)]
        fleet = random_fleet(seed, n_hosts, n_layers)
        end, _ = plan_steps(fleet, Placement.at_home(n_layers + 2))
        found.append(fleet.forecast(end).tokens_per_s / best_rate(fleet))
    return found


def test_plans_are_within_five_percent_of_the_best_placement() -> None:
    assert min(ratios_to_best(range(25))) >= 0.95


@pytest.mark.slow
def test_plans_of_500_fleets_are_within_five_percent_of_the_best_placement() -> None:
    """The first ones are those above."""
    assert min(ratios_to_best(range(25, 500))) >= 0.95


# --- the controller ---------------------------------------------------------------------------------------------------


class Played:
    """A fleet whose load a test sets, one report a second; steps are done at once."""

    def __init__(self, grow: Grow = grow_measured, n_layers: int = 6) -> None:
        fleet = random_fleet(4, 3, n_layers)
        whole = sum(fleet.model.weights)
        hosts = [
            FleetHost(f"h{n}", 1.0, (1.5 if n == 0 else 0.6) * whole / MEMORY_SHARE, delay_s=1e-5) for n in range(3)
        ]
        self.fleet = replace(fleet, hosts=tuple(hosts))
        self.controller = FleetController(grow)
        self.state = ReducedState(Placement.at_home(n_layers + 2), 64)
        self.now, self.may_scale = 0.0, True

    def play(self, seconds: int, n_sequences: float, other_memory: float = 0.0) -> None:
        """Let readers want so many answers at a time; an answer is late where the fleet has not 3 token/s for each."""
        for _ in range(seconds):
            self.now += 1.0
            home = self.fleet.hosts[0]
            hosts = (replace(home, memory_used_bytes=other_memory * home.memory_bytes), *self.fleet.hosts[1:])
            fleet = replace(self.fleet, hosts=hosts, load=FleetLoad(max(1.0, n_sequences), 100))
            found = fleet.forecast(self.state.placement)
            rate = found.tokens_per_s
            used = min(1.0, 3.0 * n_sequences / rate) if rate else 1.0
            cpu = tuple(float(min(1.0, used * b / found.round_s)) if rate else 0.0 for b in found.busy)
            memory = tuple(
                self.state.placement.weights_on(h, fleet.model) / host.memory_bytes
                + host.memory_used_bytes / host.memory_bytes
                for h, host in enumerate(hosts)
            )
            late = min(n_sequences, self.state.batch) * 3.0 > rate or self.state.batch < n_sequences / 2
            seen = FleetSeen(fleet, self.state, 64, cpu, memory, 4, 4 if late else 0, min(rate, 3.0 * n_sequences))
            for step in self.controller.decide(self.now, seen, may_scale=self.may_scale):
                self.state = self.state.after(step)


def reverses(step: FleetStep, other: FleetStep) -> bool:
    """Whether a step undoes a part of another."""
    if step.kind in BATCH_KINDS or other.kind in BATCH_KINDS:
        return {step.kind, other.kind} == {StepKind.LOWER_BATCH, StepKind.RAISE_BATCH}
    shared = max(step.first, other.first) < min(step.last, other.last)
    takes_back = step.source is not None and step.source == other.target
    brings_back = step.target is not None and step.target == other.source
    return shared and (takes_back or brings_back)


@pytest.mark.parametrize(("grow", "period_s"), [(grow_measured, 40), (grow_measured, 150), (grow_paper, 60)])
def test_a_load_that_comes_and_goes_makes_no_fleet_swing(grow: Grow, period_s: int) -> None:
    played = Played(grow)
    for _ in range(600 // period_s):
        played.play(period_s // 2, 60)
        played.play(period_s // 2, 2)
    records = list(played.controller.records)
    undone = 0
    for i, record in enumerate(records):
        reversed_at = [before.at_s for before in records[:i] if reverses(record.step, before.step)]
        assert all(record.at_s - at_s >= NO_REVERSAL_S for at_s in reversed_at)
        undone += bool(reversed_at)
        soon = [r for r in records[: i + 1] if r.at_s > record.at_s - MINUTE_S and r.step.kind not in BATCH_KINDS]
        assert len(soon) <= MOVES_PER_MINUTE
    assert undone <= 4, [record.step for record in records]  # each next one waits twice as long
    assert all(b.at_s - a.at_s >= COOLDOWN_S for a, b in itertools.pairwise(records))


def test_a_vacant_fleet_grows_and_says_what_it_expected_and_what_came_of_it() -> None:
    played = Played()
    before = played.fleet.forecast(played.state.placement).tokens_per_s
    played.play(120, 30)
    records = list(played.controller.records)
    assert records
    assert all(record.step.predicted >= 1 + LEAST_GAIN for record in records if record.step.kind not in BATCH_KINDS)
    assert records[0].measured is not None
    assert played.fleet.forecast(played.state.placement).tokens_per_s > before


def test_hosts_that_are_vacant_for_a_moment_get_nothing() -> None:
    played = Played()
    played.play(8, 5)
    assert not played.controller.records


def test_a_host_without_memory_gives_way_and_gets_its_batch_back_afterwards() -> None:
    played = Played(grow_paper)
    played.fleet = replace(played.fleet, hosts=tuple(replace(h, accepts=False) for h in played.fleet.hosts))
    played.play(120, 60, other_memory=0.5)
    assert played.state.batch < 64
    assert StepKind.LOWER_BATCH in {record.step.kind for record in played.controller.records}
    played.play(1500, 1)
    assert played.state.batch == 64
    assert not played.state.offloaded


@pytest.mark.parametrize("may_scale", [True, False])
def test_a_reduction_is_taken_back_also_where_nothing_may_be_scaled(may_scale: bool) -> None:
    """Else fewer answers would run for ever in a fleet that is paused, or in the mode `manual` by now."""
    played = Played(grow_paper)
    played.fleet = replace(played.fleet, hosts=tuple(replace(h, accepts=False) for h in played.fleet.hosts))
    played.play(120, 60, other_memory=0.5)
    assert played.state.batch < 64
    assert played.state.offloaded
    n_before, played.may_scale = len(played.controller.records), may_scale
    played.play(30, 60, other_memory=0.5)
    if not may_scale:
        assert len(played.controller.records) == n_before, "not while answers are late"
    played.play(1500, 1)
    assert (played.state.batch, played.state.offloaded) == (64, False)


@pytest.mark.parametrize("grow", [grow_measured, grow_paper])
def test_a_host_that_loses_its_memory_hands_layers_over_before_anything_is_lowered(grow: Grow) -> None:
    played = Played(grow)
    hosts = tuple(replace(host, memory_bytes=1.2 * sum(played.fleet.model.weights)) for host in played.fleet.hosts)
    played.fleet = replace(played.fleet, hosts=hosts)
    played.play(40, 60, other_memory=0.3)
    kinds = [record.step.kind for record in played.controller.records]
    assert kinds
    assert kinds[0] in (StepKind.MOVE, StepKind.REPLICATE, StepKind.EVICT)
    freed = [record.step for record in played.controller.records if record.step.source == 0]
    assert freed, "nothing left the host that is short"
    assert played.state.placement.weights_on(0, played.fleet.model) < sum(played.fleet.model.weights)


def test_without_late_answers_a_short_host_is_left_alone_and_too_few_answers_say_nothing() -> None:
    controller, fleet = FleetController(), random_fleet(1, 2, 4)
    state = ReducedState(Placement.at_home(6), 8)
    for now in range(20):
        seen = FleetSeen(fleet, state, 8, (0.99, 0.95), (0.5, 0.5), n_answers=0, n_violating=0)
        assert controller.decide(float(now), seen) == []
    few = FleetSeen(fleet, state, 8, (0.99, 0.95), (0.5, 0.5), n_answers=7, n_violating=7)
    assert controller.decide(20.0, few) == []
    assert controller.violating_share() == 0.0


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(2, 12), st.sampled_from(["leave", "less"]))
@settings(max_examples=50, deadline=None)
def test_what_left_a_host_comes_back_once_and_only_when_it_may(
    seed: int, n_hosts: int, n_layers: int, wish: str
) -> None:
    """As where layers lie by hand: a host is drained, or has less memory for a while."""
    random = np.random.default_rng(seed)
    fleet = random_fleet(seed, n_hosts, n_layers)
    room = 2.0 * sum(fleet.model.weights) / MEMORY_SHARE
    fleet = replace(fleet, hosts=tuple(replace(host, memory_bytes=room) for host in fleet.hosts))
    inner = tuple(1 << int(random.integers(0, n_hosts)) for _ in range(n_layers))
    placed = Placement((1, *inner, 1))
    host = int(random.integers(1, n_hosts))
    state, controller = ReducedState(placed, 8), FleetController()
    none = tuple([0.0] * n_hosts)

    def look(now: float, *, is_kept_away: bool) -> None:
        nonlocal state
        left = replace(fleet.hosts[host], accepts=False)
        hosts = tuple(left if number == host and is_kept_away else one for number, one in enumerate(fleet.hosts))
        there = state.placement.weights_on(host, fleet.model) if is_kept_away else 0.0
        excess = tuple(there if number == host and wish == "less" else 0.0 for number in range(n_hosts))
        leaving = frozenset({host} if is_kept_away and wish == "leave" else ())
        seen = FleetSeen(replace(fleet, hosts=hosts), state, 8, none, none, leaving=leaving, excess=excess)
        for step in controller.decide(now, seen, may_scale=False, placed=placed):
            state = state.after(step)

    for now in range(100):
        look(now, is_kept_away=True)
    assert not state.placement.on(host)
    n_steps = len(controller.records)
    for now in range(100, 100 + int(3 * MINUTE_S)):
        look(now, is_kept_away=False)
        assert all(state.placement.masks), "nothing is nowhere"
    assert state.placement == placed
    assert len(controller.records) - n_steps <= max(n_steps, n_layers)
    n_steps = len(controller.records)
    for now in range(1000, 1100):
        look(now, is_kept_away=False)
    assert len(controller.records) == n_steps, "what lies where it belongs stays there"


def test_of_what_has_not_room_enough_the_beginning_comes_back_and_replicas_as_well() -> None:
    fleet = random_fleet(1, 3, 6)
    layer = fleet.model.weights[1]
    small = replace(fleet.hosts[1], memory_bytes=2.5 * layer / MEMORY_SHARE, memory_share=MEMORY_SHARE)
    large = replace(fleet.hosts[2], memory_bytes=20.0 * layer / MEMORY_SHARE)
    view = FleetView((fleet.hosts[0], small, large), fleet.model, lambda _: [0.0])
    placed = Placement((1, 2, 2, 2, 6, 1, 1, 1))
    state = ReducedState(Placement((1, 1, 1, 1, 1, 1, 4, 1)), 8)
    steps = list(returning(state, placed, view))
    assert [(s.kind, s.first, s.last, s.source, s.target) for s in steps] == [
        (StepKind.MOVE, 1, 3, 0, 1),
        (StepKind.MOVE, 6, 7, 2, 0),
    ]
    state = ReducedState(Placement((1, 2, 2, 2, 2, 5, 1, 1)), 8)
    steps = list(returning(state, placed, view))
    assert [(s.kind, s.first, s.last, s.source, s.target) for s in steps] == [
        (StepKind.REPLICATE, 4, 5, None, 2),
        (StepKind.EVICT, 5, 6, 2, None),
    ]
