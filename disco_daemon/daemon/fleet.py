"""The device as a fleet of processes of this machine: which layers lie where, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace as replace_fields

from ..clock import Clock
from ..config.schema import Config
from ..endpoints.fleet_device import FleetDevice
from ..engine import wire
from ..engine.config import EngineConfig
from ..engine.measure.tune_messages import Knobs
from ..engine.supervisor import Engine, EngineState
from ..errors import ConfigError
from ..models.gguf import Header
from ..models.segment_files import read_head
from ..models.segments import NotCuttableError, cut
from ..types import LayerRange
from .device import knobs_for, model_path, token_s
from .fleet_hosts import HostLife, HostProcesses
from .fleet_plan import (
    HOME,
    FleetPlan,
    FleetPlanInput,
    best_layers,
    host_name,
    modules_of,
    plan_fleet,
    require_layers,
)
from .split import segment_files
from .split_plan import MEMORY_BYTES_PER_S

NOT_MEASURED = (
    "; how long the model takes for a token is not measured (`disco tune` does that) and reckoned as its weights' way "
    "from memory"
)


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


def whole_device() -> dict[str, Any]:
    """Return the document of `disco fleet status` for a device without hosts."""
    return {
        "mode": "manual",
        "policy": None,
        "hosts": [],
        "parallelism": [],
        "speedup_predicted": None,
        "speedup_measured": None,
        "slo_violation": None,
        "vacancy": None,
        "last_steps": [],
    }


class LocalFleet:
    """The view of a fleet whose hosts are processes of this machine; `away` are the layers of the one host."""

    def __init__(self, engine: Engine, hosts: HostProcesses, away: LayerRange, speedup: float, *, chosen: bool) -> None:
        self._engine, self._hosts, self._away = engine, hosts, away
        self._speedup, self._policy = speedup, "measured" if chosen else None
        self._shares = CpuShares(engine.clock)

    def brief(self) -> dict[str, Any]:
        """Return the fleet in a few figures; a layer counts as away while its host lives."""
        n_up = sum(host.pid is not None for host in self._hosts.hosts)
        return {
            "hosts": n_up,
            "layers_away": self._away.n_layers if n_up else 0,
            "replicas": 0,
            "state": self._state(n_up),
        }

    def document(self) -> dict[str, Any]:
        """Return the fleet for `disco fleet status`; what nothing measures yet is None."""
        return whole_device() | {
            "policy": self._policy,
            "hosts": [self._home(), *(self._host(host) for host in self._hosts.hosts)],
            "parallelism": [1] * self._away.of,
            "speedup_predicted": round(self._speedup, 3),
        }

    def _state(self, n_up: int) -> str:
        if self._engine.state is not EngineState.READY:
            return self._engine.state.value
        return "up" if n_up == len(self._hosts.hosts) else "lost"

    def _home(self) -> dict[str, Any]:
        state = "up" if self._engine.state is EngineState.READY else self._engine.state.value
        ranges = [(0, self._away.first), (self._away.last, self._away.of)]
        return self._member(HOME, state, self._engine.restarts + 1, self._engine.pid, ranges)

    def _host(self, host: HostLife) -> dict[str, Any]:
        ready = self._engine.state is EngineState.READY
        state = "lost" if host.pid is None and ready else "up" if ready else self._engine.state.value
        return self._member(host_name(host.number), state, host.epoch, host.pid, [(self._away.first, self._away.last)])

    def _member(
        self, name: str, state: str, epoch: int, pid: int | None, ranges: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        memory, stats = psutil.virtual_memory(), self._engine.stats
        n_sequences = stats.running + stats.paused if stats is not None else 0
        return {
            "name": name,
            "state": state,
            "epoch": epoch,
            "exact": self._engine.config.exact,
            "cpu_share": self._shares.of(pid),
            "memory_bytes": memory.total,
            "memory_free_bytes": memory.available,
            "cells_used": stats.cells_used if stats is not None else 0,
            "segments": [
                {"first": first, "last": last, "replicas": 1, "sequences": n_sequences} for first, last in ranges
            ],
        }


def make_fleet(config: Config, whole: EngineConfig, name: str, clock: Clock) -> FleetDevice:
    """Return the device as a fleet; `whole` is how the whole model would be loaded. Raises ConfigError.

    Files are written when the engine starts, not here.
    """
    model = whole.model_path
    head, header = read_head(model)
    given = plan_input(config, model, header)
    away = layers_away(config, model, given)
    ranges = _ranges(model, head, header, away)
    files = segment_files()
    paths = files.paths(model, ranges)

    def write() -> None:
        if not all(path.exists() for path in paths):
            files.clean()
            files.write(model, ranges)

    parts = tuple(
        wire.RangeFile(path=str(path), first=layers.first, last=layers.last, of=layers.of, host=host)
        for path, layers, host in zip(paths, ranges, (0, 1, 0), strict=True)
    )
    hosts = HostProcesses(config.fleet.hosts, write)
    engine = Engine(_home_config(config, whole, parts), clock, hosts=hosts)
    fleet = LocalFleet(engine, hosts, away, given.speedup(away), chosen=not config.fleet.cuts)
    return FleetDevice(engine, fleet, name, tuple(config.device.adapters))


def plan(config: Config) -> FleetPlan:
    """Return what should be done with the layers of the configured model. Raises ConfigError."""
    model = model_path(config.device)
    head, header = read_head(model)
    given = plan_input(config, model, header)
    away = layers_away(config, model, given)
    _ranges(model, head, header, away)
    return plan_fleet(given, away if config.fleet.enabled else None)


def plan_input(config: Config, model: Path, header: Header) -> FleetPlanInput:
    """Return what a plan for this machine rests on. Raises ConfigError if a fleet cannot serve the model."""
    modules = modules_of(header, require_layers(model.name, header))
    knobs, measured_s = knobs_for(config, model), token_s(config, model)
    return FleetPlanInput(
        modules,
        measured_s or max(1, sum(modules.weights[1:])) / MEMORY_BYTES_PER_S,
        knobs.n_threads,
        shared_knobs(knobs, config.fleet.hosts).n_threads,
        config.device.n_cells or 2 * config.device.n_ctx,
        float(psutil.virtual_memory().total),
        "" if measured_s else NOT_MEASURED,
    )


def layers_away(config: Config, model: Path, given: FleetPlanInput) -> LayerRange:
    """Return the layers of the host: as the settings say, else the best ones. Raises ConfigError."""
    cuts, n = config.fleet.cuts, given.n_layers
    if not cuts:
        return best_layers(given)
    if cuts[-1] >= n:
        msg = f"fleet.cuts = {list(cuts)}: {model.name} has {n} layers, and the last one stays at home: cut below {n}"
        raise ConfigError(msg)
    return LayerRange(cuts[0], cuts[-1], n)


def _ranges(model: Path, head: bytes, header: Header, away: LayerRange) -> list[LayerRange]:
    """Return all ranges in their order, those `away` in the middle. Raises ConfigError if they cannot be cut."""
    ranges = [LayerRange(0, away.first, away.of), away, LayerRange(away.last, away.of, away.of)]
    try:
        for layers in ranges:
            cut(head, header, layers)
    except NotCuttableError as e:
        msg = f"{model.name} cannot be cut into ranges of layers: {e}"
        raise ConfigError(msg) from e
    return ranges


def shared_knobs(knobs: Knobs, n_hosts: int) -> Knobs:
    """Return the knobs of each of a fleet's processes on one machine: they share the threads of one."""
    n = n_hosts + 1
    each, each_batch = max(1, knobs.n_threads // n), max(1, knobs.n_threads_batch // n)
    return replace_fields(knobs, n_threads=each, n_threads_batch=each_batch)


def _home_config(config: Config, whole: EngineConfig, ranges: tuple[wire.RangeFile, ...]) -> EngineConfig:
    """Return how home is loaded: as the whole model would be, but for what a fleet cannot do.

    It rounds exactly unless the settings say otherwise: what a new host computes again from kept rows has the bits of
    the lost one then.
    """
    knobs = shared_knobs(knobs_for(config, whole.model_path), config.fleet.hosts)
    exact = config.device.rounding != "fast" and config.device.flash_attn != "off"
    return replace(
        whole, ranges=ranges, exact=exact, adapters=(), speculate=False, draft_path="", n_gpu_layers=0,
        n_threads=knobs.n_threads, n_threads_batch=knobs.n_threads_batch,
    )  # fmt: skip
