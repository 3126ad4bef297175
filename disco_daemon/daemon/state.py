"""What /metrics says of the daemon's parts as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import __version__
from ..api.vitals import Budget, CapUse, EngineVitals, Vitals
from ..endpoints.device import Device
from ..types import Side

if TYPE_CHECKING:
    from ..dispatch.planner import Planner
    from .daemon import Daemon

ANSWERS = ("running", "paused", "swapped", "waiting")  # what the engine's statistics count


def vitals(daemon: Daemon) -> Vitals:
    """Look at all of them; nothing here waits."""
    purse, device = daemon.parts.purse, daemon.endpoints.get(Side.DEVICE)
    caps: dict[str, dict[str, Any]] = purse.caps.state(daemon.clock.wall())
    return Vitals(
        version=__version__,
        in_flight=daemon.conductor.in_flight,
        may_serve={side: endpoint.may_serve() for side, endpoint in daemon.endpoints.items()},
        budget=_budget(daemon.parts.learner.planner),
        caps={name: _use(cap["limit"], cap["spent"], cap["reserved"]) for name, cap in caps.items()},
        usd_per_kwh=purse.prices.usd_per_kwh,
        rows_dropped=daemon.history.dropped,
        engine=_engine(device) if isinstance(device, Device) else None,
    )


def _budget(planner: Planner) -> Budget:
    used = planner.pacer.realised()["last_200"]
    return Budget(planner.constrained, planner.budget, float(planner.pacer.handed_out()), used)


def _use(limit: float, spent: float, reserved: float) -> CapUse:
    """Shares of a cap; one of nothing is used up."""
    return CapUse(spent / limit, reserved / limit) if limit > 0 else CapUse(1.0, 0.0)


def _engine(device: Device) -> EngineVitals:
    engine = device.engine
    stats, info = engine.stats, engine.info
    return EngineVitals(
        up=device.ready,
        restarts=engine.restarts,
        answers=dict.fromkeys(ANSWERS, 0) if stats is None else {name: getattr(stats, name) for name in ANSWERS},
        cells_used=None if stats is None else stats.cells_used,
        cells=None if info is None else info.n_cells,
    )
