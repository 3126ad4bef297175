"""Steps by which layers go back to where their owner has placed them, once nothing keeps them away any more. Pure.

A host was drained, had less memory for a while, or its owner was at work: what left it then comes back, as far as there
is room. What other hosts have got meanwhile goes, if it is where it was placed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .placement import Placement, free_bytes
from .reduction import FleetView, ReducedState
from .steps import FleetStep, StepKind

WHY = "it belongs there"


def returning(state: ReducedState, placed: Placement, view: FleetView) -> Iterator[FleetStep]:
    """Yield the steps towards `placed` that hosts accept and have room for, those that bring most layers first.

    Of a run for which there is not enough room its beginning goes: a host that had too much gave away ends of runs.
    """
    found = list[FleetStep]()
    for (source, target), modules in _runs(state.placement, placed):
        if target is None:
            found.append(FleetStep(StepKind.EVICT, modules.start, modules.stop, source, why=WHY))
            continue
        n = _n_fitting(modules, target, state, view) if view.hosts[target].accepts else 0
        if n:
            kind = StepKind.REPLICATE if source is None else StepKind.MOVE
            found.append(FleetStep(kind, modules.start, modules.start + n, source, target, why=WHY))
    yield from sorted(found, key=lambda step: (-len(step.modules), step.first))


def _runs(present: Placement, placed: Placement) -> Iterator[tuple[tuple[int | None, int | None], range]]:
    """Yield runs of inner modules with a host that has them in vain, and one that lacks them; None where none does."""
    both = list(zip(present.masks, placed.masks, strict=True))
    inner = range(1, len(both) - 1)
    for hosts, run in groupby(inner, lambda m: (_lowest(both[m][0] & ~both[m][1]), _lowest(both[m][1] & ~both[m][0]))):
        modules = list(run)
        if hosts != (None, None):
            yield hosts, range(modules[0], modules[-1] + 1)


def _lowest(mask: int) -> int | None:
    """Return the lowest host of a mask; None where there is none."""
    return (mask & -mask).bit_length() - 1 if mask else None


def _n_fitting(modules: range, target: int, state: ReducedState, view: FleetView) -> int:
    """Return how many modules from the first on a host has room for."""
    room = free_bytes(target, view.hosts, state.placement, view.model)
    for n, module in enumerate(modules):
        room -= view.model.weights[module]
        if room < 0:
            return n
    return len(modules)
