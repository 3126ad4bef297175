"""A leg of a fleet's model knows what its replicas have, also while sequences are copied from one to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disco_daemon.engine.hosts.kept_rows import KeptRows
from disco_daemon.engine.hosts.legs import HomeSegment, Leg
from disco_daemon.engine.hosts.pool import HERE
from disco_daemon.engine.hosts.view import HomeView
from disco_daemon.types import LayerRange


def replica(**lengths: int) -> Any:
    """A replica whose sequences, by their numbers behind an `s`, have so many cells."""
    kept = KeptRows()
    for name, n in lengths.items():
        kept.keep([int(name[1:])], 0, n, np.zeros((n, 2), np.float32))
    return SimpleNamespace(kept=kept)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_that_a_replica_has_been_given_is_not_all_that_there_is(order: int) -> None:
    replicas = [replica(s1=40, s2=7), replica(s1=16, s3=9)]
    assert Leg(LayerRange(5, 15, 30), replicas[::order]).cells() == {1: 40, 2: 7, 3: 9}


def test_a_leg_at_home_keeps_nothing() -> None:
    assert Leg(LayerRange(5, 15, 30), [SimpleNamespace(kept=None)]).cells() is None  # type: ignore[list-item]


def test_a_range_of_which_home_has_two_copies_is_at_home_once() -> None:
    """Where a lost host's replica was taken over by home, which has one already, a controller reckons with one host."""
    model: Any = None
    leg = Leg(LayerRange(5, 15, 30), [HomeSegment(model), HomeSegment(model)])
    view = object.__new__(HomeView)
    view._legs = [leg]
    assert view.cut == [(leg.layers, (HERE,))]
