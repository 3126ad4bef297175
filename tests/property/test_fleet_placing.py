"""New sequences go to replicas by shares, so that a forecast by these shares is about what is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.hosts.joining_legs import JoiningLeg
from disco_daemon.engine.hosts.legs import Leg
from disco_daemon.engine.hosts.placing import RECENT, SequencesAtWork, next_flight, next_replica
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.serve.home import ends_of
from disco_daemon.engine.wire import FLIGHTS
from disco_daemon.types import LayerRange

LAYERS = LayerRange(5, 15, 30)
ROUNDING = 1e-9  # of a number of sequences
SHARES = st.lists(st.integers(0, 20), min_size=2, max_size=5).filter(any).map(lambda found: [n / 20 for n in found])


def replica() -> Any:
    """A replica that takes whatever comes."""
    return SimpleNamespace(send=lambda *_: None, forget=lambda *_: None, clear=lambda: None)


def leg(*shares: float, n: int = 2) -> Leg:
    return Leg(LAYERS, [replica() for _ in range(n)], shares)


def counts(leg: Leg) -> list[int]:
    return [list(leg.pins.values()).count(one) for one in leg.replicas]


@settings(max_examples=60)
@given(shares=SHARES, n=st.integers(1, 40))
def test_each_replica_has_its_share_within_one_sequence_however_many_come(shares: list[float], n: int) -> None:
    found, total = [0] * len(shares), sum(shares)
    for number in range(1, n + 1):
        found[next_replica(shares, found)] += 1
        assert all(abs(one - number * share / total) < 1 + ROUNDING for one, share in zip(found, shares, strict=True))
    assert all(one == 0 for one, share in zip(found, shares, strict=True) if share == 0)


@settings(max_examples=60)
@given(shares=SHARES, data=st.data())
def test_no_replica_beyond_its_share_gets_another_one_also_where_sequences_end(
    shares: list[float], data: st.DataObject
) -> None:
    found = data.draw(st.lists(st.integers(0, 9), min_size=len(shares), max_size=len(shares)))
    at = next_replica(shares, found)
    assert found[at] < (sum(found) + 1) * shares[at] / sum(shares)


def test_without_shares_the_replica_with_the_fewest_is_the_next() -> None:
    assert [next_replica((), found) for found in ([0, 0], [1, 0], [3, 3, 2])] == [0, 1, 2]
    with pytest.raises(ValueError, match="2 shares for 3 replicas"):
        next_replica((0.5, 0.5), [0, 0, 0])


def test_the_sequences_of_a_flight_are_shared_and_what_is_at_rest_does_not_count() -> None:
    one = leg(0.75, 0.25)
    places = [(0, seq) for seq in range(8)]
    one.send(0, places, np.zeros((8, 2), np.float32))
    assert counts(one) == [6, 2]
    for flight in range(1, RECENT + 1):  # only the last two go on: the others' prefixes are kept
        one.send(flight, [(flight, seq) for seq in (6, 7)], np.zeros((2, 2), np.float32))
    there = [one.replicas.index(one.place(seq)) for seq in range(6, 14)]
    assert there.count(1) == 2, "six more: two of the eight that are drawn are at the second one"
    one.forget(6, 0)
    assert 6 not in one.pins
    one.clear()
    one.send(99, places, np.zeros((8, 2), np.float32))
    assert counts(one) == [6, 2]


def test_sequences_that_move_are_shared_with_those_that_stay() -> None:
    stays, goes, comes = replica(), replica(), replica()
    twin = Leg(LAYERS, [stays, goes])
    twin.pins = dict.fromkeys(range(3), stays) | dict.fromkeys(range(3, 8), goes)
    joining = JoiningLeg(Leg(LAYERS, [stays, comes], (0.5, 0.5)), twin)
    for seq in range(3, 8):
        joining.leg.place(seq)
    joining.take_over()
    assert counts(joining.leg) == [4, 4]


def test_a_sequence_without_rows_yet_is_at_work_and_one_without_rows_of_late_is_not() -> None:
    work = SequencesAtWork()
    work.observe(3, [1, 2])
    work.observe(3 + RECENT, [2])
    assert [seq in work for seq in (1, 2, 7)] == [False, True, True]
    work.forget(1)
    assert 1 in work


@settings(max_examples=80)
@given(routes=st.lists(st.tuples(st.integers(0, 2)), min_size=1, max_size=12), data=st.data())
def test_flights_become_alike_and_nobody_is_left_behind(routes: list[tuple[int]], data: st.DataObject) -> None:
    n = len(routes)
    first = set(data.draw(st.lists(st.integers(0, n - 1), max_size=n)))
    flights = [one for one in (first, set(range(n)) - first) if one]  # as they were before there were replicas
    departed = list[list[int]]()
    for _ in range(24):
        if len(flights) == FLIGHTS:
            flights.pop(0)
        here = [not any(number in flight for flight in flights) for number in range(n)]
        if found := next_flight(routes, here, FLIGHTS):
            departed.append(found)
            flights.append(set(found))
        else:
            flights.pop(0)
    settled = departed[-6:]
    assert all(len(flight) <= -(-n // FLIGHTS) for flight in settled)
    assert all(n_drawn >= 2 for n_drawn in (sum(number in flight for flight in settled) for number in range(n)))
    mixed = [flight for flight in settled[-2:] if len({routes[number] for number in flight}) > 1]
    assert len(mixed) <= max(0, len(set(routes)) - 1)
    assert departed.count([]) == 0


def test_a_leg_knows_the_route_of_a_sequence_and_one_that_is_nowhere_comes_last() -> None:
    one = leg(0.5, 0.5)
    one.pins = {3: one.replicas[1], 4: one.replicas[0]}
    assert [one.replica_of(seq) for seq in (3, 4, 9)] == [1, 0, 2]


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.5, 0.0), (-0.5, 1.5), (0.0, 0.0)])
def test_shares_that_are_not_those_of_a_ranges_hosts_are_refused(shares: tuple[float, ...]) -> None:
    def part(first: int, last: int, *hosts: int, shares: tuple[float, ...] = ()) -> wire.RangeFile:
        return wire.RangeFile(path="m.gguf", first=first, last=last, of=30, hosts=hosts, shares=shares)

    good = ends_of((part(0, 5), part(5, 15, 0, 1, shares=(0.4, 0.6)), part(15, 20, 1), part(20, 30)))
    assert [plan.shares for plan in good.legs] == [(0.4, 0.6), ()]
    with pytest.raises(ModelError, match="shares"):
        ends_of((part(0, 5), part(5, 15, 0, 1, shares=shares), part(15, 30)))
