"""What the settings make of a daemon, and the small parts of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ..conductor import Manner, Stage
from ..config.schema import Config
from ..dispatch.mover import CostMover, Forced, Mover, Stay
from ..dispatch.planner import Planner
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..endpoints.shaper import Shaped
from ..money.purse import Purse
from ..net import without_credentials
from ..profiling.saved import Measured
from ..types import Delivery, Side
from .tasks.autotuner import Autotuner
from .tasks.learner import Learner
from .tasks.prober import Prober
from .tasks.wattmeter import Wattmeter
from .whatif import policy_of


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


def same_device(new: Endpoint, old: Endpoint | None) -> Endpoint:
    """The old device where the new one would be the same and the old one is well: its model is in memory."""
    if not isinstance(new, Device | Shaped) or not isinstance(old, Device | Shaped):
        return new
    return old if new.engine.config == old.engine.config and old.may_serve() else new


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
