"""Scale-up as the paper has it: Algorithm 1 (CoCoServe, EuroSys '26), over layers only.

Two slips of the print are mended. Line 7 adds the replica to P, which the loop never reads again; it is added to P',
whose speed-up line 8 computes. And a host's `available / r` is a number of layers by memory *and* compute, so the
smaller quotient counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disco_daemon.fleet.forecast import FleetModel
from disco_daemon.fleet.placement import FleetHost, ModelModules, Placement, free_bytes, runs
from disco_daemon.fleet.steps import FleetStep, StepKind

from .speedup import LayerReplica, equal_hosts_speedup, speedup

Objective = Callable[[Placement], float]


def n_replicas_that_fit(
    host: int, hosts: Sequence[FleetHost], placement: Placement, model: ModelModules, layer_compute: float = 0.0
) -> int:
    """Return how many more layers a host has room for: `max_replicas`, line 3.

    `layer_compute` is what a layer takes of the compute of a host, in the unit of `FleetHost.compute`.
    """
    layer = max(model.weights[1 : model.head])
    by_memory = int(free_bytes(host, hosts, placement, model) // layer) if layer else model.n_layers
    if layer_compute:
        n_there = sum(0 < module < model.head for module in placement.on(host))
        by_memory = min(by_memory, int(hosts[host].speed // layer_compute) - n_there)
    return max(0, by_memory)


def sort_by_continuity(placement: Placement, host: int, most: int) -> list[int]:
    """Return `most` of the layers that a host lacks, those of the longest run of consecutive ones first (line 4)."""
    lacking = [m for m in range(1, len(placement.masks) - 1) if not placement.has(m, host)]
    ordered = sorted(runs(lacking), key=lambda run: (-len(run), run.start))
    return [module for run in ordered for module in run][:most]


def equal_hosts_objective(gamma: float) -> Objective:
    """Return Equation 4 as what Algorithm 1 raises; of the modules it knows the layers only."""
    return lambda placement: equal_hosts_speedup(placement.parallelism[1:-1], gamma)


def unequal_hosts_objective(
    hosts: Sequence[FleetHost], batch: float, width: float, length: float, transitions: float
) -> Objective:
    """Return Equation 3 as what Algorithm 1 raises, with the batch split by the hosts' speeds."""

    def replicas(mask: int) -> list[LayerReplica]:
        there = [host for number, host in enumerate(hosts) if mask >> number & 1]
        total = sum(host.speed for host in there)
        return [LayerReplica(batch * host.speed / total, host.speed, host.bytes_per_s) for host in there]

    def objective(placement: Placement) -> float:
        begin = [replicas(mask & -mask) for mask in placement.masks[1:-1]]
        return speedup(begin, [replicas(mask) for mask in placement.masks[1:-1]], width, length, transitions)

    return objective


def scale_up(
    placement: Placement,
    hosts: Sequence[FleetHost],
    model: ModelModules,
    objective: Objective,
    eligible: Sequence[int],
    layer_compute: float = 0.0,
) -> tuple[Placement, list[FleetStep]]:
    """Run Algorithm 1: return P*, and a step for each layer that was replicated. `eligible` are the roomy hosts."""
    best, steps = objective(placement), []
    for target in eligible:
        most = n_replicas_that_fit(target, hosts, placement, model, layer_compute)
        for layer in sort_by_continuity(placement, target, most):
            tried = placement.add((layer,), target)
            value = objective(tried)
            if value > best:
                why = f"S rises from {best:.3f} to {value:.3f}"
                kind = StepKind.REPLICATE
                steps.append(FleetStep(kind, layer, layer + 1, None, target, None, value / best, why))
                placement, best = tried, value
    return placement, steps


def join_steps(steps: Sequence[FleetStep]) -> list[FleetStep]:
    """Return the steps with those of consecutive layers to one host as one, which is staged and loaded at once."""
    joined: list[FleetStep] = []
    for step in steps:
        last = joined[-1] if joined else None
        if last and (last.kind, last.source, last.target, last.last) == (
            step.kind,
            step.source,
            step.target,
            step.first,
        ):
            predicted = last.predicted * step.predicted
            joined[-1] = FleetStep(
                last.kind, last.first, step.last, last.source, last.target, None, predicted, step.why
            )
        else:
            joined.append(step)
    return joined


def grow_paper(fleet: FleetModel, placement: Placement, eligible: Sequence[int]) -> list[FleetStep]:
    """Return the steps of Algorithm 1 with Equation 4 and gamma = 0, under which each replica counts as a gain."""
    open_hosts = [host for host in eligible if fleet.hosts[host].accepts]
    return join_steps(scale_up(placement, fleet.hosts, fleet.model, equal_hosts_objective(0.0), open_hosts)[1])
