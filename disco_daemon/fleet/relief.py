"""Steps that a host's owner calls for: it is to be left, or has more than its owner allows. These come before all else.

What is elsewhere as well goes first, since nothing has to be copied for that; then whole runs move to the host with
room under which the busiest host is least busy.
"""

from __future__ import annotations

from collections.abc import Iterator

from .placement import free_bytes, runs
from .reduction import FleetView, ReducedState
from .steps import FleetStep, StepKind


def relief(state: ReducedState, host: int, n_bytes: float, view: FleetView, why: str) -> Iterator[FleetStep]:
    """Yield steps that free `n_bytes` at a host, or as much as others have room for: the best one first.

    Infinitely many bytes are all that is there, but for home's own modules.
    """
    masks, head = state.placement.masks, view.model.head
    there = [module for module in state.placement.on(host) if 0 < module < head]
    for run in _longest([module for module in there if masks[module] != 1 << host]):
        part = _enough(run, n_bytes, view)
        yield FleetStep(StepKind.EVICT, part.start, part.stop, host, why=why)
    for run in _longest([module for module in there if masks[module] == 1 << host]):
        part = _enough(run, n_bytes, view)
        while part:
            target = _destination(part, host, state, view)
            if target is not None:
                yield FleetStep(StepKind.MOVE, part.start, part.stop, host, target, why=why)
                break
            part = part[len(part) - len(part) // 2 :]


def _destination(modules: range, source: int, state: ReducedState, view: FleetView) -> int | None:
    """Return the host with room for `modules` under which the busiest is least busy; one without processors comes last.

    Where others take all processors, they have to go somewhere all the same.
    """
    need = sum(view.model.weights[module] for module in modules)
    best: tuple[bool, float, int] | None = None
    for target, host in enumerate(view.hosts):
        if target == source or not host.accepts:
            continue
        if free_bytes(target, view.hosts, state.placement, view.model) < need:
            continue
        tried = not host.speed, max(view.busy(state.placement.move(modules, source, target))), target
        best = tried if best is None else min(best, tried)
    return None if best is None else best[-1]


def _longest(modules: list[int]) -> list[range]:
    return sorted(runs(modules), key=lambda run: (-len(run), run.start))


def _enough(run: range, n_bytes: float, view: FleetView) -> range:
    """Return as much of a run's end as frees `n_bytes`, all of it where that is less."""
    freed, first = 0.0, run.stop
    while first > run.start and freed < n_bytes:
        first -= 1
        freed += view.model.weights[first]
    return range(first, run.stop)
