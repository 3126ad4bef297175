"""The parts in force and the conductor that answers with them, and how both follow the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..conductor import AnswerContext, Conductor, Keeper
from ..config.layers import DEFAULT_SET, NOBODY_HERE, get_value, load, require_complete, set_values, with_values
from ..config.schema import FOR_LIFE, HOSTING, LIVE, MODELS, RULES, SERVERS, Config, keys
from ..endpoints.base import Endpoint, Forgetful
from ..errors import ConfigError, RequestError
from ..link.trust.roles import Role
from ..machines.fleet.members import FleetMembers
from ..machines.managed_device import device_of
from ..machines.member_service import MemberService
from ..machines.split.partner_service import Partner
from ..system.tasks import cancel_all
from ..types import Outcome, Side
from .assembly import Assembly
from .binding import bind_key

if TYPE_CHECKING:
    from ..machines.resident_device import ResidentModel
    from .named_models import NamedModels

log = logging.getLogger("disco.daemon")

T = TypeVar("T")


class Runtime:
    """Owns the parts in force, their background tasks and the conductor.

    `path` is where config.toml is; `flags` go before what it says, whenever that is read again. One change of the
    settings is carried out at a time, and to its end.
    """

    def __init__(
        self,
        assembly: Assembly,
        config: Config,
        path: Path,
        partner: Partner,
        flags: Mapping[str, Any] | None = None,
        members: FleetMembers | None = None,
    ) -> None:
        self.parts = assembly.make(config, self._busy)
        self.parts.commit()
        self.keeper = Keeper(self.parts.context)
        self.conductor = Conductor(self.keeper, self._record, assembly.shared.book)
        self._assembly, self._path, self._flags, self._partner = assembly, path, flags, partner
        self._members = members or FleetMembers()
        self._members.changed = self.reload
        self.services: Mapping[Role, MemberService] = {one.role: one for one in (partner, self._members)}
        self.local: NamedModels | None = None
        self.hold_fetches: Callable[[], Awaitable[None]] | None = None
        self._privacy = assembly.shared.privacy
        self._follow_rules()
        self._tasks: list[asyncio.Task[None]] = []
        self._changes: set[asyncio.Task[Any]] = set()
        self._reloading = asyncio.Lock()

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.parts.config

    @property
    def endpoints(self) -> Mapping[Side, Endpoint]:
        """The endpoints of the next request."""
        return self.parts.endpoints

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Hand the first parts what is known, and open their endpoints."""
        await self.parts.prepare()
        await self._confine()
        models = await self._made_models(self.config)
        await self.keeper.start()
        await self._follow_models(self.config, models)
        await self._follow()

    def start_tasks(self) -> None:
        """Start the background tasks of the parts."""
        self._tasks = self.parts.start_tasks()

    async def end_tasks(self) -> None:
        """End the background tasks; the learner saves what was learned."""
        tasks, self._tasks = self._tasks, []
        await cancel_all(*tasks)

    async def stop(self) -> None:
        """End changes that are under way, and the background tasks."""
        await cancel_all(*self._changes)
        await self._partner.close()
        if self.local is not None:
            await self.local.close()
        await self.end_tasks()

    async def _follow(self) -> None:
        for service in self.services.values():
            await service.follow(self.config)

    # --- settings -----------------------------------------------------------------------------------------------------

    async def change(self, changes: Mapping[str, Any]) -> None:
        """Write live settings into config.toml and apply them. Raises ConfigError, RequestError: then nothing is."""
        for key in changes:
            if key in keys() and key not in LIVE:
                raise RequestError(_how_to_set(key), status=403, param=key, code="not_live")
        await self._whole(self._change(changes))

    async def _change(self, changes: Mapping[str, Any]) -> None:
        def require_device(written: Config) -> None:
            self.parts.under(written)
            chosen = {"policy.private", "policy.set"} & changes.keys()
            if chosen and written.policy.private and Side.DEVICE not in self.endpoints:
                raise ConfigError(NOBODY_HERE)

        async with self._reloading:
            written = await asyncio.to_thread(set_values, self._path, changes, require_device)
            wanted = {key: get_value(written, key) for key in changes}
            if "policy.set" in changes:  # what it sets besides, as far as no variable and no flag says it
                from ..config.policy_sets import keys_of_sets

                layered = await asyncio.to_thread(load, self._path, flags=self._flags)
                wanted |= {key: get_value(layered, key) for key in keys_of_sets()}
            await self._apply(with_values(self.config, wanted))

    async def reload(self) -> dict[str, Any]:
        """Read config.toml again, and go by it from the next request on; running answers go on as they began.

        Returns which settings changed, and which of them need a restart. Raises ConfigError, and then nothing changes.
        """
        return await self._whole(self._reload())

    async def _reload(self) -> dict[str, Any]:
        async with self._reloading:
            config = await asyncio.to_thread(load, self._path, flags=self._flags)
            require_complete(config)
            config = await asyncio.to_thread(bind_key, config, self._path, self.config.server.key_origin)
            changed = {key for key in keys() if get_value(config, key) != get_value(self.config, key)}
            restart = {key for key in changed if key.startswith(FOR_LIFE)}
            if config.models != self.config.models:
                changed.add(MODELS)
            if config.rules != self.config.rules:
                changed.add(RULES)
            if config.servers != self.config.servers:
                changed.add(SERVERS)
            config = with_values(config, {key: get_value(self.config, key) for key in restart})
            models = await self._made_models(config)
            taken_up = changed - restart
            if taken_up and all(key in LIVE or key.startswith((*HOSTING, MODELS, RULES)) for key in taken_up):
                await self._apply(config)
                for endpoint in self.endpoints.values():
                    if isinstance(endpoint, Forgetful):
                        endpoint.forget()
            else:  # where no setting has changed, a file has that one names: the key, a price list, a template
                await self._replace(config)
            await self._follow_models(config, models)
            await self._follow()
            log.info("configuration read again; changed: %s", ", ".join(sorted(changed)) or "nothing")
            return {"changed": sorted(taken_up), "needs_restart": sorted(restart)}

    async def _made_models(self, config: Config) -> dict[str, ResidentModel]:
        """Return the models of `[[models]]`, for `_follow_models`; nothing has changed yet. Raises ConfigError."""
        if self.local is None and config.models:
            from .named_models import NamedModels  # a daemon of one model needs none of it

            self.local = NamedModels(
                self._assembly.shared, lambda: self.parts, self._busy, self.keeper.loaders
            )  # fmt: skip
        return {} if self.local is None else await self.local.made(config)

    async def _follow_models(self, config: Config, models: dict[str, ResidentModel]) -> None:
        """Have these models from the next request on."""
        if self.local is not None:
            await self.local.follow(config, models)
            self.conductor.local = self.local

    def _follow_rules(self) -> None:
        """Have the rules of the settings in force decide from the next request on."""
        config = self.config
        if not config.rules and config.policy.set == DEFAULT_SET:  # a daemon without rules loads none of it
            self.conductor.rules = None
            return
        from .device_answers import DeviceAnswers
        from .making_rules import make_ruling

        shared = self._assembly.shared
        device = self.parts.endpoints.get(Side.DEVICE)
        model = "" if device is None else device.model
        answers = DeviceAnswers(shared.history, lambda: self.conductor.in_flight.n_served, model)
        self.conductor.rules = make_ruling(self.parts, shared.clock, answers)

    async def new_code(self, role: Role, address: str) -> dict[str, Any]:
        """Make a code for a machine that joins in a role; turn its settings on if need be. Raises ConfigError."""
        service = self.services[role]
        turned_on = not service.is_enabled(self.config)
        if turned_on:
            await asyncio.to_thread(set_values, self._path, service.turned_on)
            await self.reload()
            if not service.is_enabled(self.config):
                msg = f"{next(iter(service.turned_on))} is held to false by a variable or a flag of this daemon"
                raise ConfigError(msg)
        return await service.make_code(address) | {"turned_on": turned_on}

    async def reload_written(self, written: Collection[str]) -> bool:
        """Reload after those settings were written; return whether a flag of this daemon holds one of them back."""
        await self.reload()
        config = await asyncio.to_thread(load, self._path)
        return any(get_value(self.config, key) != get_value(config, key) for key in written)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Carry a change out to its end, also when the client that asked for it leaves: half of one is none."""
        task = asyncio.create_task(change, name="change")
        self._changes.add(task)
        task.add_done_callback(self._forget_change)
        await asyncio.wait([task])
        return task.result()

    def _forget_change(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # raised in `_whole`, if the client is still there

    async def _apply(self, config: Config) -> None:
        """Go by other live settings from now on. Raises ConfigError, and then nothing changes."""
        parts = self.parts.under(config)
        parts.commit()
        self.parts = parts
        self._follow_rules()
        self._privacy.on = config.policy.private
        await self._confine()
        await self.parts.pursue()

    async def _replace(self, config: Config) -> None:
        """Replace the parts by new ones; the old ones end when their last answer has.

        If anything fails on the way, nothing of the old ones has changed: what they share with the new ones goes by the
        new settings in the moment of the swap.
        """
        before = self.parts
        parts = await asyncio.to_thread(self._assembly.make, config, self._busy, before)

        def commit() -> None:
            parts.commit(before)
            self.parts = parts
            self._follow_rules()

        await parts.prepare(before)
        try:
            await self.end_tasks()
            self._privacy.on |= config.policy.private  # turned on before the swap, and off behind it
            await self.keeper.use(parts.context, self.conductor.in_flight.still_s, commit)
        finally:
            self._privacy.on = self.config.policy.private
            self.start_tasks()
        await self._confine()

    async def _confine(self) -> None:
        """End requests to servers, fetches, and whatever the device sends to others, if the settings say private.

        When this returns, nothing is being sent to another machine.
        """
        await self.parts.device.hold(private=self._privacy.on)
        await self._members.hold(private=self._privacy.on)
        if self.hold_fetches is not None:
            await self.hold_fetches()
        if self._privacy.on:
            if self.parts.prober is not None:
                await self.parts.prober.stop()
            if self.parts.context.servers is not None:
                await self.parts.context.servers.stop()
            await self.conductor.in_flight.confine()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return len(self.conductor.in_flight) > 0 or self._partner.is_working

    def _record(self, context: AnswerContext, outcome: Outcome) -> None:
        """Record one finished answer with the learner, the metrics and the prober; none of them blocks."""
        self._assembly.shared.metrics.observe(outcome)
        if self.local is not None and self.local.record(context, outcome):
            return
        if context.servers is not None and context.servers.record(context, outcome):
            return
        self.parts.learner.record(outcome)
        device_of(context.endpoints).observe(outcome)
        is_same = context.endpoints.get(Side.SERVER) is self.endpoints.get(Side.SERVER)
        if context.servers is not None:  # an answer's own server is one of these
            is_same = context.servers is self.parts.context.servers
        if self.parts.prober is not None and is_same:
            self.parts.prober.observe(outcome)


def _how_to_set(key: str) -> str:
    """Return the error for a setting that is not changed over HTTP, with the way to change it."""
    if key.startswith("server."):
        way = "`disco setup` sets a server with its key"
    else:
        when = "the next start" if key.startswith(FOR_LIFE) else "the next start or `disco config reload`"
        way = f"`disco config set {key} VALUE` writes it into config.toml, for {when}"
    return f"{key} is not changed over HTTP, only what a running daemon takes up is: {way}."
