"""The policy `measured`: which step raises the forecast rate most, and when to stop.

A step replicates or moves a run of consecutive modules, or evicts one. It is worth its trouble if the rate rises by
2 %; where two hosts are equally busy it takes several steps for that, so a few are tried ahead, and none of them lowers
the rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .forecast import FleetForecast, FleetModel
from .placement import MAX_HOSTS, Placement, free_bytes, runs
from .steps import FleetStep, StepKind

LEAST_GAIN = 0.02  # of the rate: a step that gains less is not taken
LOOK_AHEAD = 3  # steps that may gain nothing before one that does
MAX_CANDIDATES = 120  # of one step; where there would be more, only a choice of them is tried
N_TARGETS = 3  # hosts to which modules may go, the least busy ones, where not all are tried
N_SOURCES = 2  # hosts that they leave or are relieved, the busiest ones
MAX_STEPS = 4 * MAX_HOSTS  # of a plan
ROUNDING = 1e-9  # of a rate


def next_steps(fleet: FleetModel, placement: Placement) -> list[FleetStep]:
    """Return the fewest steps found that together raise the rate by LEAST_GAIN or more; none if there are none."""
    begin = fleet.forecast(placement)
    now, steps = begin, list[FleetStep]()
    for _ in range(LOOK_AHEAD):
        found = _best_step(fleet, placement, now)
        if found is None:
            break
        step, placement, now = found
        steps.append(step)
        gain = now.tokens_per_s / begin.tokens_per_s if begin.tokens_per_s else float("inf")
        if gain >= 1 + LEAST_GAIN:
            why = f"{begin.tokens_per_s:.1f} to {now.tokens_per_s:.1f} token/s expected"
            return [replace(one, predicted=gain, why=why) for one in steps]
    return []


def plan_steps(fleet: FleetModel, placement: Placement) -> tuple[Placement, list[FleetStep]]:
    """Return all steps until none gains enough, and where they lead."""
    steps: list[FleetStep] = []
    while len(steps) < MAX_STEPS and (more := next_steps(fleet, placement)):
        for step in more:
            placement = step.apply(placement)
        steps += more
    return placement, steps


def _best_step(
    fleet: FleetModel, placement: Placement, now: FleetForecast
) -> tuple[FleetStep, Placement, FleetForecast] | None:
    """Return the step with the highest rate, or of equal ones the most even load; none if nothing gets better."""
    best: tuple[FleetStep, Placement, FleetForecast] | None = None
    rate, unevenness = now.tokens_per_s, now.unevenness
    for step in candidates(fleet, placement, now):
        after = step.apply(placement)
        found = fleet.forecast(after)
        better = found.tokens_per_s > rate * (1 + ROUNDING)
        as_good = found.tokens_per_s >= rate * (1 - ROUNDING) and found.unevenness < unevenness * (1 - ROUNDING)
        if better or as_good:
            best = step, after, found
            rate, unevenness = max(rate, found.tokens_per_s), found.unevenness
    return best


def candidates(fleet: FleetModel, placement: Placement, now: FleetForecast) -> Iterator[FleetStep]:
    """Yield steps worth a forecast: all there are in a small fleet, else runs from the busiest to the least busy."""
    n_hosts, n_free = len(fleet.hosts), len(placement.masks) - len(fleet.pinned)
    is_small = n_hosts * (n_hosts + 1) * n_free * (n_free + 1) // 2 <= MAX_CANDIDATES
    if is_small:
        sources = targets = list(range(n_hosts))
    else:
        worst = [max(float(now.busy[h]) / now.round_s, float(now.fill[h])) for h in range(n_hosts)]
        order = sorted(range(n_hosts), key=lambda h: (worst[h] / max(fleet.hosts[h].speed, ROUNDING), h))
        targets = [h for h in order if fleet.hosts[h].accepts and fleet.hosts[h].speed > 0][:N_TARGETS]
        sources = sorted(range(n_hosts), key=lambda h: (-worst[h], h))[:N_SOURCES]
    for target in targets:
        if fleet.hosts[target].accepts and fleet.hosts[target].speed > 0:
            yield from _towards(fleet, placement, target, sources, is_small=is_small)
    for source in sources:
        spare = [m for m in placement.on(source) if placement.masks[m] != 1 << source and m not in fleet.pinned]
        for run in runs(spare):
            for part in _parts(run, len(run), is_small=is_small):
                yield FleetStep(StepKind.EVICT, part.start, part.stop, source)


def _towards(
    fleet: FleetModel, placement: Placement, target: int, sources: list[int], *, is_small: bool
) -> Iterator[FleetStep]:
    """Yield replications and moves of runs of modules to a host that lacks them and has room for them."""
    room = free_bytes(target, fleet.hosts, placement, fleet.model)
    for source in sources:
        if source == target:
            continue
        lacking = [m for m in placement.on(source) if not placement.has(m, target) and m not in fleet.pinned]
        # The longest runs first, as Algorithm 1 sorts them; those of equal length by their first module.
        for run in sorted(runs(lacking), key=lambda one: (-len(one), one.start))[: None if is_small else 1]:
            for part in _parts(run, _n_that_fit(fleet, run, room), is_small=is_small):
                if sum(fleet.model.weights[m] for m in part) > room:
                    continue
                yield FleetStep(StepKind.REPLICATE, part.start, part.stop, None, target)
                yield FleetStep(StepKind.MOVE, part.start, part.stop, source, target)


def _n_that_fit(fleet: FleetModel, run: range, room: float) -> int:
    largest = max(fleet.model.weights[m] for m in run)
    return min(len(run), int(room // largest)) if largest else len(run)


def _parts(run: range, most: int, *, is_small: bool) -> Iterator[range]:
    """Yield parts of a run with `most` modules at most: all, or those at its ends with some lengths."""
    if is_small:
        yield from (range(a, b) for a in run for b in range(a + 1, run.stop + 1) if b - a <= most)
        return
    n_hosts_worth = {most, min(most, len(run) // 2), min(most, len(run) // 4)}
    for n in sorted(n for n in n_hosts_worth if 0 < n <= most):
        yield range(run.start, run.start + n)
        if n < len(run):
            yield range(run.stop - n, run.stop)
