"""Carries out what a fleet's controller decides: once a second it looks, lets it decide in a thread, and takes a step.

A step stages the files of new ranges, then the engine moves layers while answers go on (`engine.hosts.recut`). One step
is under way at a time, and one that fails leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from ...config.schema import Config
from ...engine import wire
from ...engine.supervisor import Engine, EngineState
from ...errors import ConfigError, EndpointError
from ...fleet.control import MIN_ANSWERS, FleetController, FleetSeen
from ...fleet.forecast import FleetLoad
from ...fleet.layout import FleetLayout, PlacedRange
from ...fleet.placement import free_bytes
from ...fleet.steps import BATCH_KINDS, FleetStep, StepKind
from ...types import Outcome, Side
from .detour import detour, fitting
from .host_processes import HostProcesses
from .layer_files import FleetLayers, Shares, differ
from .layer_plan import HOME, FleetPlanInput, StepDone
from .machine_speeds import MachineBook
from .monitor import FleetMonitor, MachineLoad
from .observations import FleetMoment, seen_of, segment_bytes
from .range_costs import CostBook, condensed

log = logging.getLogger("disco.fleet")

LOOK_S = 1.0  # between two looks
MAX_STEPS = 20  # that are shown
REST_S = 30.0  # after a step that failed, and twice as long after each further one; what owners call for is not bound
MAX_REST_S = 3600.0  # an hour: what stands in the way may have gone by then
SHARES_S = 10.0  # between two looks at the shares of replicas
SHARES_DIFFER = 0.1  # of the sequences: less makes no difference
SMOOTH = 0.8  # of a rate that is shown: it is counted by the second, and answers come and go


@dataclass(slots=True)
class SeenRate:
    """Tokens that the engine draws a second, from its statistics."""

    tokens_per_s: float = 0.0
    _stats: wire.Stats | None = None
    _at_s: float = 0.0

    def observe(self, now: float, stats: wire.Stats | None, n_active: int) -> float:
        """Return the present rate; between two reports it is as before while answers are drawn."""
        if stats is None or not n_active:
            self.tokens_per_s = 0.0
        elif stats is not self._stats and self._stats is not None and now > self._at_s:
            n_tokens = stats.completion_tokens - self._stats.completion_tokens
            self.tokens_per_s = max(0, n_tokens) / (now - self._at_s)
        if stats is not self._stats:
            self._stats, self._at_s = stats, now
        return self.tokens_per_s


class FleetOperator:
    """Looks after one fleet. All mutable state: what it saw last, the step under way, what owners want, the limit."""

    def __init__(
        self, engine: Engine, hosts: HostProcesses, layers: FleetLayers, given: FleetPlanInput, config: Config
    ) -> None:
        self._engine, self._hosts, self._layers, self._given = engine, hosts, layers, given
        self._monitor, self._controller = FleetMonitor(), FleetController()
        self._book, self._machines = CostBook(), MachineBook()
        self._rate = SeenRate()
        self._samples_of: wire.Stats | None = None
        self.paused = False
        self.drained = frozenset[int]()
        self.machine: MachineLoad | None = None
        self.n_moves = 0
        self.violation: float | None = None
        self.vacancy: float | None = None
        self.excess: tuple[float, ...] = ()  # of each host, bytes beyond what its owner allows
        self.speedup: float | None = None
        self._n_answers, self._n_late = 0, 0
        self._limit, self._offloaded, self._full_batch = 0, False, 1
        self._n_failed, self._rests_until_s = 0, 0.0
        self._measured: dict[float, float | None] = {}
        self._is_failing = False
        self._shared: Shares = ()
        self._shares_until_s = 0.0
        self._steps: deque[tuple[float, StepDone]] = deque(maxlen=MAX_STEPS)
        self._step: asyncio.Task[None] | None = None
        self._placed: FleetLayout | None = None  # as the owner wants it, where layers do not move by themselves
        self.follow(config)

    # --- what owners want -------------------------------------------------------------------------------------------

    def follow(self, config: Config) -> None:
        """Go by other live settings from now on."""
        self.settings, self._expected_ttft_s = config.fleet, config.delivery.expected_ttft_s
        self._controller.policy = config.fleet.policy
        self._controller.vacancy, self._controller.violation = config.fleet.vacancy, config.fleet.violation
        if config.fleet.mode == "auto":
            self._placed = None
        elif self._placed is None:
            self._placed = self._layers.layout

    def drain(self, name: str) -> None:
        """Let all layers leave a host, and none come. Raises ConfigError for an unknown one."""
        numbers = {self._hosts.name_of(host): host.number for host in self._hosts.hosts}
        if name not in numbers:
            msg = f"the fleet has no host {name!r}, only {', '.join(numbers)}"
            raise ConfigError(msg)
        self.drained |= {numbers[name]}

    def resume(self) -> None:
        """Let the controller decide again, and drained hosts have layers again."""
        self.paused, self.drained = False, frozenset()

    # --- what it learns ---------------------------------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Count an answer of this device: late are those with less QoE, or a later first token, than is expected."""
        if outcome.winner is not Side.DEVICE or outcome.ttft_s is None:
            return
        qoe = 1.0 if outcome.reading is None else outcome.reading.qoe
        self._n_answers += 1
        self._n_late += qoe < self.settings.slo_qoe or outcome.ttft_s > self._expected_ttft_s

    def last_steps(self) -> list[dict[str, Any]]:
        """Return the latest steps, the last one last, with what was expected of them and what came of it."""
        found: list[dict[str, Any]] = []
        for at_s, step in self._steps:
            factor = self._measured.get(at_s)
            shown = msgspec.structs.replace(step, measured=None if factor is None else round(factor, 3))
            found.append(msgspec.to_builtins(shown))
        return found

    # --- once a second ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after the fleet until cancelled; a step that is under way then comes to its end by itself."""
        while True:
            if self._step is not None:
                await asyncio.shield(self._step)
                self._step = None
            await asyncio.sleep(LOOK_S)
            if self._engine.state is not EngineState.READY:
                continue
            try:
                await self.look()
            except Exception:  # whatever it is: what owners want has to be looked after, and answers go on anyway
                if not self._is_failing:
                    log.exception("the fleet cannot be looked after")
                self._is_failing = True
            else:
                self._is_failing = False

    async def look(self) -> None:
        """Look once, and take the step that is decided on, if there is one."""
        now = self._engine.clock.now()
        rests = self.paused or now < self._rests_until_s
        may_scale = self.settings.mode == "auto" and not rests
        moment, pids, placed = self._moment(now), self._pids(), None if rests else self._placed
        seen, self.machine, steps = await asyncio.to_thread(self._decide, now, moment, pids, may_scale, placed)
        self.vacancy = round(max(seen.vacancy(host) for host in range(len(seen.fleet.hosts))), 3)
        self.violation, self.excess = self._violation(), seen.excess
        self._measured = {
            record.at_s: record.measured for record in self._controller.records
        }  # while no thread decides
        if not steps:
            await self._share(now, seen)
        for step in steps:
            self._step = asyncio.create_task(self._carry_out(now, step, seen), name=f"fleet {step.kind}")
            await asyncio.shield(self._step)
            self._step = None

    def _decide(
        self, now: float, moment: FleetMoment, pids: dict[int, int], may_scale: bool, placed: FleetLayout | None
    ) -> tuple[FleetSeen, MachineLoad, list[FleetStep]]:
        """Look at the machine, and let the controller decide; in a thread, since both take milliseconds."""
        machine = self._monitor.look(pids)
        seen = seen_of(moment, machine)
        wanted = None if placed is None else placed.placement
        return seen, machine, self._controller.decide(now, seen, may_scale=may_scale, placed=wanted)

    def _pids(self) -> dict[int, int]:
        found = {0: self._engine.pid} | {host.number: host.pid for host in self._hosts.hosts}
        return {number: pid for number, pid in found.items() if pid is not None}

    def _moment(self, now: float) -> FleetMoment:
        stats, info, layout = self._engine.stats, self._engine.info, self._layers.layout
        # The engine tells once a second, and when it rests: what has come since is not in that yet.
        n_told = 0 if stats is None else stats.running + stats.paused + stats.swapped + stats.waiting
        n_active = max(n_told, self._engine.in_flight)
        context = 1.0 if stats is None else max(1.0, stats.cells_used / max(1, n_active))
        load = FleetLoad(max(1.0, float(n_active)), context)
        machines = self._hosts.elsewhere()
        if stats is not None and stats is not self._samples_of and stats.fleet is not None:
            others = [number for number, one in machines.items() if one is not None and not one.stood_in]
            self._book.observe(one for one in stats.fleet.samples if one.host not in others)
            self._machines.observe(now, stats.fleet.samples, stats.fleet.ways, others)
            layout = self._follow_home(stats.fleet)
        self._samples_of = stats
        measured = self._book.costs(layout)
        costs, unit = (condensed(self._given.costs, layout), 1.0) if measured is None else (measured, self._given.speed)
        rate = self._rate.observe(now, stats, n_active)
        self._compare(rate, load, n_active)
        if not self._limit:
            self._full_batch = max(1, min(n_active, info.n_seqs if info is not None else n_active))
        n_answers, n_late, self._n_answers, self._n_late = self._n_answers, self._n_late, 0, 0
        return FleetMoment(
            layout, self._given, self.settings, costs, load,
            info.n_cells if info is not None else self._given.n_cells, self._limit or self._full_batch,
            self._full_batch, self._offloaded, self.drained, rate, n_answers, n_late,
            self._machines.hosts(machines, self._given, costs, unit),
        )  # fmt: skip

    def _follow_home(self, told: wire.FleetUsage) -> FleetLayout:
        """Return the layout as home says it is: a host that is lost may have given its layers to home."""
        inner = tuple(PlacedRange(*leg) for leg in told.legs)
        if inner and inner != self._layers.layout.inner:
            self._layers.layout = FleetLayout(self._layers.layout.n_layers, inner)
        return self._layers.layout

    def _compare(self, rate: float, load: FleetLoad, n_active: int) -> None:
        """Compare the present rate with the whole model's in one process, under the same load."""
        alone = self._given.whole_tps(load) if n_active and rate else None
        if alone is not None:
            factor = rate / alone
            self.speedup = factor if self.speedup is None else SMOOTH * self.speedup + (1 - SMOOTH) * factor

    def _violation(self) -> float | None:
        """Return the share of late answers; None while there are too few."""
        return round(self._controller.violating_share(), 3) if self._controller.n_counted >= MIN_ANSWERS else None

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _carry_out(self, at_s: float, step: FleetStep, seen: FleetSeen) -> None:
        began, layout = self._engine.clock.now(), self._layers.layout
        first, last = layout.layers_of(step)
        log.info("fleet: %s layers %d-%d, %s", step.kind, first, last, step.why)
        moved = self._limit_answers(step, seen) if step.kind in BATCH_KINDS else await self._move(step, seen)
        error = moved.error
        self._n_failed = self._n_failed + 1 if error else 0
        if error:
            log.warning("fleet: the step came to nothing: %s", error)
            rest_s = min(MAX_REST_S, REST_S * 2 ** (self._n_failed - 1))
            self._rests_until_s = self._engine.clock.now() + rest_s
        elif step.kind not in BATCH_KINDS:
            self.n_moves += 1
        why = f"{step.why}; it came to nothing: {error}" if error else step.why
        self._controller.carried_out(self._engine.clock.now())
        self._steps.append((at_s, self._shown(step, why, self._engine.clock.now() - began, moved)))

    def _shown(self, step: FleetStep, why: str, seconds: float, moved: wire.LayersMoved) -> StepDone:
        first, last = self._layers.layout.layers_of(step)
        source, target = (None if host is None else self._name_of(host) for host in (step.source, step.target))
        parts = (seconds - moved.seconds, moved.load_s, moved.copy_s) if moved.seconds else (None, None, None)
        shown = (None if part_s is None else round(part_s, 4) for part_s in parts)
        return StepDone(
            step.kind.value, first, last, source, target, why, round(step.predicted, 3), None, round(seconds, 4),
            round(moved.pause_s, 4), *shown,
        )  # fmt: skip

    def _name_of(self, number: int) -> str:
        return self._hosts.name_of(self._hosts.hosts[number - 1]) if number else HOME

    async def _move(self, step: FleetStep, seen: FleetSeen) -> wire.LayersMoved:
        """Stage files, and let the engine move layers; an error in the report: they lie as before, or at home."""
        try:
            layout = self._layers.layout.after(step.apply(self._layers.layout.placement))
            between = detour(self._layers.layout, layout, seen.fleet, segment_bytes(self._given.n_cells))
            if between is None:
                return await self._move_to(layout, seen)
            first = await self._move_to(between, seen)
            if first.error:
                return first
            machine = await asyncio.to_thread(self._monitor.look, self._pids())
            seen = seen_of(self._moment(self._engine.clock.now()), machine)  # others may have taken the room
            last = await self._move_to(fitting(between, layout, seen.fleet), seen)
        except (ConfigError, EndpointError, OSError, ValueError) as e:
            return wire.LayersMoved(id="", error=str(e))
        seconds, pause_s = first.seconds + last.seconds, max(first.pause_s, last.pause_s)
        return msgspec.structs.replace(last, seconds=seconds, pause_s=pause_s)

    async def _move_to(self, layout: FleetLayout, seen: FleetSeen) -> wire.LayersMoved:
        """Let the layers lie as in a layout. Raises ConfigError, EndpointError, OSError, ValueError."""
        if layout == self._layers.layout:
            return wire.LayersMoved(id="")
        shares = self._shares(layout, seen)
        ranges = await asyncio.to_thread(self._layers.stage, layout, shares)
        with self._layers.moving_to(layout):
            await self._stage_elsewhere()
            if self._engine.state is not EngineState.READY:  # it was while it was decided
                return wire.LayersMoved(id="", error="the engine has stopped")
            moved = await self._engine.fleet.move(ranges)
            if not moved.error:
                self._layers.layout, self._samples_of = layout, self._engine.stats  # which is from before
                self._shared = shares
                placement, fleet = layout.placement, seen.fleet
                self.excess = tuple(
                    max(0.0, -free_bytes(host, fleet.hosts, placement, fleet.model)) if over else 0.0
                    for host, over in enumerate(self.excess)
                )
        return moved

    def _shares(self, layout: FleetLayout, seen: FleetSeen) -> Shares:
        """Return by which shares new sequences go to replicas, so that they do what is forecast under the peak load."""
        if not layout.has_replicas:
            return ()
        return layout.shares(self._controller.at_peak(seen.fleet).forecast(layout.placement).shares)

    async def _share(self, now: float, seen: FleetSeen) -> None:
        """Let new sequences go to replicas by other shares, if those that are in force have become wrong."""
        layout = self._layers.layout
        if not layout.has_replicas or now < self._shares_until_s:
            return
        self._shares_until_s = now + SHARES_S
        shares = await asyncio.to_thread(self._shares, layout, seen)
        if differ(shares, self._shared, SHARES_DIFFER):
            with suppress(EndpointError, OSError):  # the next life of the engine gets them then
                if not (await self._engine.fleet.move(self._layers.range_files(layout, shares))).error:
                    self._shared = shares

    async def _stage_elsewhere(self) -> None:
        """Let other machines fetch what is to come to them, as long as nobody wants something else.

        Raises OSError if one of them does not get it.
        """
        staging, wanted = asyncio.ensure_future(self._hosts.stage()), self._wishes()
        try:
            while not (await asyncio.wait((staging,), timeout=LOOK_S))[0]:
                if self._wishes() != wanted:
                    raise OSError("owners want something else by now")
            staging.result()
        finally:
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)

    def _wishes(self) -> tuple[object, ...]:
        """Return what owners want, and whether the engine is there: a change of it breaks a fetch of files off."""
        leaving = [n for n, one in self._hosts.elsewhere().items() if one is not None and one.said and one.said.leaving]
        return self.drained, self.paused, self.settings, leaving, self._engine.state

    def _limit_answers(self, step: FleetStep, seen: FleetSeen) -> wire.LayersMoved:
        """Let fewer answers run at a time, or more again; those that wait may leave the KV cache."""
        after = seen.state.after(step)
        self._limit = 0 if after.batch >= self._full_batch and step.kind is StepKind.RAISE_BATCH else after.batch
        self._offloaded = after.offloaded
        is_ready = self._engine.state is EngineState.READY
        with suppress(EndpointError):  # it has stopped: its next life goes by the limit
            self._engine.fleet.limit_answers(self._limit, offload=self._offloaded, is_ready=is_ready)
        return wire.LayersMoved(id="")
