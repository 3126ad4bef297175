"""What the settings make of a daemon, and the small parts of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ..autotune import Autotuner
from ..conductor import Manner, Stage
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..engine.supervisor import EngineState
from ..learning import Learner
from ..money.purse import Purse
from ..net import without_credentials
from ..prober import Prober
from ..profiling.saved import Measured
from ..scheduling.mover import CostMover, Forced, Mover, Stay
from ..scheduling.planner import Planner
from ..settings import Config
from ..types import Delivery, Side
from ..wattmeter import Wattmeter
from .foresight import policy_of


@dataclass(frozen=True, slots=True)
class Parts:
    """What the settings make: all of it is made anew when they change, but for the caps, and a device that is the same.

    An answer keeps to the parts that it began with.
    """

    config: Config
    endpoints: Mapping[Side, Endpoint]
    measured: Measured | None
    purse: Purse
    learner: Learner
    costs: CostMover
    wattmeter: Wattmeter
    prober: Prober | None
    autotuner: Autotuner | None
    stage: Stage


def kept(endpoints: Mapping[Side, Endpoint], before: Mapping[Side, Endpoint]) -> dict[Side, Endpoint]:
    """The new endpoints, but the old device where the new one would be the same: its model is in memory.

    One that was given up is not kept: a reload tries its model once more.
    """
    new, old = endpoints.get(Side.DEVICE), before.get(Side.DEVICE)
    same = isinstance(new, Device) and isinstance(old, Device) and new.engine.config == old.engine.config
    failed = isinstance(old, Device) and old.engine.state is EngineState.FAILED
    return dict(endpoints) | ({Side.DEVICE: old} if same and not failed and old is not None else {})


def make_manner(config: Config) -> Manner:
    """How answers are delivered where the client does not say."""
    delivery = config.delivery
    return Manner(Delivery(delivery.mode), delivery.pace_tps, delivery.expected_ttft_s, config.handoff.stall_s)


def make_mover(config: Config, costs: CostMover, force: tuple[int, int] | None) -> Mover:
    """Who decides about moves: the costs, nobody, or an experiment."""
    if force is not None:
        return Forced(costs, *force)
    return costs if config.handoff.for_cost else Stay(costs)


def make_planner(config: Config, purse: Purse) -> Planner:
    """The planner for the configured policy; the scarcer side is the dearer one unless told otherwise."""
    settings = config.policy
    scarcer = Side(settings.scarcer) if settings.scarcer != "auto" else purse.regime.scarcer
    return Planner(policy_of(settings), scarcer, settings.budget, draw=random.random)


def names(config: Config) -> str:
    """Whom the learned figures are about."""
    server = f"{without_credentials(config.server.base_url)} {config.server.model}"
    device = config.device.base_url or "engine"
    return f"{server} | {device} {config.device.model or 'default'}"
