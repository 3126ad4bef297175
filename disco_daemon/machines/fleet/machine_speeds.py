"""What is learned of other machines' hosts: how fast they compute, and how far they are. Pure.

Both come of what the engine measures while answers are written. Before that a machine counts as fast as its threads are
many, but no faster than this one with all of its own, and as near as this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ...engine import wire
from ...fleet.costs import ModuleCosts
from .host_places import LentMachine
from .layer_plan import FleetPlanInput
from .observations import HostElsewhere
from .range_costs import KEEP, MAX_RANGES

WAY_KEPT_S = 60.0  # for which a quickest way counts: then it may have become another one
FAR_APART = 4  # times the rows of the smallest flight, from which on another one says what a row takes on its way


@dataclass(slots=True)
class MachineBook:
    """Seconds of runs, and of ways there and back, by hosts of other machines."""

    _runs: dict[tuple[int, int, int, int], float] = field(default_factory=dict)  # host, first, last, rows
    _ways: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # host, rows: seconds, and when

    def observe(
        self, now: float, runs: Iterable[wire.RunSample], ways: Iterable[wire.WaySample], others: Collection[int]
    ) -> None:
        """Take what was measured in a second of the hosts `others`, and forget those that are none any more."""
        for run in runs:
            if run.host not in others or run.n < 1 or run.batch < 1:
                continue
            key, now_s = (run.host, run.first, run.last, run.batch), run.seconds / run.n
            before_s = self._runs.pop(key, None)
            self._runs[key] = now_s if before_s is None else KEEP * before_s + (1 - KEEP) * now_s
            if len(self._runs) > MAX_RANGES:
                del self._runs[next(iter(self._runs))]
        for way in ways:
            if way.host not in others or way.rows < 1:
                continue
            seconds, at_s = self._ways.get((way.host, way.rows), (float("inf"), now))
            if way.seconds <= seconds or now - at_s > WAY_KEPT_S:
                self._ways[way.host, way.rows] = way.seconds, now
        self._runs = {key: seconds for key, seconds in self._runs.items() if key[0] in others}
        self._ways = {key: found for key, found in self._ways.items() if key[0] in others}

    def speed(self, host: int, costs: ModuleCosts) -> float | None:
        """Return how many times faster a host is than what `costs` are of; None while it has computed nothing."""
        expected = measured = 0.0
        for (number, first, last, batch), seconds in self._runs.items():
            if number == host:
                expected += (last - first) * costs.layer.at(batch) + costs.call.at(batch)
                measured += seconds
        return expected / measured if expected > 0 and measured > 0 else None

    def way(self, host: int, row_bytes: int) -> tuple[float, float]:
        """Return a host's delay, one way, s, and the byte/s of its link; 0 and infinite while nothing is known."""
        times = {rows: seconds for (number, rows), (seconds, _) in self._ways.items() if number == host}
        if not times:
            return 0.0, float("inf")
        few, many = min(times), max(times)
        row_s = (times[many] - times[few]) / (many - few) if many >= FAR_APART * few else 0.0
        if row_s <= 0:
            return times[few] / 2, float("inf")
        return max(0.0, times[few] - few * row_s) / 2, 2 * row_bytes / row_s

    def hosts(
        self, machines: Mapping[int, LentMachine | None], given: FleetPlanInput, costs: ModuleCosts, unit: float
    ) -> dict[int, HostElsewhere]:
        """Return the hosts of other machines, by their numbers, as a controller sees them.

        `unit` is the speed, as `FleetHost` has it, of what the costs were measured of.
        """
        found = dict[int, HostElsewhere]()
        for number, machine in machines.items():
            if machine is None:
                found[number] = HostElsewhere(None)
                continue
            speed = self.speed(number, costs)
            compute = min(1.0, machine.n_threads / max(1, given.n_threads)) if speed is None else unit * speed
            found[number] = HostElsewhere(machine, compute, *self.way(number, given.model.row_bytes))
        return found
