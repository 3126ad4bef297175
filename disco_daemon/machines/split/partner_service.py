"""The partner's side of a split model: this machine computes the upper layers for machines that were paired with it.

The relay asks here who may fetch which layers. The layers here are those above the cut of the machines that have
joined: all of them have the same cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ...clock import Clock
from ...config.schema import Config
from ...engine import wire
from ...errors import ConfigError
from ...link.protocol import Build, Welcome
from ...link.relay.handshake import AskCuts
from ...link.relay.orders import (
    FileAsked,
    LinkDown,
    LinkStats,
    LinkUp,
    Member,
    MemberAnswer,
    MemberAsks,
    OfferFile,
    RefuseFile,
    RelayEvent,
)
from ...link.relay.relay_process import RelayLost
from ...link.rows.content import credits_for
from ...link.trust.roles import Role
from ...plain import reason_of
from ...types import LayerRange
from ..device_settings import model_path
from ..member_service import MemberService
from ..range_engine import RangeEngine
from .check import checksum
from .hosted_range import HostedCuts, range_config, require_memory, tell_cuts, write_ranges
from .linked_machines import LinkedMachines

LISTEN_S = 5.0  # for the relay to start and to listen


class Partner(MemberService):
    """Serves the machines that were paired, as the settings say.

    All mutable state, beside the service's: the engine while there is something to serve, what the relay last said of
    links, and the exit. `power` says what this machine draws more while it computes, W, and by which source; `worked`
    is called when it has just computed.
    """

    log = logging.getLogger("disco.link")
    role = Role.SPLIT
    turned_on = MappingProxyType({"partner.enabled": True})
    listen_s = LISTEN_S
    needs_own_model = "a partner computes with this machine's own model: set device.enabled, and no base_url"

    def __init__(
        self,
        clock: Clock,
        folder: Path | None = None,
        power: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
        worked: Callable[[], None] = lambda: None,
    ) -> None:
        self._cuts = HostedCuts(folder)
        super().__init__(self._cuts.folder)
        self._clock, self._power, self._worked = clock, power, worked
        self._host: RangeEngine | None = None
        self._layers: LayerRange | None = None
        self._links = LinkedMachines(clock)
        self._exit = ""

    # --- for the owner ------------------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """Whether another machine's answer is being computed here."""
        return self._links.is_working

    def document(self) -> dict[str, Any]:
        """Return who has joined, and how the link to each of them is. Reads files, so it blocks.

        With the last member the layers are served no more, though their engine may still be ending. What is loaded is
        looked at before who is a member, for whoever leaves is a member no more before the layers go.
        """
        host, layers = self._host, self._layers
        found, records = self._describe("serving" if host is not None else "waiting for a machine")
        if not records and found["state"] == "serving":
            found["state"] = "waiting for a machine"
        engine = host.engine if host is not None else None
        llama = self._build.llama if self._build is not None else ""
        has_all = layers is not None and layers.is_first
        return found | {
            "cut": layers.first if layers is not None and records else None,
            "engine": engine.state.value if engine is not None else None,
            "members": [self._links.describe(one.name, one.joined_at, llama, has_all=has_all) for one in records],
            "error": found["error"] or (engine.last_error if engine is not None else None),
        }

    # --- what is served -----------------------------------------------------------------------------------------------

    def is_enabled(self, config: Config) -> bool:
        """Whether this machine is a partner."""
        return config.partner.enabled

    def _listen_host(self, config: Config) -> str:
        return config.partner.listen

    def _forget(self, name: str) -> None:
        self._cuts.drop(name)

    async def _serve_members(self, config: Config, build: Build, members: tuple[Member, ...]) -> None:
        names, cuts = {member.name for member in members}, self._cuts.load()
        cut = next((cut for name, cut in cuts.items() if name in names), None)
        if cut is None:
            await self._stop_computing()
        else:
            await self._load(config, LayerRange(cut, build.n_layers, build.n_layers))
        self._tell()

    def _tell(self) -> None:
        """Tell the relay whom to serve, and what they get."""
        config, relay, build = self._config, self._relay, self._build
        assert config is not None
        assert build is not None
        if relay is None:
            return
        info = self._host.engine.info if self._host is not None else None
        watts, watts_from = self._power()
        welcome = Welcome(
            build=build,
            cut=self._layers.first if self._layers is not None else build.n_layers // 2,
            n_ctx=info.n_ctx if info is not None else config.device.divided_n_ctx,
            max_answers=config.partner.max_sessions,
            credits=credits_for(config.partner.max_sessions),
            exit=self._exit if self._layers is not None else "",
            watts=watts,
            watts_from=watts_from,
        )
        relay.serve(self._role(config, welcome))

    async def _admit(self) -> None:
        async with self._changing:
            self._tell()

    async def _load(self, config: Config, layers: LayerRange) -> None:
        """Have an engine with these layers; one with others ends first. Raises ConfigError."""
        _, upper, self._exit = await asyncio.to_thread(write_ranges, model_path(config.device), layers)
        wanted = await asyncio.to_thread(range_config, config, upper, layers)
        if self._host is not None and self._host.engine.config == wanted:
            return
        await self._stop_computing()
        assert self._relay is not None
        self._host, self._layers = RangeEngine(wanted, self._clock, self._relay, self._loaded), layers
        self._host.engine.start()

    def _loaded(self, info: wire.Loaded) -> None:
        """The range is in memory: who connects is told by which build it is computed."""
        assert self._build is not None
        self._build = msgspec.structs.replace(self._build, llama=info.build)
        self._tell()

    async def _stop_computing(self) -> None:
        host, self._host, self._layers = self._host, None, None
        if host is not None:
            await host.close()

    def _drop_machines(self) -> None:
        self._links.clear()

    # --- what the relay says ------------------------------------------------------------------------------------------

    def _hear_more(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case LinkUp(name=name, address=address):
                self._links.add(event)
                self.log.info("%s is linked from %s", name, address)
            case LinkDown(name=name, message=message):
                self._links.remove(name)
                if self._config is not None:  # who connects next hears of an exit that was trained in the meantime
                    self._begin(self.follow(self._config), "exit")
                self.log.info("the link to %s has ended: %s", name, message)
            case LinkStats():
                self._links.observe(event)
                self._worked()
            case FileAsked():
                self._begin(self._offer(event), "layers")
            case MemberAsks(asked=AskCuts()):
                self._begin(self._answer_cuts(event), "cuts")
            case RelayLost():
                self._links.clear()
                if self._host is not None:
                    self._host.replace_socket()

    async def _answer_cuts(self, asked: MemberAsks) -> None:
        """Say where the model may be cut; for a machine that is alone, anywhere."""
        relay, config = self._relay, self._config
        if relay is None or config is None:
            return
        try:
            hosted = next(iter(self._cuts.of_others(asked.name).values()), 0)
            cuts = await asyncio.to_thread(tell_cuts, config, hosted)
            relay.send(MemberAnswer(n=asked.n, given=cuts))
        except (ConfigError, OSError) as e:
            relay.send(MemberAnswer(n=asked.n, reason="no_file", message=reason_of(e)))

    async def _offer(self, asked: FileAsked) -> None:
        """Cut the model for a member, load the layers above, and hand over those below; or say why not."""
        async with self._changing:
            relay, config = self._relay, self._config
            if relay is None or config is None:
                return
            try:
                offer, path = await self._prepare(config, asked)
            except (ConfigError, OSError) as e:
                self.log.warning("%s gets no layers: %s", asked.name, e)
                relay.send(RefuseFile(cut=asked.cut, message=reason_of(e)))
                return
            with path.open("rb") as file:
                relay.offer(offer, file.fileno())

    async def _prepare(self, config: Config, asked: FileAsked) -> tuple[OfferFile, Path]:
        build = await self._build_of(config)
        if not 0 <= asked.cut < build.n_layers:
            raise ConfigError(f"the model has {build.n_layers} layers: cut it behind 1 to {build.n_layers - 1} of them")
        others = [cut for cut in self._cuts.of_others(asked.name).values() if cut != asked.cut]
        if others:  # whose they are, no other member hears
            how = f"--cut {others[0]}" if others[0] else "--draft, for it has all of them"
            msg = f"the partner has the layers from {others[0]} on, for another machine: use {how}, or revoke that"
            raise ConfigError(msg)
        model, layers = model_path(config.device), LayerRange(asked.cut, build.n_layers, build.n_layers)
        if self._layers != layers:
            await self._stop_computing()
            await asyncio.to_thread(require_memory, config, model, layers)
        lower, _, _ = await asyncio.to_thread(write_ranges, model, layers)
        digest = await asyncio.to_thread(checksum, lower)
        await asyncio.to_thread(self._cuts.put, asked.name, asked.cut)
        await self._load(config, layers)
        self._tell()
        return OfferFile(cut=asked.cut, n_bytes=lower.stat().st_size, sha256=digest), lower
