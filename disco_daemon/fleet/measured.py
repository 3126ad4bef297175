"""The policy `measured`: which step raises the forecast rate most, and when to stop.

A step replicates or moves a run of consecutive modules, or evicts one. It is worth its trouble if the rate rises by
2 %; where two hosts are equally busy it takes several steps for that, so a few are tried ahead, and none of them lowers
the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from .forecast import FleetForecast, FleetModel
from .placement import Placement, free_bytes, runs
from .steps import FleetStep, StepKind

LEAST_GAIN = 0.02  # of the rate: a step that gains less is not taken
LOOK_AHEAD = 3  # steps of a plan that are looked at together
N_BRANCHES = 4  # first steps that are tried with what follows, where all steps can be tried
MAX_CANDIDATES = 130  # of one step; where there would be more, only a choice of them is tried
N_TARGETS = 3  # hosts to which modules may go, the least busy ones, where not all are tried
N_SOURCES = 2  # hosts that they leave or are relieved, the busiest ones
ROUNDING = 1e-9  # of a rate


def next_steps(fleet: FleetModel, placement: Placement) -> list[FleetStep]:
    """Return the fewest steps found that together raise the rate by LEAST_GAIN or more; none if there are none.

    The first step is the one from which the next ones lead furthest, not the one that gains most itself.
    """
    forecast = cache(fleet.forecast)
    begin = forecast(placement)
    n_tried = N_BRANCHES if _is_small(fleet) else 1
    enough = begin.tokens_per_s * (1 + LEAST_GAIN)
    best: list[_Reached] = []
    for first in _best_steps(fleet, forecast, placement, begin)[:n_tried]:
        way = [first]
        while len(way) < LOOK_AHEAD and (n_tried > 1 or way[-1].forecast.tokens_per_s < enough):
            further = _best_steps(fleet, forecast, way[-1].placement, way[-1].forecast)
            if not further:
                break
            way.append(further[0])
        if not best or way[-1].forecast.tokens_per_s > best[-1].forecast.tokens_per_s * (1 + ROUNDING):
            best = way
    for n, reached in enumerate(best, start=1):
        now = reached.forecast.tokens_per_s
        gain = now / begin.tokens_per_s if begin.tokens_per_s else float("inf")
        if gain >= 1 + LEAST_GAIN:
            why = f"{begin.tokens_per_s:.1f} to {now:.1f} token/s expected"
            return [replace(one.step, predicted=gain, why=why) for one in best[:n]]
    return []


@dataclass(frozen=True, slots=True)
class _Reached:
    """A step, where it leads, and what is expected there."""

    step: FleetStep
    placement: Placement
    forecast: FleetForecast


def _is_small(fleet: FleetModel) -> bool:
    """Whether all steps can be tried."""
    n_hosts, n_free = len(fleet.hosts), len(fleet.model.weights) - len(fleet.pinned)
    return n_hosts * (n_hosts + 1) * n_free * (n_free + 1) // 2 <= MAX_CANDIDATES


def _best_steps(
    fleet: FleetModel, forecast: Callable[[Placement], FleetForecast], placement: Placement, now: FleetForecast
) -> list[_Reached]:
    """Return the steps that make anything better and lower no rate: by the highest rate, then by the most even load."""
    found = []
    for step in candidates(fleet, placement, now):
        after = step.apply(placement)
        expected = forecast(after)
        gain = expected.tokens_per_s - now.tokens_per_s
        least = ROUNDING * now.tokens_per_s
        if gain > least or (gain >= -least and expected.unevenness < now.unevenness * (1 - ROUNDING)):
            found.append(_Reached(step, after, expected))
    return sorted(found, key=lambda one: (-round(one.forecast.tokens_per_s, 6), one.forecast.unevenness))


def candidates(fleet: FleetModel, placement: Placement, now: FleetForecast) -> Iterator[FleetStep]:
    """Yield steps worth a forecast: all there are in a small fleet, else runs from the busiest to the least busy."""
    n_hosts, is_small = len(fleet.hosts), _is_small(fleet)
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
