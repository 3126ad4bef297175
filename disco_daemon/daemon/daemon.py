"""The daemon: makes its parts, and serves until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from ..api.app import make_app
from ..api.control.metrics import Metrics
from ..api.http.connections import ConnectionLimits, Runner
from ..api.http.guard import ApiConfig
from ..api.http.listening import open_doors
from ..api.http.peers import Kernel
from ..clock import Clock, SystemClock
from ..conductor import Conductor, Privacy
from ..conductor.traces import Traces
from ..config.layers import data_path, require_complete
from ..config.schema import Api, Config, HistorySettings
from ..endpoints.shaper import Shape
from ..engine.early import EarlyEngine
from ..keys.keyring import Keyring
from ..machines.fleet.members import FleetMembers
from ..machines.split.partner_service import Partner
from ..onboarding.setup import Onboarding
from ..service.notify import ServiceChannel
from ..store import History
from ..store.history_lock import claimed
from ..system.tasks import cancel_all
from . import open_files
from .assembly import Assembly, Shared
from .binding import bind_key
from .money import restore
from .named_keys import NamedKeys
from .prediction import HistoryReplay
from .runtime import Runtime
from .server_setup import ServerSetup
from .state import StateDocuments
from .tasks.loop_monitor import LoopMonitor

SHUTDOWN_TIMEOUT_S = 5.0  # after a SIGTERM, for what is not an answer, such as a page of the history


class Daemon:
    """One daemon; `serving()` starts and stops its parts in order. `path` is where its config.toml is.

    `flags` go before what config.toml says, whenever that is read again. The first engine has the `early` process.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        shape: Shape | None = None,
        force: tuple[int, int] | None = None,
        clock: Clock | None = None,
        manager: ServiceChannel | None = None,
        flags: Mapping[str, Any] | None = None,
        early: EarlyEngine | None = None,
    ) -> None:
        require_complete(config)
        config = bind_key(config, path)
        clock = clock or SystemClock()
        metrics = Metrics(lambda: self.documents.health())
        price_lists = path.parent / "servers"
        self.manager = manager or ServiceChannel({})
        self.members = FleetMembers()
        self.shared = Shared(
            clock=clock,
            history=_history(config.history),
            metrics=metrics,
            loop_monitor=LoopMonitor(clock, metrics.observe_lag),
            privacy=Privacy(config.policy.private),
            traces=Traces(),
            price_lists=price_lists,
            members=self.members,
        )
        self.partner = Partner(
            clock,
            power=lambda: self.runtime.parts.wattmeter.computing(),
            worked=lambda: self.runtime.parts.wattmeter.observe_others(),
        )
        assembly = Assembly(self.shared, shape, force, early)
        self.runtime = Runtime(assembly, config, path, self.partner, flags, self.members)
        self._replay = HistoryReplay(
            self.shared.history, price_lists, clock, lambda: self.runtime.conductor.in_flight.n_served
        )  # fmt: skip
        setup = ServerSetup(Onboarding(path, os.environ, config.api.port, lambda: self.shared.privacy.on))
        self.named_keys = NamedKeys(
            path, self.shared.history, clock, lambda: self.runtime.parts.spending.caps, lambda: self.conductor
        )
        self.documents = StateDocuments(self.shared, self.runtime, self._replay, setup, self.named_keys)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.runtime.config

    @property
    def conductor(self) -> Conductor:
        """The conductor of all answers."""
        return self.runtime.conductor

    @property
    def url(self) -> str:
        """The base URL; empty before the daemon listens."""
        return self.documents.url

    async def reload(self) -> None:
        """Read config.toml again, and go by it from the next request on. Raises ConfigError, and nothing changes."""
        await self.documents.reload()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen; yields the base URL. Raises ConfigError when the port is taken."""
        shared, runtime, api = self.shared, self.runtime, self.config.api
        doorkeeper = _doorkeeper(api, self.named_keys.ring)
        app = make_app(self.conductor, self.documents, doorkeeper, shared.metrics)
        kernel = Kernel() if doorkeeper.asks_users else None
        limits = ConnectionLimits(api.receive_timeout_s, connections=open_files.connections(open_files.raise_limit()))
        runner = Runner(app, kernel, limits, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            if kernel is not None:
                stack.callback(kernel.close)
            stack.callback(self._replay.close)
            stack.enter_context(claimed(shared.history.path))
            await asyncio.to_thread(shared.history.open)
            stack.push_async_callback(asyncio.to_thread, shared.history.close)
            await asyncio.to_thread(restore, runtime.parts.spending, shared.history, shared.clock)
            await self.named_keys.start()
            stack.push_async_callback(self.members.close)  # behind the engines that have its hosts
            stack.push_async_callback(runtime.keeper.end)
            await runtime.start()
            doors = open_doors(runner, doorkeeper, api.port, self.manager.sockets(), api.ollama_port)
            self.documents.url = await stack.enter_async_context(doors)
            watching = [
                asyncio.create_task(shared.loop_monitor.run(), name="loop-monitor"),
                asyncio.create_task(self.manager.watch(), name="watchdog"),
            ]
            try:
                runtime.start_tasks()
                self.documents.resume_fetches()
                yield self.url
            finally:
                await self.documents.close()  # before the doors: what ends a client's stream ends no fetch
                await cancel_all(*watching)
                await runtime.stop()


def _history(settings: HistorySettings) -> History:
    return History(
        Path(settings.path).expanduser() if settings.path else data_path() / "history.sqlite",
        max_rows=settings.max_rows,
        keep_text=settings.keep_text,
    )


def _doorkeeper(api: Api, ring: Keyring) -> ApiConfig:
    return ApiConfig(
        api.host, api.key, api.any_user, frozenset(api.hosts), frozenset(api.origins), api.control_key, api.aliases,
        ring,
    )  # fmt: skip
