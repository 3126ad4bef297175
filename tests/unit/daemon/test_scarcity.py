"""Which side the planner limits: by the prices, not more often than once a minute, or as it is set, at once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from disco_daemon.config.schema import PolicySettings
from disco_daemon.daemon.scarcity import MIN_CHANGE_S, ScarceSide
from disco_daemon.daemon.tasks.learner import Learner
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.planner import Planner
from disco_daemon.money.exchange import Regime
from disco_daemon.money.spending import Spending
from disco_daemon.types import Side
from tests.fixtures.clock import StoppedClock


class Prices:
    """Stands in for what money says: the test sets the scarcer side."""

    scarcer = Side.SERVER

    @property
    def regime(self) -> Regime:
        return Regime(self.scarcer, 0.0, 0.0)


class Scene:
    def __init__(self, **policy: Any) -> None:
        self.clock, self.prices = StoppedClock(), Prices()
        self.planner = Planner(make_policy("optimal"), Side.SERVER, 0.5)
        self.learner = Learner(self.planner, cast("Any", None), self.clock, "")
        self.side = self.scarce(PolicySettings(**policy))

    def scarce(self, settings: PolicySettings, changed_at: float | None = None) -> ScarceSide:
        return ScarceSide(self.learner, lambda: cast("Spending", self.prices), self.clock, settings, changed_at)

    def constrained(self) -> Side:
        self.planner.refit()
        return self.planner.constrained


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_dearer_side_is_limited_when_the_prices_change(scene: Scene) -> None:
    scene.side.follow()
    assert scene.constrained() is Side.SERVER
    scene.prices.scarcer = Side.DEVICE
    scene.side.follow()
    assert scene.constrained() is Side.DEVICE


def test_it_changes_once_a_minute_at_most(scene: Scene) -> None:
    scene.prices.scarcer = Side.DEVICE
    scene.side.follow()
    assert scene.constrained() is Side.DEVICE
    scene.prices.scarcer = Side.SERVER
    scene.clock.at += MIN_CHANGE_S - 1
    scene.side.follow()
    assert scene.constrained() is Side.DEVICE
    scene.clock.at += 1
    scene.side.follow()
    assert scene.constrained() is Side.SERVER


def test_the_minute_goes_on_across_a_reload(scene: Scene) -> None:
    scene.prices.scarcer = Side.DEVICE
    scene.side.follow()
    assert scene.constrained() is Side.DEVICE
    reloaded = scene.scarce(PolicySettings(), scene.side.changed_at)
    scene.prices.scarcer = Side.SERVER
    reloaded.follow()
    assert scene.constrained() is Side.DEVICE


def test_a_side_that_is_set_counts_at_once_and_the_prices_no_more(scene: Scene) -> None:
    scene.prices.scarcer = Side.DEVICE
    scene.side.follow()
    assert scene.constrained() is Side.DEVICE
    scene.side.set("server", 0.25)
    assert scene.constrained() is Side.SERVER
    assert scene.planner.budget == 0.25
    scene.clock.at += 2 * MIN_CHANGE_S
    scene.side.follow()
    assert scene.constrained() is Side.SERVER
