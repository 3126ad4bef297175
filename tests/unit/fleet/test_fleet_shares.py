"""What a plan expects of replicas is what the engine is told to do: which share of the sequences each of them gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.fleet.control import FleetController
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.steps import FleetStep, StepKind
from disco_daemon.machines.fleet.layer_files import differ
from disco_daemon.machines.fleet.observations import FleetMoment, seen_of
from disco_daemon.machines.fleet.operator import SHARES_S
from disco_daemon.machines.fleet.range_costs import condensed
from tests.unit.machines.test_fleet_elsewhere import Places, operator_of
from tests.unit.machines.test_fleet_seen import CALM, GIVEN, MODEL, MOMENT

SMALL = replace(GIVEN, model=replace(MODEL, weights=(*MODEL.weights[:9], MODEL.weights[-1])))
ALONE, BOTH = (PlacedRange(1, 5, (1,)),), (PlacedRange(1, 5, (0, 1)),)
REPLICATE = FleetStep(StepKind.REPLICATE, 1, 5, None, 0)  # modules 1 to 4 are the layers 1 to 4


def moment(inner: tuple[PlacedRange, ...]) -> FleetMoment:
    layout = FleetLayout(8, inner)
    return replace(MOMENT, layout=layout, given=SMALL, costs=condensed(SMALL.costs, layout))


def shares_of(ranges: tuple[wire.RangeFile, ...]) -> list[tuple[float, ...]]:
    return [one.shares for one in ranges if len(one.hosts) > 1]


def test_the_busier_host_of_a_range_gets_fewer_sequences() -> None:
    seen = seen_of(moment(BOTH), CALM)
    expected = seen.fleet.forecast(FleetLayout(8, BOTH).placement)
    [(home, host)] = FleetLayout(8, BOTH).shares(expected.shares)
    assert home + host == pytest.approx(1.0, abs=0.002)
    assert home < host, "home has embedding and head besides"
    assert FleetLayout(8, ALONE).shares(expected.shares) == ((),)


async def test_a_replica_comes_with_the_shares_that_its_forecast_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places()
    places.fetched.set()
    operator, moved = operator_of(tmp_path, places, monkeypatch)
    report = await operator._move(REPLICATE, seen_of(moment(ALONE), CALM))
    assert report.error == ""
    expected = seen_of(moment(BOTH), CALM).fleet.forecast(FleetLayout(8, BOTH).placement)
    assert shares_of(moved.ranges[0]) == [*FleetLayout(8, BOTH).shares(expected.shares)]


async def test_shares_that_have_become_wrong_are_others_from_then_on_and_layers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, moved = operator_of(tmp_path, Places(), monkeypatch)
    await operator._share(0.0, seen_of(moment(ALONE), CALM))
    assert moved.ranges == [], "there are no replicas"
    operator._layers.layout = FleetLayout(8, BOTH)
    calm, busy = seen_of(moment(BOTH), CALM), seen_of(moment(BOTH), CALM)
    hosts = (busy.fleet.hosts[0], replace(busy.fleet.hosts[1], cpu_used=0.7), *busy.fleet.hosts[2:])
    busy = replace(busy, fleet=replace(busy.fleet, hosts=hosts))
    for now, seen in ((0.0, calm), (SHARES_S / 2, busy), (SHARES_S, calm), (2 * SHARES_S, busy), (3 * SHARES_S, busy)):
        await operator._share(now, seen)
    before, after = map(shares_of, moved.ranges)
    assert after[0][1] < before[0][1], "the host whose owner takes most of it gets fewer"
    assert {tuple((one.first, one.last, one.hosts) for one in ranges) for ranges in moved.ranges} == {
        ((0, 1, (0,)), (1, 5, (0, 1)), (5, 8, (0,)))
    }
    assert operator.steps.n_moves == 0


def test_plans_and_shares_are_for_the_busiest_load_of_late() -> None:
    controller, seen = FleetController(), seen_of(moment(BOTH), CALM)
    assert controller.at_peak(seen.fleet) == seen.fleet
    controller.decide(0.0, seen, may_scale=False)
    idle = replace(seen.fleet, load=replace(seen.fleet.load, n_sequences=1.0))
    assert controller.at_peak(idle) == seen.fleet


def test_shares_of_other_ranges_differ_and_a_little_is_no_difference() -> None:
    one = ((), (0.5, 0.5))
    assert not differ(one, ((), (0.45, 0.55)), 0.1)
    assert differ(one, ((), (0.3, 0.7)), 0.1)
    assert differ(one, ((0.5, 0.5), ()), 0.1)
    assert not differ((), (), 0.1)


def test_shares_are_those_of_a_range_s_modules() -> None:
    layout = FleetLayout(8, (PlacedRange(1, 3, (0, 2)), PlacedRange(3, 5, (1,)), PlacedRange(5, 7, (0, 1, 2))))
    rows = np.zeros((len(layout.placement.masks), 3))
    rows[1:3], rows[3:5], rows[5:7] = (0.25, 0.0, 0.75), (0.0, 1.0, 0.0), (0.2, 0.2, 0.6)
    assert layout.shares(rows) == ((0.25, 0.75), (), (0.2, 0.2, 0.6))
