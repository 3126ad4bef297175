"""A host that has no room for old and new ranges at a time hands the old ones to home first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.fleet.forecast import FleetModel
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.machines.fleet.interim_layout import detour, fitting
from disco_daemon.machines.fleet.observations import seen_of
from tests.unit.machines.test_fleet_seen import CALM, LAYER_BYTES, LAYOUT, MOMENT

SEGMENT = 1e6
FLEET = seen_of(MOMENT, CALM).fleet
LESS = FleetLayout(30, (PlacedRange(5, 12, (1,)), PlacedRange(12, 16, (2,)), PlacedRange(16, 22, (0,))))


def with_room(home: float, *hosts: float) -> FleetModel:
    """The fleet in which home and hosts may have so many layers."""
    rooms = (
        home * LAYER_BYTES + sum(FLEET.model.weights[m] for m in (0, FLEET.model.head)),
        *(n * LAYER_BYTES for n in hosts),
    )
    given = zip(FLEET.hosts, rooms, strict=True)
    return replace(FLEET, hosts=tuple(replace(host, memory_bytes=room, memory_share=1.0) for host, room in given))


def test_a_host_that_is_short_has_none_of_the_layers_before_it_gets_a_part_back() -> None:
    between = detour(LAYOUT, LESS, with_room(20, 7, 4), SEGMENT)
    assert between is not None
    assert (between.on(1), between.on(2)) == (LAYOUT.on(1), [])
    assert between.inner[-1] == PlacedRange(12, 22, (0,))


def test_where_there_is_room_beside_or_where_home_has_none_it_goes_straight() -> None:
    assert detour(LAYOUT, LESS, with_room(20, 7, 15), SEGMENT) is None, "10 layers, and 4 beside"
    assert detour(LAYOUT, LESS, with_room(9, 7, 4), SEGMENT) is None
    assert detour(LAYOUT, LAYOUT, with_room(20, 7, 4), SEGMENT) is None


def test_a_host_that_gets_more_gives_up_what_it_has_if_both_is_too_much() -> None:
    assert detour(LESS, LAYOUT, with_room(20, 7, 14.5), SEGMENT) is None
    between = detour(LESS, LAYOUT, with_room(20, 7, 13), SEGMENT)
    assert between is not None
    assert between.inner == (PlacedRange(5, 12, (1,)), PlacedRange(12, 22, (0,)))


def test_what_another_host_has_as_well_is_not_copied_home() -> None:
    both = FleetLayout(30, (PlacedRange(5, 12, (1,)), PlacedRange(12, 22, (1, 2))))
    coming = FleetLayout(30, (PlacedRange(5, 12, (1,)), PlacedRange(12, 16, (1, 2)), PlacedRange(16, 22, (1,))))
    between = detour(both, coming, with_room(20, 40, 4), SEGMENT)
    assert between is not None
    assert (between.on(2), between.parallelism) == ([], [1] * 30)


def test_what_has_no_room_any_more_stays_at_home() -> None:
    between = FleetLayout(30, (PlacedRange(5, 12, (1,)), PlacedRange(12, 22, (0,))))
    assert fitting(between, LESS, with_room(20, 7, 4)) == LESS
    less = fitting(between, LESS, with_room(20, 7, 2.5))
    assert less.inner == (PlacedRange(5, 12, (1,)), PlacedRange(12, 14, (2,)), PlacedRange(14, 22, (0,)))
    assert fitting(between, LESS, with_room(20, 1, 0.5)) == between, "what did not leave is no part of it"


masks = st.lists(st.integers(1, 7), min_size=17, max_size=17)


@given(masks, masks, st.tuples(st.floats(0, 40), st.floats(0, 20), st.floats(0, 20)))
def test_no_layer_is_lost_on_the_way_and_nothing_is_loaded_at_a_short_host(
    before: list[int], after: list[int], rooms: tuple[float, float, float]
) -> None:
    present, coming = (LAYOUT.after(replace(LAYOUT.placement, masks=(1, *m, 1))) for m in (before, after))
    fleet = with_room(*rooms)
    between = detour(present, coming, fleet, SEGMENT)
    if between is None:
        return
    assert min(between.parallelism) >= 1
    assert between.placement.weights_on(0, fleet.model) <= fleet.hosts[0].room_bytes * (1 + 1e-9)
    for host in (1, 2):
        there = {layer for layers in between.on(host) for layer in range(layers.first, layers.last)}
        had = {layer for layers in present.on(host) for layer in range(layers.first, layers.last)}
        assert there <= had
