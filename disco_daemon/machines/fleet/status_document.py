"""What is said of a fleet: hosts, layers, replicas, and the last decisions."""

from __future__ import annotations

from typing import Any

import psutil

from ...clock import Clock
from ...config.schema import Config
from ...engine.supervisor import Engine, EngineState
from ...system.control_groups import memory
from ..managed_device import whole_device
from .host_places import LentMachine
from .host_processes import HostLife, HostProcesses
from .layer_files import FleetLayers
from .layer_plan import HOME, FleetPlanInput
from .observations import GIB
from .operator import FleetOperator


class CpuShares:
    """Which share of one processor each process has got since it was looked at before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[int, tuple[float, float]] = {}

    def of(self, pid: int | None) -> float | None:
        """Return the share, which is above 1 for several threads; None at the first look, or without a process."""
        if pid is None:
            return None
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return None
        now, used = self._clock.now(), times.user + times.system
        before = self._seen.get(pid)
        self._seen[pid] = now, used
        if before is None or now <= before[0]:
            return None
        return round(max(0.0, used - before[1]) / (now - before[0]), 3)


class LocalFleet:
    """The view of a fleet, and the way to its operator."""

    def __init__(
        self, engine: Engine, hosts: HostProcesses, layers: FleetLayers, given: FleetPlanInput, config: Config
    ) -> None:
        self._engine, self._hosts, self._layers, self._given = engine, hosts, layers, given
        self._operator = FleetOperator(engine, hosts, layers, given, config)
        self._shares = CpuShares(engine.clock)
        self.run = self._operator.run
        self.observe, self.drain, self.resume = self._operator.observe, self._operator.drain, self._operator.resume
        self.follow, self.pause = self._operator.follow, self._operator.pause

    def brief(self) -> dict[str, Any]:
        """Return the fleet in a few figures; a layer counts as away while a host that has it lives."""
        layout = self._layers.layout
        return {
            "hosts": sum(host.is_up for host in self._hosts.hosts),
            "layers_away": layout.n_away(host.number for host in self._hosts.hosts if host.is_up),
            "replicas": sum(n - 1 for n in layout.parallelism),
            "state": self._state(),
            "confined": self._confined(),
        }

    def document(self) -> dict[str, Any]:
        """Return the fleet for `disco fleet status`; what is not measured is None."""
        operator, figures, settings = self._operator, self._operator.figures, self._operator.wishes.settings
        chosen = settings.mode == "auto" or not settings.cuts
        return whole_device() | {
            "mode": settings.mode,
            "policy": settings.policy if chosen else None,
            "paused": operator.wishes.paused,
            "hosts": [self._home(), *(self._host(host) for host in self._hosts.hosts)],
            "parallelism": self._layers.layout.parallelism,
            "speedup_predicted": round(self._given.speedup(self._layers.layout), 3),
            "speedup_measured": None if figures.speedup is None else round(figures.speedup, 3),
            "slo_violation": figures.violation,
            "vacancy": figures.vacancy,
            "last_steps": operator.steps.shown(),
        }

    @property
    def n_moves(self) -> int:
        """How many times layers were moved, replicated or evicted."""
        return self._operator.steps.n_moves

    @property
    def n_hosts(self) -> int:
        """How many hosts there may be, with and without layers."""
        return len(self._hosts.hosts)

    @property
    def may_borrow(self) -> bool:
        """Whether rows may reach another machine, now or during the next answer."""
        return self._hosts.may_borrow

    def _confined(self) -> list[str] | None:
        """Return the rights that all hosts have given up; None before the first answer tells."""
        stats = self._engine.stats
        hosts = [] if stats is None or stats.fleet is None else stats.fleet.hosts
        if not hosts:
            return None
        return [right for right in hosts[0].confined if all(right in host.confined for host in hosts)]

    def _state(self) -> str:
        if self._engine.state is not EngineState.READY:
            return self._engine.state.value
        layout = self._layers.layout
        return "lost" if any(not host.is_up and layout.on(host.number) for host in self._hosts.hosts) else "up"

    def _home(self) -> dict[str, Any]:
        state = "up" if self._engine.state is EngineState.READY else self._engine.state.value
        return self._member(HOME, 0, state, self._engine.restarts + 1, self._engine.pid)

    def _host(self, host: HostLife) -> dict[str, Any]:
        ready, has_layers = self._engine.state is EngineState.READY, bool(self._layers.layout.on(host.number))
        state = self._hosts.state_of(host) if host.is_up or has_layers else "idle"
        if host.number in self._operator.wishes.drained:
            state = "draining" if has_layers else "drained"
        if not ready:
            state = self._engine.state.value
        return self._member(self._hosts.name_of(host), host.number, state, host.epoch, host.pid)

    def _member(self, name: str, number: int, state: str, epoch: int, pid: int | None) -> dict[str, Any]:
        total, free, share = self._room(number, pid)
        stats = self._engine.stats
        n_sequences = stats.running + stats.paused if stats is not None else 0
        at = {layers: len(hosts) for layers, hosts in self._layers.layout.ranges if number in hosts}
        return {
            "name": name,
            "state": state,
            "epoch": epoch,
            "exact": self._engine.config.exact,
            "cpu_share": share,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "excess_bytes": round(next(iter(self._operator.figures.excess[number : number + 1]), 0.0)),
            "cells_used": stats.cells_used if stats is not None else 0,
            "segments": [
                {"first": layers.first, "last": layers.last, "replicas": n, "sequences": n_sequences}
                for layers, n in at.items()
            ],
        }

    def _room(self, number: int, pid: int | None) -> tuple[int | None, int | None, float | None]:
        """Return memory, what is free of it, and the share of a processor that a host got, on its own machine."""
        lent = self._hosts.elsewhere().get(number)
        if lent is not None and not lent.stood_in:
            return _said_of(lent)
        total, free = memory()
        if number and (memory_gib := self._operator.wishes.settings.memory_gib):
            total = min(total, int(memory_gib * GIB))
            free = min(free, total)
        return total, free, self._shares.of(pid)


def _said_of(lent: LentMachine) -> tuple[int | None, int | None, float | None]:
    """Return what another machine's owner allows of its memory, what is free of it, and its hosts' processors."""
    allowed = lent.memory_bytes or None
    if (said := lent.said) is None:
        return allowed, None, None
    total = min(said.memory_bytes, allowed or said.memory_bytes)
    return total, min(total, said.memory_free_bytes), round(said.cpu_got, 3)
