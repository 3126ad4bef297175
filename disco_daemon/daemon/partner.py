"""The partner's side of a split model: this machine computes the upper layers for machines that were paired with it.

Nothing listens, and no process runs, before a code was made or a machine has joined. The relay asks here whatever is to
be decided: who gets a certificate, who may fetch which layers. The layers here are those above the cut of the machines
that have joined: all of them have the same cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from ..clock import Clock
from ..config.schema import Config
from ..engine import wire
from ..errors import ConfigError
from ..peer.addresses import own_addresses
from ..peer.content import credits_for
from ..peer.control import (
    Address,
    CutsAnswer,
    CutsAsked,
    FileAsked,
    LinkDown,
    LinkStats,
    LinkUp,
    Listening,
    MemberLeaves,
    OfferFile,
    PairAnswer,
    PairAsked,
    RefusalCounts,
    RefuseFile,
    RelayEvent,
    ServeMembers,
)
from ..peer.daemon_side import RelayLost, RelayProcess
from ..peer.messages import Build, Welcome
from ..peer.pairing import Issuer
from ..peer.pairing_code import ADDRESSES_MAX, PairingError, format_code
from ..types import LayerRange
from .device import model_path
from .hosted_range import HostedCuts, describe_model, range_config, require_memory, tell_cuts, write_ranges
from .linked import LinkedMachines
from .range_engine import RangeEngine
from .split import checksum
from .tasks import cancel_all

log = logging.getLogger("disco.peer")

LISTEN_S = 5.0  # for the relay to start and to listen


class Partner:
    """Serves the machines that were paired, as the settings say. One change is carried out at a time.

    All mutable state: the settings, the relay and the engine while there is something to serve, the tasks that answer
    the relay, what it last said of port and links, the exit, and the reason why nothing is served. `power` says what
    this machine draws more while it computes, W, and by which source; `worked` is called when it has just computed.
    """

    def __init__(
        self,
        clock: Clock,
        folder: Path | None = None,
        power: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
        worked: Callable[[], None] = lambda: None,
    ) -> None:
        self._cuts = HostedCuts(folder)
        self._clock, self._issuer, self._power, self._worked = clock, Issuer(self._cuts.folder), power, worked
        self._config: Config | None = None
        self._relay: RelayProcess | None = None
        self._host: RangeEngine | None = None
        self._layers: LayerRange | None = None
        self._build: Build | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._listening = asyncio.Condition()
        self._port: int | None = None
        self._links = LinkedMachines(clock)
        self._error = self._exit = ""

    # --- for the owner ------------------------------------------------------------------------------------------------

    async def follow(self, config: Config) -> None:
        """Go by these settings from now on. Raises nothing: what is wrong is shown by `document`."""
        async with self._changing:
            self._config = config
            try:
                await self._serve()
            except ConfigError as e:
                self._error = str(e)
                log.warning("no other machine is served: %s", e)

    async def pair(self, address: str) -> dict[str, Any]:
        """Make a code for one machine, and listen for it. Raises ConfigError; then nothing listens for it."""
        config = self._config
        assert config is not None
        addresses = [address] if address else own_addresses(config.partner.listen)[:ADDRESSES_MAX]
        async with self._changing:
            await self._build_of(config)  # first: a model that cannot be hosted needs no code
            code = await asyncio.to_thread(
                self._issuer.new_code, [Address(host=host, port=config.peer.port) for host in addresses]
            )
            await self._serve()
        await self._wait_for_port()
        ends_at = await asyncio.to_thread(self._issuer.code_ends_at)
        return {
            "code": format_code(code),
            "expires_s": round(max(0.0, (ends_at or 0.0) - time.time())),
            "name": self._issuer.name,
            "addresses": [str(one) for one in code.addresses],
        }

    async def revoke(self, name: str) -> dict[str, Any]:
        """Refuse a machine from now on. Raises ConfigError for a name that no member has."""
        async with self._changing:
            await asyncio.to_thread(self._issuer.revoke, name)
            await asyncio.to_thread(self._cuts.drop, name)
            await self._serve()
        return {"revoked": name}

    @property
    def is_working(self) -> bool:
        """Whether another machine's answer is being computed here."""
        return self._links.is_working

    def document(self) -> dict[str, Any]:
        """Return who has joined, and how the link to each of them is."""
        config, records, code_ends_at, error = self._config, [], None, self._error
        try:
            records, code_ends_at = self._issuer.records(), self._issuer.code_ends_at()
        except PairingError as e:
            error = str(e)
        engine = self._host.engine if self._host is not None else None
        llama = self._build.llama if self._build is not None else ""
        has_all = self._layers is not None and self._layers.is_first
        return {
            "enabled": config is not None and config.partner.enabled,
            "state": self._state(),
            "listening": f"{config.partner.listen}:{self._port}" if config is not None and self._port else None,
            "cut": self._layers.first if self._layers is not None else None,
            "relay_pid": self._relay.pid if self._relay is not None else None,
            "engine": engine.state.value if engine is not None else None,
            "code_expires_s": round(code_ends_at - time.time()) if code_ends_at is not None else None,
            "members": [self._links.describe(one.name, one.joined_at, llama, has_all=has_all) for one in records],
            "refused": self._links.refused,
            "error": error or (engine.last_error if engine is not None else None),
        }

    def _state(self) -> str:
        if self._config is None or not self._config.partner.enabled:
            return "off"
        if self._port is None:
            return "not listening"
        return "serving" if self._host is not None else "waiting for a machine"

    async def close(self) -> None:
        """End all links, the engine and the relay; idempotent."""
        async with self._changing:
            await self._stop()
        await cancel_all(list(self._tasks))

    # --- what is served -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve whoever is a member now, or has a code; end what nobody needs. Raises ConfigError."""
        config = self._config
        if config is None or not config.partner.enabled or not self._issuer.exists:
            await self._stop()
            return
        members, code_ends_at = await asyncio.to_thread(lambda: (self._issuer.members(), self._issuer.code_ends_at()))
        if not members and code_ends_at is None:
            await self._stop()
            return
        build = await self._build_of(config)
        if self._relay is None:
            self._relay = RelayProcess(self._hear)
            self._relay.start()
        names, cuts = {member.name for member in members}, self._cuts.load()
        cut = next((cut for name, cut in cuts.items() if name in names), None)
        if cut is None:
            await self._stop_engine()
        else:
            await self._load(config, LayerRange(cut, build.n_layers, build.n_layers))
        self._tell()
        self._error = ""
        self._expire(code_ends_at)

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
            n_ctx=info.n_ctx if info is not None else config.device.n_ctx,
            max_answers=config.partner.max_sessions,
            credits=credits_for(config.partner.max_sessions),
            exit=self._exit if self._layers is not None else "",
            watts=watts,
            watts_from=watts_from,
        )
        relay.serve(
            ServeMembers(
                identity=self._issuer.identity(),
                listen=Address(host=config.partner.listen, port=config.peer.port),
                members=self._issuer.members(),
                pairing=self._issuer.code_ends_at() is not None,
                welcome=welcome,
            )
        )

    def _expire(self, code_ends_at: float | None) -> None:
        """Look again when the code has ended: with it may end what is to be served."""
        if self._timer is not None:
            self._timer.cancel()
        if code_ends_at is not None and self._config is not None:
            loop, config = asyncio.get_running_loop(), self._config
            wait_s = max(0.0, code_ends_at - time.time()) + 1.0
            self._timer = loop.call_later(wait_s, lambda: self._begin(self.follow(config), "code expired"))

    async def _load(self, config: Config, layers: LayerRange) -> None:
        """Have an engine with these layers; one with others ends first. Raises ConfigError."""
        _, upper, self._exit = await asyncio.to_thread(write_ranges, model_path(config.device), layers)
        wanted = await asyncio.to_thread(range_config, config, upper, layers)
        if self._host is not None and self._host.engine.config == wanted:
            return
        await self._stop_engine()
        assert self._relay is not None
        self._host, self._layers = RangeEngine(wanted, self._clock, self._relay, self._loaded), layers
        self._host.engine.start()

    def _loaded(self, info: wire.Loaded) -> None:
        """The range is in memory: who connects is told by which build it is computed."""
        assert self._build is not None
        self._build = msgspec.structs.replace(self._build, llama=info.build)
        self._tell()

    async def _stop_engine(self) -> None:
        host, self._host, self._layers = self._host, None, None
        if host is not None:
            await host.close()

    async def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._stop_engine()
        relay, self._relay, self._port = self._relay, None, None
        self._links.clear()
        if relay is not None:
            await relay.close()

    async def _build_of(self, config: Config) -> Build:
        """Return what is said of the model here; its fingerprint is computed once. Raises ConfigError."""
        model = model_path(config.device)
        if config.device.base_url or not config.device.enabled:
            raise ConfigError("a partner computes with this machine's own model: set device.enabled, and no base_url")
        found = await asyncio.to_thread(describe_model, model)
        if self._build is None or self._build.model != found.model:
            self._build = found
        return self._build

    # --- what the relay says ------------------------------------------------------------------------------------------

    def _hear(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case Listening(port=port, error=error):
                self._begin(self._set_port(port or None, error), "port")
            case LinkUp(name=name, address=address):
                self._links.add(event)
                log.info("%s is linked from %s", name, address)
            case LinkDown(name=name, message=message):
                self._links.remove(name)
                if self._config is not None:  # who connects next hears of an exit that was trained in the meantime
                    self._begin(self.follow(self._config), "exit")
                log.info("the link to %s has ended: %s", name, message)
            case LinkStats():
                self._links.observe(event)
                self._worked()
            case RefusalCounts(counts=counts):
                self._links.refused = counts
            case PairAsked():
                self._begin(self._grant(event), "certificate")
            case FileAsked():
                self._begin(self._offer(event), "layers")
            case CutsAsked():
                self._begin(self._answer_cuts(event), "cuts")
            case MemberLeaves(name=name):
                log.info("%s leaves", name)
                self._begin(self.revoke(name), "leave")
            case RelayLost():
                self._links.clear()
                if self._host is not None:
                    self._host.replace_socket()

    def _begin(self, work: Coroutine[Any, Any, object], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s: %s", task.get_name(), type(error).__name__, error)

    async def _set_port(self, port: int | None, error: str) -> None:
        async with self._listening:
            self._port, self._error = port, error
            self._listening.notify_all()

    async def _wait_for_port(self) -> None:
        """Wait until the relay listens. Raises ConfigError if it cannot."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S), self._listening:
                await self._listening.wait_for(lambda: self._port is not None or self._error)
        if self._port is None:
            msg = f"no other machine can reach this one: {self._error or 'the relay does not listen'}"
            raise ConfigError(msg)

    async def _grant(self, asked: PairAsked) -> None:
        """Sign the certificate of a machine that has the code, or say why not."""
        relay = self._relay
        if relay is None:
            return
        try:
            certificate = await asyncio.to_thread(self._issuer.grant, asked.secret, asked.csr, asked.name)
        except PairingError as e:
            log.warning("a machine at %s was not paired: %s", asked.address, e)
            relay.send(PairAnswer(n=asked.n, reason=e.reason, message=str(e)))
            return
        log.info("%s at %s is paired", asked.name, asked.address)
        async with self._changing:  # a member before it hears of it: it connects at once
            self._tell()
        relay.send(PairAnswer(n=asked.n, certificate=certificate))

    async def _answer_cuts(self, asked: CutsAsked) -> None:
        """Say where the model may be cut; for a machine that is alone, anywhere."""
        relay, config = self._relay, self._config
        if relay is None or config is None:
            return
        try:
            hosted = next(iter(self._cuts.of_others(asked.name).values()), 0)
            cuts = await asyncio.to_thread(tell_cuts, config, hosted)
            relay.send(CutsAnswer(n=asked.n, cuts=cuts))
        except (ConfigError, OSError) as e:
            relay.send(CutsAnswer(n=asked.n, message=str(e)))

    async def _offer(self, asked: FileAsked) -> None:
        """Cut the model for a member, load the layers above, and hand over those below; or say why not."""
        async with self._changing:
            relay, config = self._relay, self._config
            if relay is None or config is None:
                return
            try:
                offer, path = await self._prepare(config, asked)
            except (ConfigError, OSError) as e:
                log.warning("%s gets no layers: %s", asked.name, e)
                relay.send(RefuseFile(cut=asked.cut, message=str(e)))
                return
            with path.open("rb") as file:
                relay.offer(offer, file.fileno())

    async def _prepare(self, config: Config, asked: FileAsked) -> tuple[OfferFile, Path]:
        build = await self._build_of(config)
        if not 0 <= asked.cut < build.n_layers:
            msg = f"the model has {build.n_layers} layers: cut it behind 1 to {build.n_layers - 1} of them"
            raise ConfigError(msg)
        for name, cut in self._cuts.of_others(asked.name).items():
            if cut == asked.cut:
                continue
            how = f"--cut {cut}" if cut else "--draft, for it has all of them"
            msg = f"the partner has the layers from {cut} on, for {name}: join with {how}; or revoke {name} there"
            raise ConfigError(msg)
        model, layers = model_path(config.device), LayerRange(asked.cut, build.n_layers, build.n_layers)
        if self._layers != layers:
            await self._stop_engine()
            await asyncio.to_thread(require_memory, config, model, layers)
        lower, _, _ = await asyncio.to_thread(write_ranges, model, layers)
        digest = await asyncio.to_thread(checksum, lower)
        await asyncio.to_thread(self._cuts.put, asked.name, asked.cut)
        await self._load(config, layers)
        self._tell()
        return OfferFile(cut=asked.cut, n_bytes=lower.stat().st_size, sha256=digest), lower
