"""Carries out what a fleet's controller decides: once a second it looks, lets it decide in a thread, and takes a step.

A step stages the files of new ranges, then the engine moves layers while answers go on (`engine.hosts.recut`). One step
is under way at a time, and one that fails leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

import msgspec

from ...config.schema import Config
from ...engine import wire
from ...engine.supervisor import Engine, EngineState
from ...errors import ConfigError, EndpointError
from ...fleet.control import MIN_ANSWERS, FleetController, FleetSeen
from ...fleet.forecast import FleetLoad
from ...fleet.layout import FleetLayout, PlacedRange
from ...fleet.placement import free_bytes
from ...fleet.steps import BATCH_KINDS, FleetStep
from ...plain import reason_of, which
from ...system.tasks import cancel_all
from ...types import Outcome
from .host_processes import HostProcesses
from .interim_layout import detour, fitting
from .layer_files import FleetLayers, Shares, differ
from .layer_plan import HOME, FleetPlanInput, StepDone
from .machine_speeds import MachineBook
from .monitor import FleetMonitor
from .observations import FleetMoment, seen_of, segment_bytes
from .operator_records import AnswerCounts, AnswerLimit, FleetFigures, OwnerWishes, SeenRate, StepLog
from .range_costs import CostBook, condensed

log = logging.getLogger("disco.fleet")

LOOK_S = 1.0  # between two looks
SHARES_S = 10.0  # between two looks at the shares of replicas
SHARES_DIFFER = 0.1  # of the sequences: less makes no difference


class FleetOperator:
    """Looks after one fleet. All mutable state: what it saw last, the step under way, and the records of the others."""

    def __init__(
        self, engine: Engine, hosts: HostProcesses, layers: FleetLayers, given: FleetPlanInput, config: Config
    ) -> None:
        self._engine, self._hosts, self._layers, self._given = engine, hosts, layers, given
        self._monitor, self._controller = FleetMonitor(), FleetController()
        self._book, self._machines = CostBook(), MachineBook()
        self._rate, self._answers, self._limit = SeenRate(), AnswerCounts(), AnswerLimit()
        self.wishes, self.steps, self.figures = OwnerWishes(config.fleet), StepLog(), FleetFigures()
        self._samples_of: wire.Stats | None = None
        self._is_failing = False
        self._shared: Shares = ()
        self._shares_until_s = 0.0
        self._step: asyncio.Task[None] | None = None
        self.follow(config)

    # --- what owners want, and what they got --------------------------------------------------------------------------

    def follow(self, config: Config) -> None:
        """Go by other live settings from now on."""
        self._config = config
        self.wishes = self.wishes.following(config.fleet, self._layers.layout)
        self._controller.vacancy, self._controller.violation = config.fleet.vacancy, config.fleet.violation

    def drain(self, name: str) -> None:
        """Let all layers leave a host, and none come. Raises ConfigError for an unknown one."""
        numbers = {self._hosts.name_of(host): host.number for host in self._hosts.hosts}
        if name not in numbers:
            raise ConfigError(f"the fleet has no host {name!r}: {which(name, numbers)}")
        self.wishes = replace(self.wishes, drained=self.wishes.drained | {numbers[name]})

    def pause(self) -> None:
        """Let nothing be moved by itself until `resume`; what owners of hosts call for is done still."""
        self.wishes = replace(self.wishes, paused=True)

    def resume(self) -> None:
        """Let the controller decide again, and drained hosts have layers again."""
        self.wishes = replace(self.wishes, paused=False, drained=frozenset())

    def observe(self, outcome: Outcome) -> None:
        """Count an answer of this device."""
        self._answers.observe(outcome, self._config)

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
        rests = self.wishes.paused or self.steps.rests(now)
        may_scale = self.wishes.settings.mode == "auto" and not rests
        moment, pids, placed = self._moment(now), self._pids(), None if rests else self.wishes.placed
        seen, steps = await asyncio.to_thread(self._decide, now, moment, pids, may_scale, placed)
        figures, records = self.figures, self._controller.records  # which no thread changes now
        figures.vacancy = round(max(seen.vacancy(host) for host in range(len(seen.fleet.hosts))), 3)
        figures.violation, figures.excess = self._violation(), seen.excess
        self.steps.measured = {record.at_s: record.measured for record in records}
        if not steps:
            await self._share(now, seen)
        for step in steps:
            self._step = asyncio.create_task(self._carry_out(now, step, seen), name=f"fleet {step.kind}")
            await asyncio.shield(self._step)
            self._step = None

    def _decide(
        self, now: float, moment: FleetMoment, pids: dict[int, int], may_scale: bool, placed: FleetLayout | None
    ) -> tuple[FleetSeen, list[FleetStep]]:
        """Look at the machine, and let the controller decide; in a thread, since both take milliseconds."""
        seen = seen_of(moment, self._monitor.look(pids))
        wanted = None if placed is None else placed.placement
        return seen, self._controller.decide(now, seen, may_scale=may_scale, placed=wanted)

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
        limit, answers, self._answers = self._limit, self._answers, AnswerCounts()
        limit.see(min(n_active, info.n_seqs if info is not None else n_active))
        return FleetMoment(
            layout, self._given, self.wishes.settings, costs, load,
            info.n_cells if info is not None else self._given.n_cells, limit.n_answers or limit.full_batch,
            limit.full_batch, limit.offloaded, self.wishes.drained, rate, answers.n_answers, answers.n_late,
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
            self.figures.compare(rate / alone)

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
        if error:
            log.warning("fleet: the step came to nothing: %s", error)
        self.steps.count(self._engine.clock.now(), failed=bool(error), moves=step.kind not in BATCH_KINDS)
        why = f"{step.why}; it came to nothing: {error}" if error else step.why
        self._controller.carried_out(self._engine.clock.now())
        self.steps.note(at_s, self._shown(step, why, self._engine.clock.now() - began, moved))

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
            return wire.LayersMoved(id="", error=reason_of(e))
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
                self.figures.excess = tuple(
                    max(0.0, -free_bytes(host, fleet.hosts, placement, fleet.model)) if over else 0.0
                    for host, over in enumerate(self.figures.excess)
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
        staging, wanted = asyncio.create_task(self._hosts.stage(), name="stage"), self._wishes()
        try:
            while not (await asyncio.wait((staging,), timeout=LOOK_S))[0]:
                if self._wishes() != wanted:
                    raise OSError("owners want something else by now")
            staging.result()
        finally:
            await cancel_all(staging)

    def _wishes(self) -> tuple[object, ...]:
        """Return what owners want, and whether the engine is there: a change of it breaks a fetch of files off."""
        leaving = [n for n, one in self._hosts.elsewhere().items() if one is not None and one.said and one.said.leaving]
        return self.wishes, leaving, self._engine.state

    def _limit_answers(self, step: FleetStep, seen: FleetSeen) -> wire.LayersMoved:
        """Let fewer answers run at a time, or more again; those that wait may leave the KV cache."""
        self._limit.follow(step, seen)
        is_ready = self._engine.state is EngineState.READY
        with suppress(EndpointError):  # it has stopped: its next life goes by the limit
            self._engine.fleet.limit_answers(self._limit.n_answers, offload=self._limit.offloaded, is_ready=is_ready)
        return wire.LayersMoved(id="")
