"""The composition root: makes the daemon out of its parts, and runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from ..api.app import make_app
from ..api.connections import Limits, Runner
from ..api.guard import ApiConfig
from ..api.listening import opened
from ..api.metrics import Metrics
from ..api.peers import Kernel
from ..clock import Clock, SystemClock
from ..conductor import Conductor, Keeper, Privacy, Stage
from ..conductor.traces import Traces
from ..config.layers import NOBODY_HERE, as_dict, data_path, get_value, load, require_complete, set_values, with_values
from ..config.schema import LIVE, Config, keys
from ..dispatch.migrate import Costs
from ..dispatch.mover import CostMover
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..endpoints.server import Server
from ..endpoints.shaper import Shape
from ..errors import ConfigError, RequestError
from ..estimation.knowledge import Knowledge
from ..money.purse import Asked, Speeds
from ..onboarding.desk import Desk
from ..service.notify import Manager
from ..store import History
from ..store.claim import claimed
from ..types import Outcome, Side, Usage
from . import files
from .assembly import Parts, make_manner, make_mover, make_planner, names
from .binding import bound
from .device import load_measured, make_autotuner
from .endpoints import make_endpoints
from .money import limits_of, make_purse, make_sensors, probe_attempt, probe_outcome, restore
from .reports import Reports
from .server_setup import Servers
from .state import vitals
from .tasks.learner import Learner
from .tasks.loop_monitor import Pulse
from .tasks.prober import Prober
from .tasks.wattmeter import Wattmeter
from .whatif import Foresight, policy_of

log = logging.getLogger("disco.daemon")

PROBE = Asked(200, max_tokens=200)  # what a probe may cost, tokens; it asks several times, in little pieces
FIXED = ("api.", "history.")  # settings that hold for the life of the process
FLIP_S = 60.0  # between two changes of the scarcer side that nobody asked for
T = TypeVar("T")
SHUTDOWN_TIMEOUT_S = 5.0  # after a SIGTERM, for what is not an answer, such as a page of the history


class Daemon:
    """All parts of one daemon; `serving()` starts and stops them in order. `path` is where its config.toml is.

    `flags` go before what config.toml says, whenever that is read again.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        shape: Shape | None = None,
        force: tuple[int, int] | None = None,
        clock: Clock | None = None,
        manager: Manager | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        require_complete(config)
        config = bound(config, path)
        self.path = path
        self.clock = clock or SystemClock()
        self.manager = manager or Manager({})
        self._shape, self._force, self._flags = shape, force, flags
        self.history = History(
            Path(config.history.path).expanduser() if config.history.path else data_path() / "history.sqlite",
            max_rows=config.history.max_rows,
            keep_text=config.history.keep_text,
        )
        self.metrics = Metrics(lambda: vitals(self))
        self.pulse = Pulse(self.clock, self.metrics.lagged)
        self._traces = Traces()
        self.privacy = Privacy(config.policy.private)
        self._flipped_at = -math.inf
        self._tasks: list[asyncio.Task[None]] = []
        self._changes: set[asyncio.Task[Any]] = set()
        self._reloading = asyncio.Lock()
        self.parts = self._make(config)
        self.keeper = Keeper(self.parts.stage)
        self.conductor = Conductor(self.keeper, self._record)
        self.foresight = Foresight(
            self.history.path, path.parent / "servers", self.clock, lambda: self.conductor.n_served
        )  # fmt: skip
        self.servers = Servers(Desk(path, os.environ, config.api.port, lambda: self.privacy.on))
        self._started = self.clock.now()
        self.url = ""

    def _make(self, config: Config, before: Parts | None = None) -> Parts:
        """New parts; a device that would be the same is taken over from those `before`. Raises ConfigError."""
        endpoints = make_endpoints(config, self.clock, self._shape, None if before is None else before.endpoints)
        measured = load_measured(config)
        purse = make_purse(
            config, self.path.parent / "servers", self.clock, None if before is None else before.purse.caps
        )  # fmt: skip
        learner = Learner(make_planner(config, purse), self.history, self.clock, names(config))
        costs = CostMover(learner.planner, self._per_token, stops_billing=purse.stops_billing)
        wattmeter = Wattmeter(
            make_sensors(config),
            purse,
            self.clock,
            speeds=self._speeds,
            changed=self._reconsider,
            known=None if measured is None else measured.known_energy,
        )
        stage = Stage(
            endpoints=endpoints,
            planner=learner.planner,
            mover=make_mover(config, costs, self._force),
            clock=self.clock,
            purse=purse,
            disturbed=self.pulse.disturbed,
            effort=wattmeter,
            shadow=config.policy.shadow,
            privacy=self.privacy,
            keep_text=config.history.keep_text,
            manner=make_manner(config),
            traces=self._traces,
        )
        device = endpoints.get(Side.DEVICE)
        autotuner = None
        if isinstance(device, Device):
            autotuner = make_autotuner(config, device.engine, lambda: self.conductor.in_flight > 0, self.clock)
        prober = self._make_prober(config, endpoints.get(Side.SERVER))
        return Parts(config, endpoints, measured, purse, learner, costs, wattmeter, prober, autotuner, stage)

    def _make_prober(self, config: Config, server: Endpoint | None) -> Prober | None:
        if not isinstance(server, Server):
            return None
        enabled, may = config.server.probe, self._may_probe
        return Prober(server, self.history, self.clock, enabled=enabled, affordable=may, book=self._book_probe)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.parts.config

    @property
    def endpoints(self) -> Mapping[Side, Endpoint]:
        """The endpoints of the next request."""
        return self.parts.endpoints

    def _may_probe(self) -> bool:
        return not self.privacy.on and self.parts.purse.check(Side.SERVER, PROBE, self.clock.wall()) is None

    def _book_probe(self, spent: Usage) -> None:
        """A probe is a row of its own in the ledger."""
        attempt = probe_attempt(self.parts.purse, self.config.server.model, spent)
        if attempt.bill_usd or spent.completion_tokens:
            self.parts.purse.book(attempt, self.clock.wall())
            outcome = probe_outcome(attempt, self.clock)
            self.history.record(outcome)
            self.metrics.observe(outcome)

    def _record(self, stage: Stage, outcome: Outcome) -> None:
        """One finished answer goes to everybody who keeps count; none of them blocks."""
        self.parts.learner.record(outcome)
        self.metrics.observe(outcome)
        if self.parts.prober is not None and stage.endpoints.get(Side.SERVER) is self.endpoints.get(Side.SERVER):
            self.parts.prober.saw(outcome)

    def state(self) -> dict[str, Any]:
        """What `disco status` shows."""
        conductor = self.conductor
        return {
            "version": __version__,
            "pid": os.getpid(),
            "url": self.url,
            "cpu_s": round(time.process_time(), 4),
            "uptime_s": round(self.clock.now() - self._started, 1),
            "policy": self.parts.learner.planner.policy.name,
            "private": self.privacy.on,
            "endpoints": {side.value: endpoint.status() for side, endpoint in self.endpoints.items()},
            "in_flight": conductor.in_flight,
            "tasks": len(asyncio.all_tasks()),
            "served": conductor.n_served,
            "loop_lag_ms": {"p50": self.pulse.quantile_ms(0.5), "p99": self.pulse.quantile_ms(0.99)},
            "learned": self.parts.learner.state(),
            "money": self._money(),
            "energy": self.parts.wattmeter.state(),
            "tune": self.parts.autotuner.state if self.parts.autotuner is not None else None,
            "history": {
                "path": str(self.history.path),
                "dropped": self.history.dropped,
                "error": self.history.error,
            },
        }

    def plan(self, tokens: int, waited_s: float) -> dict[str, Any]:
        """What would be done now with a prompt of so many tokens, and why."""
        readiness = {side: endpoint.readiness() for side, endpoint in self.endpoints.items()}
        available = frozenset(readiness) - ({Side.SERVER} if self.privacy.on else set())
        explained = self.parts.learner.planner.explain(tokens, readiness, waited_s, available)
        prices, speeds = self.parts.purse.prices, self._speeds()
        costs = prices.per_token(speeds.prefill_tps, speeds.decode_tps)
        return explained | {"usd_per_kwh": prices.usd_per_kwh, "costs_usd_per_token": costs}

    def _speeds(self) -> Speeds:
        return Speeds(1 / self.parts.learner.planner.knowledge.device.k, self.parts.costs.decode_tps[Side.DEVICE])

    def _per_token(self, prefill_tps: float, decode_tps: float) -> Costs:
        return Costs(**self.parts.purse.prices.per_token(prefill_tps, decode_tps))

    def _reconsider(self, *, asked: bool = False) -> None:
        """Limit the side that is scarce now; by itself that changes once a minute at most, however noisy a sensor."""
        planner, settings = self.parts.learner.planner, self.config.policy
        scarcer = Side(settings.scarcer) if settings.scarcer != "auto" else self.parts.purse.regime.scarcer
        if scarcer is not planner.constrained and not asked:
            if self.clock.now() - self._flipped_at < FLIP_S:
                return
            self._flipped_at = self.clock.now()
        self.parts.learner.constrain(scarcer, settings.budget)

    def settings(self) -> dict[str, Any]:
        """All settings in force, by section, and which of them a running daemon takes up."""
        return {"settings": as_dict(self.config), "live": sorted(LIVE)}

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write live settings into config.toml and take them up. Raises ConfigError, RequestError: then nothing is."""
        for key in changes:
            if key in keys() and key not in LIVE:
                raise RequestError(_how_to_set(key), status=403, param=key, code="not_live")

        def somebody(written: Config) -> None:
            if "policy.private" in changes and written.policy.private and Side.DEVICE not in self.endpoints:
                raise ConfigError(NOBODY_HERE)

        async def write() -> None:
            async with self._reloading:
                written = await asyncio.to_thread(set_values, self.path, changes, somebody)
                await self._take_up(with_values(self.config, {key: get_value(written, key) for key in changes}))

        await self._whole(write())
        return self.settings() | {"changed": sorted(changes), "needs_restart": [], "money": self._money()}

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Carry a change out to its end, also when whoever asked for it leaves in between: half of one is none."""
        task = asyncio.create_task(change, name="change")
        self._changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.wait([task])
        return task.result()

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever asked, if that one is still there

    async def _take_up(self, config: Config) -> None:
        """Go by other live settings from now on."""
        self.parts = replace(self.parts, config=config)
        self.parts.purse.set_rate(config.device.usd_per_kwh)
        self.parts.purse.set_limits(limits_of(config))
        self.conductor.stage.manner = make_manner(config)
        self.privacy.on = config.policy.private
        await self._confine()
        self.parts.learner.planner.pursue(policy_of(config.policy))
        self._reconsider(asked=True)
        if self.parts.learner.planner.due:
            await self.parts.learner.fit()

    async def _confine(self) -> None:
        """If nothing may leave any more: end what is on its way. When this returns, nobody is being asked."""
        if self.privacy.on:
            if self.parts.prober is not None:
                await self.parts.prober.stop()
            await self.conductor.confine()

    async def reload(self) -> dict[str, Any]:
        """Read config.toml again, and go by it from the next request on; running answers go on as they began.

        Raises ConfigError, and then everything stays as it was.
        """
        return await self._whole(self._reload())

    async def _reload(self) -> dict[str, Any]:
        async with self._reloading:
            config = await asyncio.to_thread(load, self.path, flags=self._flags)
            require_complete(config)
            config = await asyncio.to_thread(bound, config, self.path, self.config.server.key_origin)
            changed = {key for key in keys() if get_value(config, key) != get_value(self.config, key)}
            restart = {key for key in changed if key.startswith(FIXED)}
            config = with_values(config, {key: get_value(self.config, key) for key in restart})
            if changed - restart and changed - restart <= LIVE:
                await self._take_up(config)
            else:  # where no setting has changed, a file has that one names: the key, a price list, a template
                await self._replace(config)
            log.info("configuration read again; changed: %s", ", ".join(sorted(changed)) or "nothing")
            return {"changed": sorted(changed - restart), "needs_restart": sorted(restart)}

    async def set_server(self, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Write a server down, and go by it; `needs_restart` where a flag of this daemon goes before it."""
        return await self._saved(await self.servers.save(base_url, api_key, model))

    async def set_device(self, model: str) -> dict[str, Any]:
        """The same for one of the models on this machine."""
        return await self._saved(await self.servers.save_device(model))

    async def _saved(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Go by what was just written."""
        await self.reload()
        written = await asyncio.to_thread(load, self.path)
        held = [key for key in saved["saved"] if get_value(self.config, key) != get_value(written, key)]
        return saved | {"needs_restart": bool(held)}

    async def _replace(self, config: Config) -> None:
        """Put other parts in the place of these, which end when their last answer has."""
        before, parts = self.parts, await asyncio.to_thread(self._make, config, self.parts)
        await self._prepare(parts, before)
        await self._end_tasks()
        try:
            self.privacy.on |= config.policy.private  # turned on before the swap, and off behind it
            await self.keeper.put_on(parts.stage, self.conductor.still_s)
            self.parts = parts
        finally:
            self.privacy.on = self.config.policy.private
            self._begin_tasks()
        await self._confine()

    async def _prepare(self, parts: Parts, before: Parts | None = None) -> None:
        """Let new parts know what is known already, from those `before` them or from disk, in threads."""
        if before is not None and names(before.config) == names(parts.config):
            learned = Knowledge.from_json(before.learner.planner.knowledge.to_json())
            await asyncio.to_thread(parts.learner.planner.restore, learned)
        else:
            await asyncio.to_thread(parts.learner.restore)
        if parts.measured is not None:
            parts.learner.planner.knowledge.profiled(*parts.measured.prior)
            await parts.learner.fit()
        if before is not None:
            parts.learner.planner.succeed(before.learner.planner)
        await parts.wattmeter.look()
        if parts.prober is not None:
            await asyncio.to_thread(parts.prober.restore)

    def _money(self) -> dict[str, Any]:
        """What the purse says; without a server nothing is scarce, and there is no price."""
        state = self.parts.purse.state(self.clock.wall())
        alone = Side.SERVER not in self.endpoints
        return state | {"server_price": None, "scarcer": None, "threshold_usd_per_kwh": None} if alone else state

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The latest requests, newest first; blocks on disk."""
        return self.history.recent(limit)

    def ledger(self, days: int) -> list[dict[str, Any]]:
        """What was spent on each of the latest days, newest first; blocks on disk."""
        return self.history.days(days)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen; yields the base URL. Raises ConfigError when the port is taken."""
        api = self.config.api
        doorkeeper = ApiConfig(
            api.host, api.key, api.any_user, frozenset(api.hosts), frozenset(api.origins), api.control_key
        )  # fmt: skip
        app = make_app(self.conductor, Reports(self), doorkeeper, self.metrics)
        kernel = Kernel() if doorkeeper.asks_users else None
        limits = Limits(api.receive_timeout_s, connections=files.connections(files.raise_limit()))
        runner = Runner(app, kernel, limits, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            if kernel is not None:
                stack.callback(kernel.close)
            stack.callback(self.foresight.close)
            stack.enter_context(claimed(self.history.path))
            await asyncio.to_thread(self.history.open)
            stack.push_async_callback(asyncio.to_thread, self.history.close)
            await asyncio.to_thread(restore, self.parts.purse, self.history, self.clock)
            await self._prepare(self.parts)
            stack.push_async_callback(self.keeper.end)
            await self.keeper.start()
            doors = opened(runner, doorkeeper, api.port, self.manager.sockets())
            self.url = await stack.enter_async_context(doors)
            whole = [
                asyncio.create_task(self.pulse.run(), name="pulse"),
                asyncio.create_task(self.manager.watch(), name="watchdog"),
            ]
            self._begin_tasks()
            try:
                yield self.url
            finally:
                await cancelled([*whole, *self._changes])
                await self._end_tasks()

    def _begin_tasks(self) -> None:
        """Start what the parts do by themselves."""
        parts = self.parts
        self._tasks = [
            asyncio.create_task(parts.learner.run(), name="learner"),
            asyncio.create_task(parts.wattmeter.run(), name="wattmeter"),
        ]
        if parts.prober is not None:
            self._tasks.append(asyncio.create_task(parts.prober.run(), name="prober"))
        if parts.autotuner is not None:
            self._tasks.append(asyncio.create_task(parts.autotuner.run(), name="autotuner"))

    async def _end_tasks(self) -> None:
        """End that; what was learned is saved."""
        tasks, self._tasks = self._tasks, []
        await cancelled(tasks)


def _how_to_set(key: str) -> str:
    """Why a setting is not changed over HTTP, and how it is."""
    if key.startswith("server."):
        way = "`disco setup` sets a server with its key"
    else:
        way = f"`disco config set {key} VALUE` writes it into config.toml, for the next start or `disco config reload`"
    return f"{key} is not changed over HTTP, only what a running daemon takes up is: {way}."


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End them, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
