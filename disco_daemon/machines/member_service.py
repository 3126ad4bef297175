"""What partner and home of a fleet have in common: they serve machines that have joined, by a relay.

Nothing listens, and no process runs, before a code was made or a machine has joined. The relay asks here whatever is to
be decided: who gets a certificate, who leaves. What such a machine gets, `split.partner_service` and
`fleet.members` say.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ..config.schema import Config
from ..errors import ConfigError
from ..link.protocol import Build, Welcome
from ..link.relay.handshake import AskPair
from ..link.relay.orders import (
    Address,
    HomeReached,
    HostOffered,
    Listening,
    Member,
    MemberAsks,
    MemberLeaves,
    RefusalCounts,
    RelayEvent,
    ServeMembers,
    ToRelay,
    TwoAddresses,
)
from ..link.relay.relay_process import RelayLost, RelayProcess
from ..link.trust.addresses import own_addresses
from ..link.trust.pairing import Issuer, MemberRecord, answer_pair
from ..link.trust.pairing_code import ADDRESSES_MAX, PairingError, format_code
from ..link.trust.roles import Role
from ..system.tasks import cancel_all
from .device_settings import model_path
from .split.hosted_range import describe_model


class MemberService(ABC):
    """Serves the machines that have joined, as the settings say. One change is carried out at a time.

    All mutable state: the settings, the relay while there is somebody to serve, its port or why nothing is served, what
    was refused, who was at two addresses, the tasks that answer it, and the timer for the end of a code.
    """

    log: ClassVar[logging.Logger]
    role: ClassVar[Role]  # of the machines that join
    turned_on: ClassVar[Mapping[str, bool | int]]  # the settings that let machines join
    listen_s: ClassVar[float]  # for the relay to start and to listen, s
    needs_own_model: ClassVar[str]  # what is wrong where the device is no model of this machine

    def __init__(self, folder: Path) -> None:
        self._issuer = Issuer(folder, role=self.role)
        self._config: Config | None = None
        self._relay: RelayProcess | None = None
        self._build: Build | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._listening = asyncio.Condition()
        self._port: int | None = None
        self._refused: dict[str, int] = {}
        self._moved: dict[str, list[str]] = {}  # members that were at two addresses at a time
        self._error = ""

    # --- what such a service says of itself -----------------------------------------------------------------------

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return which machines have joined, and how they are. Reads files, so it blocks."""

    @abstractmethod
    def is_enabled(self, config: Config) -> bool:
        """Whether the settings want machines to be served."""

    @abstractmethod
    def _listen_host(self, config: Config) -> str:
        """Return the address to listen at."""

    @abstractmethod
    async def _serve_members(self, config: Config, build: Build, members: tuple[Member, ...]) -> None:
        """Get ready what the machines are served with, and tell the relay. Raises ConfigError."""

    @abstractmethod
    def _forget(self, name: str) -> None:
        """Drop what is kept of a machine. Raises OSError; blocks."""

    @abstractmethod
    def _hear_more(self, event: RelayEvent | RelayLost) -> None:
        """Take what the relay says, but for what every service does."""

    @abstractmethod
    async def _stop_computing(self) -> None:
        """End what is there for the machines beside the relay; idempotent."""

    @abstractmethod
    def _drop_machines(self) -> None:
        """Forget which machines are connected: the relay has gone."""

    def _offered(self, _: HostOffered | HomeReached, sock: socket.socket) -> None:
        """Take the socket of a host."""
        sock.close()

    def _may_serve(self) -> bool:
        """Whether anything may leave this machine now."""
        return True

    async def _complete(self, build: Build) -> Build:
        """Add to the description of another model. Raises ConfigError."""
        return build

    async def _admit(self) -> None:
        """Let the relay know of a new member."""
        if self._config is not None:
            await self.follow(self._config)

    # --- for the owner --------------------------------------------------------------------------------------------

    async def follow(self, config: Config) -> None:
        """Go by these settings from now on. Raises nothing: what is wrong is shown by `document`."""
        async with self._changing:
            self._config = config
            try:
                await self._serve()
            except ConfigError as e:
                self._error = str(e)
                self.log.warning("no other machine is served: %s", e)

    async def make_code(self, address: str) -> dict[str, Any]:
        """Make a code for one machine, and listen for it. Raises ConfigError; then nothing listens for it."""
        config = self._config
        assert config is not None
        addresses = [address] if address else own_addresses(self._listen_host(config))[:ADDRESSES_MAX]
        async with self._changing:
            await self._build_of(config)  # first: a model that cannot be cut needs no code
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
        """Refuse a machine from now on. Raises ConfigError for a name that no member has.

        Its connections end before anything else is done, which may take long, or fail.
        """
        members = await asyncio.to_thread(self._revoked, name)
        self._moved.pop(name, None)
        if self._relay is not None:
            self._relay.keep_only(members)
        async with self._changing:
            await asyncio.to_thread(self._forget, name)
            try:
                await self._serve()
            except ConfigError as e:
                self._error = str(e)
                self.log.warning("%s was revoked, and no other machine is served: %s", name, e)
        return {"revoked": name}

    def _revoked(self, name: str) -> tuple[Member, ...]:
        self._issuer.revoke(name)
        return self._issuer.members()

    def _describe(self, state: str) -> tuple[dict[str, Any], list[MemberRecord]]:
        """Return how this service is, `state` while it listens, and who has joined. Reads files, so it blocks."""
        config, records, code_ends_at, error = self._config, list[MemberRecord](), None, self._error
        try:
            records, code_ends_at = self._issuer.records(), self._issuer.code_ends_at()
        except PairingError as e:
            error = str(e)
        enabled, port = config is not None and self.is_enabled(config), self._port
        return {
            "enabled": enabled,
            "state": "off" if not enabled else "not listening" if port is None else state,
            "listening": f"{self._listen_host(config)}:{port}" if config is not None and port else None,
            "relay_pid": self._relay.pid if self._relay is not None else None,
            "code_expires_s": round(code_ends_at - time.time()) if code_ends_at is not None else None,
            "refused": self._refused,
            "two_addresses": {one.name: self._moved[one.name] for one in records if one.name in self._moved},
            "error": error,
        }, records

    async def close(self) -> None:
        """End all that is served, and the relay; idempotent."""
        async with self._changing:
            await self._stop()
        await cancel_all(*self._tasks)

    # --- what is served -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve whoever is a member now, or has a code; end what nobody needs. Raises ConfigError."""
        config = self._config
        if config is None or not (self.is_enabled(config) and self._may_serve() and self._issuer.exists):
            await self._stop()
            return
        members, code_ends_at = await asyncio.to_thread(lambda: (self._issuer.members(), self._issuer.code_ends_at()))
        if not members and code_ends_at is None:
            await self._stop()
            return
        build = await self._build_of(config)
        if self._relay is None:
            self._relay = RelayProcess(self._hear, self._offered)
            self._relay.start()
        await self._serve_members(config, build, members)
        self._error = ""
        self._expire(code_ends_at)

    def _role(self, config: Config, welcome: Welcome) -> ServeMembers:
        """Return what the relay is to be: it serves those who are members now."""
        return ServeMembers(
            identity=self._issuer.identity(),
            listen=Address(host=self._listen_host(config), port=config.peer.port),
            members=self._issuer.members(),
            code=self._issuer.live_code(),
            welcome=welcome,
        )

    def _expire(self, code_ends_at: float | None) -> None:
        """Look again when the code has ended: with it may end what is to be served."""
        if self._timer is not None:
            self._timer.cancel()
        if code_ends_at is not None and self._config is not None:
            loop, config = asyncio.get_running_loop(), self._config
            wait_s = max(0.0, code_ends_at - time.time()) + 1.0
            self._timer = loop.call_later(wait_s, lambda: self._begin(self.follow(config), "code expired"))

    async def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._stop_computing()
        relay, self._relay, self._port = self._relay, None, None
        self._drop_machines()
        if relay is not None:
            await relay.close()

    async def _build_of(self, config: Config) -> Build:
        """Return what is said of the model here; its fingerprint is computed once. Raises ConfigError."""
        if config.device.base_url or not config.device.enabled:
            raise ConfigError(self.needs_own_model)
        found = await asyncio.to_thread(describe_model, model_path(config.device))
        if self._build is None or self._build.model != found.model:
            self._build = await self._complete(found)
        return self._build

    # --- what the relay says --------------------------------------------------------------------------------------

    def _hear(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case Listening(port=port, error=error):
                self._begin(self._set_port(port or None, error), "port")
            case RefusalCounts(counts=counts):
                self._refused = counts
            case TwoAddresses(name=name, before=before, address=address):
                self._moved[name] = [before, address]
                self.log.warning(
                    "%s is connected from %s and %s at a time: unless it has just moved to another network, somebody "
                    "has its key, and it is to be revoked", name, before, address,
                )  # fmt: skip
            case MemberAsks(asked=AskPair()):
                self._begin(self._grant(event), "certificate")
            case MemberLeaves(name=name):
                self.log.info("%s leaves", name)
                self._begin(self.revoke(name), "leave")
            case _:
                self._hear_more(event)

    def _answer(self, message: ToRelay) -> None:
        if self._relay is not None:
            self._relay.send(message)

    def _begin(self, work: Coroutine[Any, Any, object], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("%s: %s: %s", task.get_name(), type(error).__name__, error)

    async def _set_port(self, port: int | None, error: str) -> None:
        async with self._listening:
            self._port, self._error = port, error
            self._listening.notify_all()

    async def _wait_for_port(self) -> None:
        """Wait until the relay listens. Raises ConfigError if it cannot."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.listen_s), self._listening:
                await self._listening.wait_for(lambda: self._port is not None or self._error)
        if self._port is None:
            raise ConfigError(f"no other machine can reach this one: {self._error or 'the relay does not listen'}")

    async def _grant(self, asked: MemberAsks) -> bool:
        """Sign the certificate of a machine that has the code, or say why not; return whether it has joined."""
        answer = await asyncio.to_thread(answer_pair, self._issuer, asked)
        if answer.given is not None:
            self.log.info("%s at %s has joined", asked.name, asked.address)
            await self._admit()  # a member before it hears of it: it connects at once
        else:
            self.log.warning("a machine at %s has not joined: %s", asked.address, answer.message)
        self._answer(answer)
        return answer.given is not None
