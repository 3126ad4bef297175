"""Home's side of a fleet of machines: who may join, which layers are whose, and the hosts that they lend.

Nothing listens, and no process runs, before a code was made or a machine has joined. The relay asks here whatever is to
be decided. A machine that joins gets a place, which it keeps until it leaves: its layers are those of the host with
that place in the layout of whichever engine runs.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..config.layers import data_path
from ..config.schema import Config
from ..errors import ConfigError
from ..peer.addresses import own_addresses
from ..peer.control import (
    Address,
    CutsAnswer,
    CutsAsked,
    FileAsked,
    HomeReached,
    HostEnded,
    HostOffered,
    Listening,
    MemberLeaves,
    OfferFile,
    PairAnswer,
    PairAsked,
    RefusalCounts,
    RefuseFile,
    RelayEvent,
    SegmentsAnswer,
    SegmentsAsked,
    ServeMembers,
)
from ..peer.daemon_side import RelayLost, RelayProcess
from ..peer.first_frames import TheSegments
from ..peer.messages import Build, Welcome
from ..peer.pairing import Issuer
from ..peer.pairing_code import ADDRESSES_MAX, PairingError, format_code
from .device import model_path
from .fleet_offers import HostOffers, MemberPlaces, own_llama
from .fleet_places import Borrower, LentLife, files_of
from .fleet_ray import HomeRay
from .hosted_range import describe_model
from .split import checksum
from .tasks import cancel_all

log = logging.getLogger("disco.fleet")

LISTEN_S = 15.0  # for the relay to start and to listen, beside a Ray that starts as well


class FleetMembers:
    """Serves the machines of a fleet, as the settings say; `changed` is called when one has joined or left.

    All mutable state: the settings, the relay while there is somebody to serve, the engines that borrow hosts, what is
    offered, the tasks that answer the relay, and the reason why nothing is served.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or data_path() / "fleet" / "issuer"
        self._issuer, self._places = Issuer(self._folder), MemberPlaces(self._folder)
        self.changed: Callable[[], Awaitable[object]] = _nobody
        self._config: Config | None = None
        self._relay: RelayProcess | None = None
        self._build: Build | None = None
        self._borrowers: list[Borrower] = []
        self._offers = HostOffers(self._tell_free)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._listening = asyncio.Condition()
        self._port: int | None = None
        self._error, self._is_private = "", False
        self._ray = HomeRay(self._folder.parent, self._ray_changed)
        self._refused: dict[str, int] = {}

    # --- for the owner ------------------------------------------------------------------------------------------------

    async def follow(self, config: Config) -> None:
        """Go by these settings from now on. Raises nothing: what is wrong is shown by `document`."""
        async with self._changing:
            self._config = config
            try:
                await self._serve()
            except ConfigError as e:
                self._error = str(e)
                log.warning("no machine is served: %s", e)

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

    async def new(self, address: str) -> dict[str, Any]:
        """Make a code for one machine, and listen for it. Raises ConfigError; then nothing listens for it."""
        config = self._config
        assert config is not None
        if self._is_private:
            raise ConfigError("policy.private is on: nothing may leave this machine, so none can join")
        addresses = [address] if address else own_addresses(config.fleet.listen)[:ADDRESSES_MAX]
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
            "ray": self._ray.document(),
        }

    async def revoke(self, name: str) -> dict[str, Any]:
        """Refuse a machine from now on. Raises ConfigError for a name that no member has."""
        async with self._changing:
            await asyncio.to_thread(self._issuer.revoke, name)
            await asyncio.to_thread(self._places.drop, name)
            await self._serve()
        self._begin(self._change(), "fleet without a machine")
        return {"revoked": name}

    def document(self) -> dict[str, Any]:
        """Return the machines and how they are. Reads files, so it blocks."""
        config, error, records, code_ends_at = self._config, self._error, [], None
        with suppress(PairingError):
            records, code_ends_at = self._issuer.records(), self._issuer.code_ends_at()
        enabled = config is not None and config.fleet.enabled
        state = "off" if not enabled else "not listening" if self._port is None else "listening"
        places = self._places.load()
        return {
            "enabled": enabled,
            "state": state,
            "listening": f"{config.fleet.listen}:{self._port}" if config is not None and self._port else None,
            "relay_pid": self._relay.pid if self._relay is not None else None,
            "code_expires_s": round(code_ends_at - time.time()) if code_ends_at is not None else None,
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
            "refused": self._refused,
            "error": error,
        }

    def n_places(self) -> int:
        """Return how many places there are, for which layers are to be laid out. Reads a file."""
        return max(self._places.load().values(), default=-1) + 1

    async def close(self) -> None:
        """End all that is lent, and the relay; idempotent."""
        async with self._changing:
            await self._stop()
        await cancel_all(list(self._tasks))

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

    def name_of(self, place: int) -> str:
        """Return the name of the machine at a place; "" if there is none."""
        return self._places.name_of(place)

    def is_there(self, place: int) -> bool:
        """Whether the machine at a place would lend a host now."""
        return self._offers.is_there(self.name_of(place))

    # --- what is served -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve whoever is a member now, or has a code; end what nobody needs. Raises ConfigError."""
        config = self._config
        if config is None or not config.fleet.enabled or self._is_private or not self._issuer.exists:
            await self._stop()
            return
        members, code_ends_at = await asyncio.to_thread(lambda: (self._issuer.members(), self._issuer.code_ends_at()))
        if not members and code_ends_at is None:
            await self._stop()
            return
        await asyncio.to_thread(self._places.keep, [one.name for one in self._issuer.records()])
        build = await self._build_of(config)
        if self._relay is None:
            self._relay = RelayProcess(self._hear, self._offered)
            self._relay.start()
        is_exact = config.device.rounding != "fast" and config.device.flash_attn != "off"
        await self._ray.keep(config)
        self._relay.serve(
            ServeMembers(
                identity=self._issuer.identity(),
                listen=Address(host=config.fleet.listen, port=config.peer.port),
                members=members,
                pairing=code_ends_at is not None,
                welcome=Welcome(build=build, cut=1, n_ctx=config.device.n_ctx, max_answers=0, credits=0),
                only_llama=build.llama if is_exact else "",
                ray=self._ray.for_members(),
            )
        )
        self._error = ""
        self._expire(code_ends_at)

    def _expire(self, code_ends_at: float | None) -> None:
        """Look again when the code has ended: with it may end what is to be served."""
        if self._timer is not None:
            self._timer.cancel()
        if code_ends_at is not None and self._config is not None:
            loop, config = asyncio.get_running_loop(), self._config
            wait_s = max(0.0, code_ends_at - time.time()) + 1.0
            self._timer = loop.call_later(wait_s, lambda: self._begin(self.follow(config), "code expired"))

    def _ray_changed(self) -> None:
        if self._config is not None:
            self._begin(self.follow(self._config), "Ray for members")

    async def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._ray.close()
        relay, self._relay, self._port = self._relay, None, None
        self._offers.clear()
        if relay is not None:
            await relay.close()

    async def _build_of(self, config: Config) -> Build:
        """Return what is said of the model here; its fingerprint is computed once. Raises ConfigError."""
        if config.device.base_url or not config.device.enabled:
            raise ConfigError("a fleet computes this machine's own model: set device.enabled, and no base_url")
        model = model_path(config.device)
        found = await asyncio.to_thread(describe_model, model)
        if self._build is None or self._build.model != found.model:
            self._build = await asyncio.to_thread(own_llama, found)
        return self._build

    # --- what the relay says ------------------------------------------------------------------------------------------

    def _offered(self, event: HostOffered | HomeReached, sock: socket.socket) -> None:
        if isinstance(event, HostOffered):
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

    def _hear(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case Listening(port=port, error=error):
                self._begin(self._set_port(port or None, error), "port")
            case RefusalCounts(counts=counts):
                self._refused = counts
            case PairAsked():
                self._begin(self._grant(event), "certificate")
            case SegmentsAsked():
                self._begin(self._answer_segments(event), "segments")
            case FileAsked():
                self._begin(self._offer_file(event), "layers")
            case CutsAsked(n=n):
                self._answer(
                    CutsAnswer(n=n, message="that machine is the home of a fleet: join it by `disco fleet join`")
                )
            case HostEnded():
                self._offers.end(event)
            case MemberLeaves(name=name):
                log.info("%s leaves", name)
                self._begin(self.revoke(name), "leave")
            case RelayLost():
                self._offers.clear()

    def _answer(self, message: CutsAnswer | PairAnswer | RefuseFile | SegmentsAnswer) -> None:
        if self._relay is not None:
            self._relay.send(message)

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
        with suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S), self._listening:
                await self._listening.wait_for(lambda: self._port is not None or self._error)
        if self._port is None:
            msg = f"no other machine can reach this one: {self._error or 'the relay does not listen'}"
            raise ConfigError(msg)

    async def _grant(self, asked: PairAsked) -> None:
        """Sign the certificate of a machine that has the code, or say why not."""
        try:
            certificate = await asyncio.to_thread(self._issuer.grant, asked.secret, asked.csr, asked.name)
        except PairingError as e:
            log.warning("a machine at %s has not joined: %s", asked.address, e)
            self._answer(PairAnswer(n=asked.n, reason=e.reason, message=str(e)))
            return
        log.info("%s at %s has joined", asked.name, asked.address)
        if self._config is not None:
            await self.follow(self._config)  # a member before it hears of it: it connects at once
        self._answer(PairAnswer(n=asked.n, certificate=certificate))
        await self._change()

    async def _change(self) -> None:
        try:
            await self.changed()
        except ConfigError as e:
            self._error = str(e)
            log.warning("the layers stay where they are: %s", e)

    async def _answer_segments(self, asked: SegmentsAsked) -> None:
        place, build = self._places.load().get(asked.name), self._build
        if build is None or place is None:
            self._answer(SegmentsAnswer(n=asked.n, message="no model of a fleet is there yet"))
            return
        segments = tuple(files_of(self._borrowers, place))
        self._answer(SegmentsAnswer(n=asked.n, segments=TheSegments(build=build, segments=segments)))

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
            self._answer(replace(refused, message=str(e)))


async def _nobody() -> None:
    """Nobody wants to know of a change yet."""
