"""Home's side of a fleet of machines: who may join, which layers are whose, and the hosts that they lend.

A machine that joins gets a place, which it keeps until it leaves: its layers are those of the host with that place in
the layout of whichever engine runs.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from ...config.schema import Config
from ...errors import ConfigError
from ...link.protocol import Build, Welcome
from ...link.relay.handshake import AskCuts, AskSegments, TheSegments
from ...link.relay.orders import (
    FileAsked,
    HomeReached,
    HostEnded,
    HostOffered,
    MachineTold,
    Member,
    MemberAnswer,
    MemberAsks,
    OfferFile,
    RefuseFile,
    RelayEvent,
)
from ...link.relay.relay_process import RelayLost
from ...link.trust.roles import Role
from ...plain import reason_of
from ..member_service import MemberService
from ..split.check import checksum
from ..trust_store import authority_folder
from .host_places import Borrower, LentLife, LentMachine, files_of
from .offered_hosts import HostOffers, MemberPlaces, own_llama
from .ray_keeper import HomeRay

LISTEN_S = 15.0  # for the relay to start and to listen, beside a Ray that starts as well


class FleetMembers(MemberService):
    """Serves the machines of a fleet, as the settings say; `changed` is called when one has joined or left.

    All mutable state, beside the service's: the engines that borrow hosts, what is offered, Ray, and whether all that
    is computed now is private.
    """

    log = logging.getLogger("disco.fleet")
    role = Role.FLEET
    turned_on = MappingProxyType({"fleet.enabled": True, "fleet.hosts": 0})  # no process of this machine is a host
    listen_s = LISTEN_S
    needs_own_model = "a fleet computes this machine's own model: set device.enabled, and no base_url"

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or authority_folder(Role.FLEET)
        super().__init__(folder)
        self._places = MemberPlaces(folder)
        self.changed: Callable[[], Awaitable[object]] = _nobody
        self._borrowers: list[Borrower] = []
        self._offers = HostOffers(self._tell_free)
        self._is_private = False
        self._ray = HomeRay(folder.parent, self._ray_changed)

    # --- for the owner ------------------------------------------------------------------------------------------------

    async def hold(self, *, private: bool) -> None:
        """Send nothing to another machine any more while `private`: when this returns no host is lent."""
        if private == self._is_private:
            return
        self._is_private = private
        if private:
            for borrower in self._borrowers:
                borrower.stay_here()
        if self._config is not None:
            await self.follow(self._config)
        if not private and self.n_places():
            self._begin(self._change(), "fleet with its machines")  # by an engine that has computed nothing private

    async def make_code(self, address: str) -> dict[str, Any]:
        """Make a code for one machine, and listen for it. Raises ConfigError; then nothing listens for it."""
        if self._is_private:
            raise ConfigError("policy.private is on: nothing may leave this machine, so none can join")
        return await super().make_code(address) | {"ray": self._ray.document()}

    async def revoke(self, name: str) -> dict[str, Any]:
        """Refuse a machine from now on. Raises ConfigError for a name that no member has."""
        found = await super().revoke(name)
        self._offers.forget(name)
        self._begin(self._change(), "fleet without a machine")
        return found

    def document(self) -> dict[str, Any]:
        """Return the machines and how they are. Reads files, so it blocks."""
        found, records = self._describe("listening")
        places = self._places.load()
        return found | {
            "llama": self._build.llama if self._build is not None else None,
            "members": [
                {
                    "name": one.name,
                    "since": time.strftime("%Y-%m-%d", time.localtime(one.joined_at)),
                    "place": places.get(one.name),
                    "layers": [[own.first, own.last] for own in files_of(self._borrowers, places.get(one.name))],
                }
                | self._offers.describe(one.name)
                for one in records
            ],
            "ray": self._ray.document(),
        }

    def n_places(self) -> int:
        """Return how many places there are, for which layers are to be laid out. Reads a file."""
        return max(self._places.load().values(), default=-1) + 1

    # --- for the engines ----------------------------------------------------------------------------------------------

    def borrow_for(self, borrower: Borrower) -> None:
        """Lend hosts to an engine that is being started."""
        if self._is_private:
            borrower.stay_here()
        if borrower not in self._borrowers:
            self._borrowers.append(borrower)

    def end(self, borrower: Borrower) -> None:
        """The engine has gone."""
        if borrower in self._borrowers:
            self._borrowers.remove(borrower)

    async def take(self, place: int, names: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        """Return a host of the machine at a place, if it is there and has the files."""
        machine = self.name_of(place)
        return await self._offers.take(machine, names) if machine else None

    async def stage(self, place: int, names: Collection[str]) -> None:
        """Let the machine at a place fetch these files; return when it has them. Raises OSError if it does not."""
        await self._offers.stage(self.name_of(place), names)

    def machine_at(self, place: int) -> LentMachine | None:
        """Return what is known of the machine at a place; None if it is not there."""
        name = self.name_of(place)
        return self._offers.machine(name) if name else None

    def name_of(self, place: int) -> str:
        """Return the name of the machine at a place; "" if there is none."""
        return self._places.name_of(place)

    def is_there(self, place: int) -> bool:
        """Whether the machine at a place would lend a host now."""
        return self._offers.is_there(self.name_of(place))

    # --- what is served -----------------------------------------------------------------------------------------------

    def is_enabled(self, config: Config) -> bool:
        """Whether this machine is a fleet's home."""
        return config.fleet.enabled

    def _listen_host(self, config: Config) -> str:
        return config.fleet.listen

    def _may_serve(self) -> bool:
        return not self._is_private

    def _forget(self, name: str) -> None:
        self._places.drop(name)

    async def _complete(self, build: Build) -> Build:
        return replace(build, llama=await own_llama())

    async def _serve_members(self, config: Config, build: Build, members: tuple[Member, ...]) -> None:
        await asyncio.to_thread(self._places.keep, [one.name for one in self._issuer.records()])
        try:
            await self._ray.keep(config, [one.serial for one in members])
        except OSError as e:  # machines are served without it
            self.log.warning("no Ray: its token cannot be kept: %s", e)
            await self._ray.close()
        welcome = Welcome(build=build, cut=1, n_ctx=config.device.divided_n_ctx, max_answers=0, credits=0)
        is_exact = config.device.rounding != "fast" and config.device.flash_attn != "off"
        role, llama = self._role(config, welcome), build.llama if is_exact else ""
        assert self._relay is not None
        self._relay.serve(replace(role, only_llama=llama, ray=self._ray.for_members()))

    def _ray_changed(self) -> None:
        if self._config is not None:
            self._begin(self.follow(self._config), "Ray for members")

    async def _stop_computing(self) -> None:
        await self._ray.close()

    def _drop_machines(self) -> None:
        self._offers.clear()

    # --- what the relay says ------------------------------------------------------------------------------------------

    def _offered(self, event: HostOffered | HomeReached, sock: socket.socket) -> None:
        if isinstance(event, HostOffered) and event.name in self._places.load():
            self._offers.add(event, sock)
        else:
            sock.close()

    def _tell_free(self, name: str) -> None:
        """A machine lends a host, which engines may take."""
        place = self._places.load().get(name)
        for borrower in self._borrowers if place is not None else ():
            assert place is not None
            own = borrower.files_of(place)
            if own and self._offers.has(name, [path.name for _, path in own]):
                borrower.machine_is_there(place)

    def _hear_more(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case MemberAsks(asked=AskSegments()):
                self._begin(self._answer_segments(event), "segments")
            case FileAsked():
                self._begin(self._offer_file(event), "layers")
            case MemberAsks(n=n, asked=AskCuts()):
                why = "that machine is the home of a fleet: join it by `disco machines join`"
                self._answer(MemberAnswer(n=n, reason="no_file", message=why))
            case HostEnded():
                self._offers.end(event, is_let_go=not self._keeps_layers(event.name))
            case MachineTold(name=name, load=load):
                if name in self._places.load():  # else it has left meanwhile
                    self._offers.hear(name, load)
            case RelayLost():
                self._offers.clear()

    def _keeps_layers(self, name: str) -> bool:
        """Whether a machine has layers that do not leave it just now; one without is let go."""
        place = self._places.load().get(name)
        try:
            return place is not None and any(borrower.keeps(place) for borrower in self._borrowers)
        except OSError:  # the model's file has gone
            return True

    async def _grant(self, asked: MemberAsks) -> bool:
        has_joined = await super()._grant(asked)
        if has_joined:
            await self._change()
        return has_joined

    async def _change(self) -> None:
        try:
            await self.changed()
        except ConfigError as e:
            self._error = str(e)
            self.log.warning("the layers stay where they are: %s", e)

    async def _answer_segments(self, asked: MemberAsks) -> None:
        place, build = self._places.load().get(asked.name), self._build
        if build is None or place is None:
            self._answer(MemberAnswer(n=asked.n, reason="not_ready", message="no model of a fleet is there yet"))
            return
        segments = tuple(files_of(self._borrowers, place))
        self._answer(MemberAnswer(n=asked.n, given=TheSegments(build=build, segments=segments)))

    async def _offer_file(self, asked: FileAsked) -> None:
        """Hand over a file of the layers that are a machine's own, and no other."""
        relay, found = self._relay, files_of(self._borrowers, self._places.load().get(asked.name))
        path = next((path for own, path in found.items() if (own.first, own.last) == (asked.first, asked.cut)), None)
        member = asked.name if asked.first else ""
        refused = RefuseFile(
            first=asked.first, cut=asked.cut, member=member,
            message=f"the layers {asked.first}-{asked.cut} are not those of {asked.name}",
        )  # fmt: skip
        if path is None or relay is None:
            self._answer(refused)
            return
        try:
            digest = await asyncio.to_thread(checksum, path)
            with path.open("rb") as file:
                offer = OfferFile(
                    first=asked.first, cut=asked.cut, member=member, n_bytes=path.stat().st_size, sha256=digest
                )
                relay.offer(offer, file.fileno())
        except (ConfigError, OSError) as e:
            self._answer(replace(refused, message=reason_of(e)))


async def _nobody() -> None:
    """Nobody wants to know of a change yet."""
