"""The composition root: makes the daemon out of its parts, and runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from .. import __version__
from ..api.app import ApiConfig, make_app
from ..api.metrics import Metrics
from ..clock import Clock, SystemClock
from ..conductor import Conductor, Manner, Stage
from ..config import (
    NOBODY_HERE,
    as_dict,
    data_path,
    get_value,
    require_complete,
    set_values,
    with_values,
)
from ..endpoints.device import Device
from ..endpoints.server import Server
from ..endpoints.shaper import Shape
from ..errors import ConfigError
from ..learning import Learner
from ..money.purse import Asked, Purse, Speeds
from ..net import without_credentials
from ..prober import Prober
from ..pulse import Pulse
from ..scheduling.migrate import Costs
from ..scheduling.mover import CostMover, Forced, Mover, Stay
from ..scheduling.planner import Planner
from ..settings import LIVE, Config
from ..store import History
from ..types import Delivery, Outcome, Side, Usage
from ..wattmeter import Wattmeter
from . import paying, tuning
from .foresight import Foresight, policy_of
from .sides import make_endpoints

SWITCH_INTERVAL_S = 0.001
PROBE = Asked(200, max_tokens=200)  # what a probe may cost, tokens; it asks several times, in little pieces
FLIP_S = 60.0  # between two changes of the scarcer side that nobody asked for
SHUTDOWN_TIMEOUT_S = 5.0  # running answers may finish for this long after a SIGTERM


class Daemon:
    """All parts of one daemon; `serving()` starts and stops them in order. `path` is where its config.toml is."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        shape: Shape | None = None,
        force: tuple[int, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        require_complete(config)
        self.config = config
        self.path = path
        self.clock = clock or SystemClock()
        self.endpoints = make_endpoints(config, self.clock, shape)
        self.history = History(
            Path(config.history.path).expanduser() if config.history.path else data_path() / "history.sqlite",
            max_rows=config.history.max_rows,
            keep_text=config.history.keep_text,
        )
        self._measured = tuning.measured(config)
        self.purse = paying.make_purse(config, path.parent / "servers", self.clock)
        self.pulse = Pulse(self.clock)
        self.learner = Learner(make_planner(config, self.purse), self.history, self.clock, _names(config))
        self._costs = CostMover(self.learner.planner, self._per_token, stops_billing=self.purse.stops_billing)
        self.wattmeter = Wattmeter(
            paying.make_sensors(config),
            self.purse,
            self.clock,
            speeds=self._speeds,
            changed=self._reconsider,
            known=None if self._measured is None else self._measured.known_energy,
        )
        self._flipped_at = -math.inf
        self.metrics = Metrics()
        server = self.endpoints.get(Side.SERVER)
        self.prober = (
            Prober(
                server,
                self.history,
                self.clock,
                enabled=config.server.probe,
                affordable=self._may_probe,
                book=self._book_probe,
            )
            if isinstance(server, Server)
            else None
        )
        stage = Stage(
            endpoints=self.endpoints,
            planner=self.learner.planner,
            mover=make_mover(config, self._costs, force),
            clock=self.clock,
            purse=self.purse,
            disturbed=self.pulse.disturbed,
            effort=self.wattmeter,
            shadow=config.policy.shadow,
            private=config.policy.private,
            keep_text=config.history.keep_text,
            manner=make_manner(config),
        )
        self.conductor = Conductor(stage, self._record)
        device = self.endpoints.get(Side.DEVICE)
        busy = lambda: self.conductor.in_flight > 0  # noqa: E731
        self.autotuner = (
            tuning.make_autotuner(config, device.engine, busy, self.clock) if isinstance(device, Device) else None
        )
        self.foresight = Foresight(
            self.history.path, path.parent / "servers", self.clock, lambda: self.conductor.n_served
        )  # fmt: skip
        self._started = self.clock.now()
        self.url = ""

    def _may_probe(self) -> bool:
        return not self.config.policy.private and self.purse.check(Side.SERVER, PROBE, self.clock.wall()) is None

    def _book_probe(self, spent: Usage) -> None:
        """A probe is a row of its own in the ledger."""
        attempt = paying.probe_attempt(self.purse, self.config.server.model, spent)
        if attempt.bill_usd or spent.completion_tokens:
            self.purse.book(attempt, self.clock.wall())
            outcome = paying.probe_outcome(attempt, self.clock)
            self.history.record(outcome)
            self.metrics.observe(outcome)

    def _record(self, outcome: Outcome) -> None:
        """One finished answer goes to everybody who keeps count; none of them blocks."""
        self.learner.record(outcome)
        self.metrics.observe(outcome)
        if self.prober is not None:
            self.prober.saw(outcome)

    def state(self) -> dict[str, Any]:
        """What `disco status` shows."""
        conductor = self.conductor
        return {
            "version": __version__,
            "pid": os.getpid(),
            "url": self.url,
            "cpu_s": round(time.process_time(), 4),
            "uptime_s": round(self.clock.now() - self._started, 1),
            "policy": self.learner.planner.policy.name,
            "private": self.config.policy.private,
            "endpoints": {side.value: endpoint.status() for side, endpoint in self.endpoints.items()},
            "in_flight": conductor.in_flight,
            "served": conductor.n_served,
            "loop_lag_ms": {"p50": self.pulse.quantile_ms(0.5), "p99": self.pulse.quantile_ms(0.99)},
            "learned": self.learner.state(),
            "money": self._money(),
            "energy": self.wattmeter.state(),
            "tune": self.autotuner.state if self.autotuner is not None else None,
            "history": {"path": str(self.history.path), "dropped": self.history.dropped},
        }

    def plan(self, tokens: int, waited_s: float) -> dict[str, Any]:
        """What would be done now with a prompt of so many tokens, and why."""
        readiness = {side: endpoint.readiness() for side, endpoint in self.endpoints.items()}
        explained = self.learner.planner.explain(tokens, readiness, waited_s)
        prices, speeds = self.purse.prices, self._speeds()
        costs = prices.per_token(speeds.prefill_tps, speeds.decode_tps)
        return explained | {"usd_per_kwh": prices.usd_per_kwh, "costs_usd_per_token": costs}

    def _speeds(self) -> Speeds:
        return Speeds(1 / self.learner.planner.knowledge.device.k, self._costs.decode_tps[Side.DEVICE])

    def _per_token(self, prefill_tps: float, decode_tps: float) -> Costs:
        return Costs(**self.purse.prices.per_token(prefill_tps, decode_tps))

    def _reconsider(self, *, asked: bool = False) -> None:
        """Limit the side that is scarce now; by itself that changes once a minute at most, however noisy a sensor."""
        planner, settings = self.learner.planner, self.config.policy
        scarcer = Side(settings.scarcer) if settings.scarcer != "auto" else self.purse.regime.scarcer
        if scarcer is not planner.constrained and not asked:
            if self.clock.now() - self._flipped_at < FLIP_S:
                return
            self._flipped_at = self.clock.now()
        self.learner.constrain(scarcer, settings.budget)

    def settings(self) -> dict[str, Any]:
        """All settings in force, by section, and which of them a running daemon takes up."""
        return {"settings": as_dict(self.config), "live": sorted(LIVE)}

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write settings into config.toml and take up those that are live. Raises ConfigError, and then nothing is."""

        def somebody(written: Config) -> None:
            if "policy.private" in changes and written.policy.private and Side.DEVICE not in self.endpoints:
                raise ConfigError(NOBODY_HERE)

        written = await asyncio.to_thread(set_values, self.path, changes, somebody)
        live = {key: get_value(written, key) for key in changes if key in LIVE}
        self.config = with_values(self.config, live)
        self.purse.set_rate(self.config.device.usd_per_kwh)
        self.purse.set_limits(paying.limits(self.config))
        stage, policy = self.conductor.stage, self.config.policy
        stage.manner, stage.private = make_manner(self.config), policy.private
        if policy.private and self.prober is not None:
            await self.prober.stop()
        self.learner.planner.pursue(policy_of(policy))
        self._reconsider(asked=True)
        if self.learner.planner.due:
            await self.learner.fit()
        restart = sorted(set(changes) - LIVE)
        return self.settings() | {"changed": sorted(changes), "needs_restart": restart, "money": self._money()}

    def _money(self) -> dict[str, Any]:
        """What the purse says; without a server nothing is scarce, and there is no price."""
        state = self.purse.state(self.clock.wall())
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
        app = make_app(self.conductor, _Reports(self), ApiConfig(api.host, api.key), self.metrics)
        # Without handler_cancellation a client's disconnect would go unnoticed until the next write.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.foresight.close)
            await asyncio.to_thread(self.history.open)
            stack.push_async_callback(asyncio.to_thread, self.history.close)
            await asyncio.to_thread(self.learner.restore)
            if self._measured is not None:
                self.learner.planner.knowledge.profiled(*self._measured.prior)
                await self.learner.fit()
            await asyncio.to_thread(paying.restore, self.purse, self.history, self.clock)
            await self.wattmeter.look()
            if self.prober is not None:
                await asyncio.to_thread(self.prober.restore)
            for endpoint in self.endpoints.values():
                await endpoint.start()
                stack.push_async_callback(endpoint.close)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            try:
                await web.TCPSite(runner, api.host, api.port).start()
            except OSError as e:
                msg = (
                    f"cannot listen on {api.host}:{api.port}: {e.strerror or e}; is a daemon running already? (--port)"
                )
                raise ConfigError(msg) from e
            port = runner.addresses[0][1]
            self.url = f"http://{f'[{api.host}]' if ':' in api.host else api.host}:{port}/v1"
            tasks = [
                asyncio.create_task(self.pulse.run(), name="pulse"),
                asyncio.create_task(self.learner.run(), name="learner"),
                asyncio.create_task(self.wattmeter.run(), name="wattmeter"),
            ]
            if self.prober is not None:
                tasks.append(asyncio.create_task(self.prober.run(), name="prober"))
            if self.autotuner is not None:
                tasks.append(asyncio.create_task(self.autotuner.run(), name="autotuner"))
            try:
                yield self.url
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Reports:
    daemon: Daemon

    def state(self) -> dict[str, Any]:
        return self.daemon.state()

    def history(self, limit: int) -> list[dict[str, Any]]:
        return self.daemon.recent(limit)

    def ledger(self, days: int) -> list[dict[str, Any]]:
        return self.daemon.ledger(days)

    def plan(self, tokens: int, waited_s: float) -> dict[str, Any]:
        return self.daemon.plan(tokens, waited_s)

    def settings(self) -> dict[str, Any]:
        return self.daemon.settings()

    async def whatif(self, usd_per_kwh: float, budget: float, tail: Mapping[str, float]) -> dict[str, Any]:
        config = with_values(self.daemon.config, {f"policy.{knob}": value for knob, value in tail.items()})
        return await self.daemon.foresight.predict(config, usd_per_kwh, budget)

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return await self.daemon.change(changes)


def make_manner(config: Config) -> Manner:
    """How answers are delivered where the client does not say."""
    delivery = config.delivery
    return Manner(Delivery(delivery.mode), delivery.pace_tps, delivery.expected_ttft_s, config.handoff.stall_s)


def make_mover(config: Config, costs: CostMover, force: tuple[int, int] | None) -> Mover:
    """Who decides about moves: the costs, nobody, or an experiment."""
    if force is not None:
        return Forced(costs, *force)
    return costs if config.handoff.for_cost else Stay(costs)


def make_planner(config: Config, purse: Purse) -> Planner:
    """The planner for the configured policy; the scarcer side is the dearer one unless told otherwise."""
    settings = config.policy
    scarcer = Side(settings.scarcer) if settings.scarcer != "auto" else purse.regime.scarcer
    return Planner(policy_of(settings), scarcer, settings.budget, draw=random.random)


def _names(config: Config) -> str:
    """Whom the learned figures are about."""
    server = f"{without_credentials(config.server.base_url)} {config.server.model}"
    device = config.device.base_url or "engine"
    return f"{server} | {device} {config.device.model or 'default'}"


async def run_until_signal(daemon: Daemon, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with daemon.serving() as url:
        # What the imports left behind lives for ever: out of the collector's sight, or each full collection would walk
        # all of it and stop every stream for tens of milliseconds.
        # And a fit in its thread gives way to the loop within a millisecond, not five.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        announce(url)
        await stop.wait()


def announce_json(url: str) -> None:
    """One line for a parent process."""
    sys.stdout.write(json.dumps({"url": url, "pid": os.getpid(), "version": __version__}) + "\n")
    sys.stdout.flush()
