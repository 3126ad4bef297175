"""The JSON documents of a running daemon, as its API serves them, and the health snapshot for /metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date, datetime, timedelta
from typing import Any

from .. import __version__
from ..api.control.documents import By, Documents
from ..api.control.health import Budget, CapUse, HealthSnapshot
from ..api.names import ModelNames
from ..api.ollama.ollama_models import DeviceFile
from ..config.layers import as_dict, with_values
from ..config.schema import LIVE
from ..dispatch.planner import Planner
from ..dispatch.rules import NobodyLeft
from ..endpoints.base import Endpoint, Guarded
from ..endpoints.breaker import BreakerState
from ..endpoints.device import Device
from ..errors import ConfigError, EndpointError, RequestError
from ..keys.named_key import KeyTerms
from ..link.trust.roles import Role
from ..machines.device_settings import stand_in
from ..machines.managed_device import whole_device
from ..onboarding.saving import ENTRY
from ..types import EarlierAnswer, GenerationRequest, NextAct, Side
from .assembly import Shared
from .device_file import DeviceFiles
from .model_fetch import FetchError, ModelFetch, ModelFetches, named, offered
from .named_keys import NamedKeys
from .prediction import HistoryReplay
from .runtime import Runtime
from .server_setup import ServerSetup

CHOOSE_DEVICE = {"device.base_url", "device.enabled", "device.model"}  # what says which model is the device's
OPENNESS = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}
LOAD_S = 600.0  # that a fetched model has to get into memory, from a slow disk too


class StateDocuments(Documents):
    """The documents of one daemon. `url` is set when it listens."""

    def __init__(
        self,
        shared: Shared,
        runtime: Runtime,
        replay: HistoryReplay,
        setup: ServerSetup,
        named_keys: NamedKeys,
    ) -> None:
        self.url = ""
        self._shared, self._runtime, self._replay, self._setup = shared, runtime, replay, setup
        self._keys = named_keys
        self._started = shared.clock.now()
        self._files = DeviceFiles()
        self._offering = asyncio.Lock()
        kept = shared.history.path.with_name("fetches.json")
        self._fetches = ModelFetches(
            self._use_fetched, lambda: shared.privacy.on, lambda: runtime.config.device.model, shared.clock, kept
        )
        runtime.hold_fetches = lambda: self._fetches.hold(runtime.config.device.model)

    async def close(self) -> None:
        """Stop what works in the background for these documents; none of it begins again."""
        await self._fetches.close()

    def resume_fetches(self) -> None:
        """Go on with the fetches that the end of an earlier daemon has stopped."""
        self._fetches.resume(self._runtime.config.device.model)

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        shared, runtime, parts = self._shared, self._runtime, self._runtime.parts
        monitor, history = shared.loop_monitor, shared.history
        state = {
            "version": __version__,
            "pid": os.getpid(),
            "url": self.url,
            "cpu_s": round(time.process_time(), 4),
            "uptime_s": round(shared.clock.now() - self._started, 1),
            "policy": parts.planner.policy.name,
            "private": shared.privacy.on,
            "policy_set": runtime.config.policy.set,
            "grades": parts.context.relation().to_json(),
            "endpoints": {side.value: endpoint.status() for side, endpoint in parts.endpoints.items()},
            "servers": self._servers(),
            "keys": self._keys.in_force(),
            "split": None,
            "models": [] if runtime.local is None else runtime.local.document(),
            "stand_in": stand_in(runtime.config),
            "fetch": self._fetches.document(),
            "fetches": self._fetches.documents(),
            "in_flight": len(runtime.conductor.in_flight),
            "tasks": len(asyncio.all_tasks()),
            "served": runtime.conductor.in_flight.n_served,
            "loop_lag_ms": {"p50": monitor.quantile_ms(0.5), "p99": monitor.quantile_ms(0.99)},
            "learned": parts.learner.state(),
            "money": self._money(),
            "energy": parts.wattmeter.state(),
            "tune": parts.autotuner.state if parts.autotuner is not None else None,
            "history": {"path": str(history.path), "dropped": history.dropped, "error": history.error},
        }
        return state | parts.device.document()

    def _servers(self) -> list[dict[str, Any]]:
        """Return what is known of each server: of one that stands alone, what there is of it elsewhere."""
        parts = self._runtime.parts
        if parts.context.servers is not None:
            return parts.context.servers.documents()
        if (server := parts.endpoints.get(Side.SERVER)) is None:
            return []
        status, learned = server.status(), parts.planner.state()["server_ttft"]
        seen = learned["quantiles_s"] if learned["n"] else {}
        return [
            {
                "name": Side.SERVER.value,
                "model": server.model,
                "state": status["state"],
                "breaker": status.get("breaker"),
                "ttft_p50_s": seen.get("p50"),
                "ttft_p99_s": seen.get("p99"),
                "share": 1.0,
                "hedges": parts.planner.hedges.n_hedges,
                "usd_today": parts.spending.caps.spent(self._shared.clock.wall()).usd_today,
                "base_url": status["base_url"],
                "down_s": status["down_s"],
                "last_error": status["last_error"],
                "price": parts.spending.price.to_json(),
            }
        ]

    def _money(self) -> dict[str, Any]:
        """Return prices, spending and caps; without a server nothing is scarce, and there is no price."""
        parts = self._runtime.parts
        state = parts.scarce_side.spending().state(self._shared.clock.wall())
        alone = Side.SERVER not in parts.endpoints
        return state | {"server_price": None, "scarcer": None, "threshold_usd_per_kwh": None} if alone else state

    async def device_files(self) -> dict[str, DeviceFile]:
        local = self._runtime.local
        devices = {"": self._runtime.parts.endpoints.get(Side.DEVICE)} | ({} if local is None else local.devices())
        found = {name: await self._files.describe(device) for name, device in devices.items()}
        return {name: file for name, file in found.items() if file is not None}

    def history(self, limit: int) -> list[dict[str, Any]]:
        return self._shared.history.recent(limit)

    def outdone(self, request_id: str) -> None:
        self._shared.history.follow(EarlierAnswer(request_id, NextAct.OUTDONE))

    def ledger(self, days: int) -> list[dict[str, Any]]:
        return self._shared.history.days(days)

    # --- keys with names ----------------------------------------------------------------------------------------------

    def usage(self, by: By, days: int) -> list[dict[str, Any]]:
        return self._shared.history.usage(by, self._first_of(days))

    async def usage_of_key(self, name: str, days: int) -> dict[str, Any]:
        own = next((key for key in self._keys.in_force() if key["name"] == name), {"name": name})
        return own | {"data": await asyncio.to_thread(self._shared.history.usage_of_key, name, self._first_of(days))}

    def _first_of(self, days: int) -> date:
        """Return the first of the latest local days, of which today is one."""
        today = datetime.fromtimestamp(self._shared.clock.wall()).date()  # noqa: DTZ006 - the user's own day is wanted
        return today - timedelta(days=days - 1)

    async def keys(self) -> list[dict[str, Any]]:
        return await self._keys.document()

    async def add_key(self, name: str, terms: KeyTerms) -> dict[str, Any]:
        return await self._keys.add(name, terms)

    async def change_key(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        return await self._keys.change(name, changes)

    async def revoke_key(self, name: str) -> dict[str, Any]:
        return await self._keys.revoke(name)

    # --- plans --------------------------------------------------------------------------------------------------------

    async def plan(self, tokens: int, waited_s: float, kind: Mapping[str, Any]) -> dict[str, Any]:
        parts, rules = self._runtime.parts, self._runtime.conductor.rules
        readiness = {side: endpoint.readiness() for side, endpoint in parts.endpoints.items()}
        available = frozenset(readiness) - ({Side.SERVER} if self._shared.privacy.on else set())
        ruled: dict[str, Any] = {}
        relation = parts.context.relation()
        if rules is not None:
            await rules.learn()
            ruled, available, relation = rules.explain(tokens, kind, available, relation)
        explained = parts.planner.explain(tokens, readiness, waited_s, available, relation) | ruled
        explained["servers"] = self._servers_for(tokens, kind, ruled.get("rule"), available)
        prices, speeds = parts.spending.prices, parts.device_speeds()
        costs = prices.per_token(speeds.prefill_tps, speeds.decode_tps)
        return explained | {"usd_per_kwh": prices.usd_per_kwh, "costs_usd_per_token": costs}

    def _servers_for(
        self, tokens: int, kind: Mapping[str, Any], decided: Mapping[str, Any] | None, available: frozenset[Side]
    ) -> list[dict[str, Any]]:
        """Return what several servers would be to a request of that kind, the one that is asked first; else nothing."""
        runtime, context = self._runtime, self._runtime.parts.context
        if context.servers is None or Side.SERVER not in available:
            return []
        ruling, rule = runtime.conductor.rules, None
        if ruling is not None and decided is not None:
            rule = next((one for one in ruling.rules if one.name == decided["name"]), None)
        asked = (rule and rule.model) or kind.get("model", "disco")
        try:
            found = ModelNames(runtime.conductor, runtime.config.api.aliases).find(asked)
        except RequestError:  # no such model: it gets a 404
            return []
        if Side.SERVER not in found.sides or found.local:
            return []
        request = replace(spoken_of(kind, servers=found.servers), allowed=available)
        if ruling is not None and rule is not None:
            try:
                request = ruling.narrow(request, rule)
            except NobodyLeft:  # of what was asked for by name
                return []
        return context.servers.explain(context, request, tokens)

    async def whatif(self, usd_per_kwh: float, budget: float, tail: Mapping[str, float]) -> dict[str, Any]:
        config = with_values(self._runtime.config, {f"policy.{knob}": value for knob, value in tail.items()})
        return await self._replay.predict(config, usd_per_kwh, budget)

    # --- settings -----------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        return {"settings": as_dict(self._runtime.config), "live": sorted(LIVE)}

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        await self._runtime.change(changes)
        return self.settings() | {"changed": sorted(changes), "needs_restart": [], "money": self._money()}

    async def reload(self) -> dict[str, Any]:
        return await self._keys.reload_with(self._runtime.reload)

    # --- other machines -----------------------------------------------------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        fleet = self._runtime.parts.device.fleet
        return whole_device() if fleet is None else fleet.document()

    def steer_fleet(self, order: str, host: str = "") -> dict[str, Any]:
        fleet = self._runtime.parts.device.fleet
        if fleet is None:
            raise ConfigError("the device is no fleet: `disco config set fleet.enabled true` makes it one")
        match order:
            case "pause":
                fleet.pause()
            case "resume":
                fleet.resume()
            case "drain":
                fleet.drain(host)
        return fleet.document()

    def machines(self, role: Role) -> dict[str, Any]:
        return self._runtime.services[role].document()

    async def new_code(self, role: Role, address: str) -> dict[str, Any]:
        return await self._runtime.new_code(role, address)

    async def revoke(self, role: Role, name: str) -> dict[str, Any]:
        return await self._runtime.services[role].revoke(name)

    # --- first steps --------------------------------------------------------------------------------------------------

    def providers(self) -> dict[str, Any]:
        return self._setup.providers()

    async def check_server(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        return await self._setup.check(base_url, api_key, model, name)

    async def set_server(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        return await self._reload_saved(await self._setup.save_server(base_url, api_key, model, name))

    async def set_device(self, model: str) -> dict[str, Any]:
        return await self._reload_saved(await self._setup.save_device(model))

    async def offers(self) -> dict[str, Any]:
        from ..machines.model_offers import recommendation  # asked now and then, while every start would wait for it
        from ..models.offered import offered_models

        async with self._offering:
            models = await asyncio.to_thread(offered_models, self._setup.folder)
            busy = self._runtime.conductor.in_flight
            found = await recommendation(self._runtime.config, models, may_measure=lambda: not len(busy))
        return found.to_json()

    async def fetch_model(self, name: str) -> dict[str, Any]:
        from ..models.offered import find, offered_models

        await self._setup.require_local()
        model = find(name, await asyncio.to_thread(offered_models, self._setup.folder))
        return self._fetches.start(offered(model, self._runtime.config.device.model)).document()

    async def pull_model(self, name: str) -> ModelFetch:
        from ..models.offered import offered_models

        return self._fetches.start(named(name, await asyncio.to_thread(offered_models, self._setup.folder)))

    async def cancel_fetch(self) -> dict[str, Any]:
        await self._fetches.cancel()
        return self._fetches.document() or {}

    async def _use_fetched(self, path: str) -> list[str]:
        """Put a model in use, and return what is to be said of that.

        Raises FetchError where it cannot be loaded; then it is gone back to the one before, with all that was its own.
        """
        saved = await self._setup.save_local(path)
        try:
            held = await self._runtime.reload_written(CHOOSE_DEVICE & saved.changes.keys())
            device = self._runtime.endpoints.get(Side.DEVICE)
            if not held and isinstance(device, Device):
                await device.engine.ready(LOAD_S)
        except EndpointError as e:
            await self._reload_saved(self._setup.told(await self._setup.take_back(saved)))
            raise FetchError(f"it cannot be loaded ({e}); the model before is in use again") from e
        except BaseException:  # the daemon ends, or cannot go by it: the next one must not begin with what nobody tried
            await self._setup.take_back(saved)
            raise
        if held:
            raise FetchError(f"{path} is fetched, but a flag or a variable of the running daemon names another model")
        return saved.notes()

    async def _reload_saved(self, saved: dict[str, Any]) -> dict[str, Any]:
        written = [key for key in saved["saved"] if not key.startswith(ENTRY)]  # no flag goes before a list's
        return saved | {"needs_restart": await self._runtime.reload_written(written)}

    # --- /metrics -----------------------------------------------------------------------------------------------------

    def health(self) -> HealthSnapshot:
        """Return the health of all parts as it is now; nothing here waits."""
        shared, runtime, parts = self._shared, self._runtime, self._runtime.parts
        caps: dict[str, dict[str, Any]] = parts.spending.caps.state(shared.clock.wall())
        return HealthSnapshot(
            version=__version__,
            in_flight=len(runtime.conductor.in_flight),
            may_serve={side: endpoint.may_serve() for side, endpoint in parts.endpoints.items()},
            breakers={name: OPENNESS[state] for name, state in _breakers(parts.endpoints.values())},
            budget=_budget(parts.planner),
            caps={name: _use(cap["limit"], cap["spent"], cap["reserved"]) for name, cap in caps.items()},
            usd_per_kwh=parts.spending.prices.usd_per_kwh,
            rows_dropped=shared.history.dropped,
            device=parts.device.health(),
        )


def spoken_of(kind: Mapping[str, Any], servers: tuple[str, ...] = ()) -> GenerationRequest:
    """Return a request that asks for what one of that `kind` does, with nothing else in it."""
    extra: dict[str, Any] = {}
    if kind.get("tools"):
        extra["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    if kind.get("schema"):
        schema = {"name": "s", "schema": {"type": "object"}}
        extra["response_format"] = {"type": "json_schema", "json_schema": schema}
    has_image = bool(kind.get("images"))
    content = [{"type": "image_url", "image_url": {"url": "data:"}}] if has_image else ""
    messages = ({"role": "user", "content": content},)
    return GenerationRequest("plan", messages, extra=extra, text_only=not has_image, servers=servers)


def _breakers(endpoints: Iterable[Endpoint]) -> Iterator[tuple[str, BreakerState]]:
    for endpoint in endpoints:
        if isinstance(endpoint, Guarded):
            yield from endpoint.breakers().items()


def _budget(planner: Planner) -> Budget:
    used = planner.pacer.realised()["last_200"]
    return Budget(planner.constrained, planner.budget, float(planner.pacer.handed_out()), used)


def _use(limit: float, spent: float, reserved: float) -> CapUse:
    """Return the shares of a cap; a cap of nothing is used up."""
    return CapUse(spent / limit, reserved / limit) if limit > 0 else CapUse(1.0, 0.0)
