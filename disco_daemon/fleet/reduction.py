"""Scale-down as the paper has it: Algorithm 2, Module Reduction, one step after the other until the violation ends.

Phase 1 moves modules off the host, phase 2 evicts replicas there, phase 3 lowers the number of answers at a time and
offloads; the last is taken back when it is calm again, which the paper leaves open. Mended slips of the print: phase 3
asks about P, which no longer is the state (P' is); it returns P and bs instead of P' and bs'; a batch that ends the
violation is lost by `break`; and bs - Δbs may fall below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .placement import FleetHost, ModelModules, Placement, free_bytes, runs
from .steps import FleetStep, Pressure, StepKind

BATCH_STEP = 5  # answers fewer at a time: the paper's example of Δbs


@dataclass(frozen=True, slots=True)
class ReducedState:
    """What a reduction changes: the placement, how many answers run at a time, and whether KV cache is offloaded."""

    placement: Placement
    batch: int
    offloaded: bool = False

    def after(self, step: FleetStep) -> ReducedState:
        """Return the state that a step leads to."""
        match step.kind:
            case StepKind.LOWER_BATCH | StepKind.RAISE_BATCH if step.batch is not None:
                return replace(self, batch=step.batch, offloaded=self.offloaded and step.kind is StepKind.LOWER_BATCH)
            case StepKind.OFFLOAD:
                return replace(self, offloaded=True)
        return replace(self, placement=step.apply(self.placement))


@dataclass(frozen=True, slots=True)
class FleetView:
    """What a reduction looks at: hosts, the model, and `busy`: the predicted load of each host under a placement."""

    hosts: Sequence[FleetHost]
    model: ModelModules
    busy: Callable[[Placement], Sequence[float]]


def filter_modules(state: ReducedState, source: int, pressure: Pressure, view: FleetView) -> list[range]:
    """Return runs of modules that relieve a host when they leave, by what is short there (section 3.3).

    Whole layers, which cost the least traffic: with their KV cache where memory is short. A module that is there alone
    goes before one with a replica elsewhere, which phase 2 can evict without a copy. Half of each run at most leaves
    in one step, so that a host is not emptied.
    """
    there = [m for m in state.placement.on(source) if 0 < m < view.model.head]
    alone = [m for m in there if state.placement.masks[m] == 1 << source]
    found = []
    for run in runs(alone):
        n = max(1, len(run) // 2 if pressure is Pressure.COMPUTE else len(run) // 4)
        found.append(range(run.stop - n, run.stop))
    return sorted(found, key=lambda run: (-len(run), run.start))


def find_destination(
    modules: range, source: int, state: ReducedState, pressure: Pressure, view: FleetView
) -> int | None:
    """Return the host with room for `modules` under which the busiest host is least busy, or None.

    Where compute is short, it has to be less busy than it is now.
    """
    limit = max(view.busy(state.placement)) if pressure is Pressure.COMPUTE else float("inf")
    need = sum(view.model.weights[m] for m in modules)
    best: tuple[float, int] | None = None
    for target, host in enumerate(view.hosts):
        if target == source or not host.accepts or not host.speed:
            continue
        if free_bytes(target, view.hosts, state.placement, view.model) < need:
            continue
        busiest = max(view.busy(state.placement.move(modules, source, target)))
        if busiest < (best[0] if best else limit):
            best = busiest, target
    return best[1] if best else None


def sort_evictees(state: ReducedState, host: int, view: FleetView) -> list[range]:
    """Return runs of replicas at a host that are elsewhere as well, those whose loss costs least first.

    The order is Algorithm 1's, reversed: short runs before long ones, late layers before early ones.
    """
    there = [m for m in state.placement.on(host) if state.placement.masks[m] != 1 << host]
    return sorted(runs(there), key=lambda run: (max(view.busy(state.placement.evict(run, host))), len(run), -run.start))


def reductions(
    state: ReducedState, source: int, pressure: Pressure, view: FleetView, full_batch: int
) -> Iterator[FleetStep]:
    """Yield the steps of Algorithm 2 in order, each from the state that the ones before it have made.

    Whoever takes them stops when the violation has ended; each step was applied by the time the next is asked for. What
    comes next follows from the state alone, so it is the same if only the first step is taken, and then asked anew:
    `full_batch` is the number of answers at a time without any reduction.
    """
    for modules in filter_modules(state, source, pressure, view):
        target = find_destination(modules, source, state, pressure, view)
        if target is None:
            continue
        step = FleetStep(
            StepKind.MOVE, modules.start, modules.stop, source, target, why=f"{pressure} is short; phase 1"
        )
        state = state.after(step)
        yield step
    for modules in sort_evictees(state, source, view):
        step = FleetStep(StepKind.EVICT, modules.start, modules.stop, source, why=f"{pressure} is short; phase 2")
        state = state.after(step)
        yield step
    while True:
        if state.batch < full_batch and not state.offloaded:
            step = FleetStep(StepKind.OFFLOAD, source=source, why=f"{pressure} is short; phase 3")
        elif state.batch > 1:
            lower = max(1, state.batch - BATCH_STEP)
            step = FleetStep(StepKind.LOWER_BATCH, batch=lower, why=f"{pressure} is short; phase 3")
        else:
            return
        state = state.after(step)
        yield step


def undo_reduction(state: ReducedState, full_batch: int) -> FleetStep | None:
    """Return the step that takes a part of phase 3 back, or None where nothing of it is left."""
    if state.batch >= full_batch and not state.offloaded:
        return None
    return FleetStep(StepKind.RAISE_BATCH, batch=min(full_batch, state.batch + BATCH_STEP), why="it is calm again")
