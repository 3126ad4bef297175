"""How long the policy `measured` takes for one decision, at the largest fleet there may be."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from disco_daemon.fleet.forecast import FleetLoad, FleetModel
from disco_daemon.fleet.measured import next_steps
from disco_daemon.fleet.placement import MAX_HOSTS, Placement

from .fleet_constants import LLAMA_70B, Constants
from .machines import Gpu, fleet_model

ROOM = 0.45  # of the model's weights that each host has room for; home has room for all


def large_fleet() -> FleetModel:
    """Return 16 unequal hosts and a model of 80 layers."""
    gpu = Gpu(LLAMA_70B, Constants())
    fleet = fleet_model(gpu, FleetLoad(400.0, 80.0), MAX_HOSTS)
    weights = LLAMA_70B.weight_bytes
    hosts = [
        replace(host, compute=host.compute * (1 + 0.1 * (n % 5)), memory_bytes=weights * (1.6 if n == 0 else ROOM))
        for n, host in enumerate(fleet.hosts)
    ]
    return replace(fleet, hosts=tuple(hosts))


def decision_ms() -> dict[str, float]:
    """Return median and maximum of the processor time of each decision on the way to a finished plan, ms."""
    fleet, placement, times = large_fleet(), Placement.at_home(LLAMA_70B.n_layers + 2), list[float]()
    while True:
        begin = time.process_time()
        steps = next_steps(fleet, placement)
        times.append(1e3 * (time.process_time() - begin))
        if not steps:
            return {"median": statistics.median(times), "max": max(times), "n": float(len(times))}
        placement = steps[0].apply(placement)
