"""What machines of a fleet offer: which place each has, and the hosts that wait to be taken."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...config.layers import changing, write_private
from ...errors import ConfigError
from ...link.relay.handshake import TellLoad
from ...link.relay.orders import HostEnded, HostOffered
from .host_places import LentLife, LentMachine

COMES_S = 1.0  # that an engine waits for the next host of a machine that was there just now: it offers one at once
COMES_AGAIN_S = 0.3  # after one that fell silent: a machine that is there connects again within two round trips
USEFUL_BYTES = 1024  # came of a host that has computed anything: less than one row has, more than it says at its begin
MAX_BAD = 2  # lives in a row that computed nothing; then the machine is left alone
ALONE_S = 30.0  # for which it is
STAGE_S = 600.0  # for a machine to fetch layers that are to come to it: gigabytes by a slow line
GONE_S = 15.0  # without host and word, after which a machine that is to fetch something has gone
SENT_AGAIN_S = 60.0  # after which a machine is told once more to fetch the same
SAID_S = 10.0  # for which what a machine has said of itself counts: it does so every two seconds


class MemberPlaces:
    """The places of the machines by their names, from 0 on, in a file of `folder`; a free place is used again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "places.json"
        self._read_at: tuple[int, int] | None = None
        self._places: dict[str, int] = {}

    def load(self) -> dict[str, int]:
        """Return the place of each machine; those known last where the file cannot be read now."""
        try:
            return self._load()
        except OSError:
            return self._places

    def _load(self) -> dict[str, int]:
        """Return the place of each machine; a damaged file has none. Raises OSError for one that cannot be read."""
        try:
            stat = self._path.stat()
            if self._read_at != (stat.st_mtime_ns, stat.st_ino):
                self._places = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
                self._read_at = stat.st_mtime_ns, stat.st_ino
        except (FileNotFoundError, msgspec.MsgspecError):
            return {}
        return self._places

    def name_of(self, place: int) -> str:
        """Return the machine at a place; "" if it is free."""
        return next((name for name, at in self.load().items() if at == place), "")

    def keep(self, names: Sequence[str]) -> None:
        """Let those machines have a place, and no others. Raises OSError."""
        with self._alone():
            before = self._load()  # or each machine would be dealt another's layers
            places = {name: place for name, place in before.items() if name in names}
            for name in names:
                taken = set(places.values())
                places.setdefault(name, next(place for place in range(len(taken) + 1) if place not in taken))
            if places != before:
                self._save(places)

    def drop(self, name: str) -> None:
        """Forget a machine. Raises OSError."""
        with self._alone():
            self._save({other: place for other, place in self._load().items() if other != name})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread or program change the places meanwhile: one of two changes would be lost."""
        try:
            with changing(self._path):
                yield
        except ConfigError as e:
            raise OSError(str(e)) from e

    def _save(self, places: dict[str, int]) -> None:
        write_private(self._path, msgspec.json.encode(places).decode())
        self._read_at = None


@dataclass(slots=True)
class OfferingMachine:
    """What is known of one machine: its latest offer, the one that waits with its socket, and its hosts that are lent.

    Its clock is `ahead_s` of the one here. Its last host ended at `ended_at`, and the next one comes within `comes_s`.
    The last `n_bad` of them computed nothing; while it is `left_alone`, a timer runs. It was `sent` at `sent_at` to
    fetch the files that it lacks, and `said` at `said_at` how busy it is.
    """

    latest: HostOffered | None = None
    waiting: tuple[HostOffered, socket.socket] | None = None
    lives: dict[int, LentLife] = field(default_factory=dict)
    ahead_s: float | None = None
    ended_at: float | None = None
    comes_s: float = COMES_S
    n_bad: int = 0
    left_alone: asyncio.TimerHandle | None = None
    sent: frozenset[str] = frozenset()
    sent_at: float = 0.0
    said: TellLoad | None = None
    said_at: float = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether a host of it is lent, or waits."""
        return bool(self.lives) or self.waiting is not None

    def heard(self, now: float) -> TellLoad | None:
        """Return what it has said of itself of late; None if that is too long ago."""
        return self.said if now - self.said_at < SAID_S else None

    def is_coming(self, now: float) -> bool:
        """Whether the next host of it is soon to be there."""
        return bool(self.lives) or (self.ended_at is not None and now - self.ended_at < self.comes_s)

    def drop(self) -> None:
        """Close the socket of the host that waits; idempotent."""
        if self.waiting is not None:
            self.waiting[1].close()
            self.waiting = None

    def spare(self) -> None:
        """Leave it alone no longer, and count its bad hosts anew."""
        if self.left_alone is not None:
            self.left_alone.cancel()
        self.left_alone, self.n_bad = None, 0

    def describe(self) -> dict[str, Any]:
        """Return whether it is there, what it allows, and by what it computes."""
        offer = self.latest.offer if self.latest else None
        return {
            "connected": self.is_connected,
            "lent": bool(self.lives),
            "left_alone": self.left_alone is not None,
            "address": self.latest.address if self.latest else None,
            "n_threads": offer.n_threads if offer else None,
            "memory_bytes": offer.memory_bytes if offer else None,
            "llama": offer.build.llama if offer else None,
            "disco": offer.build.disco if offer else None,
            "python": offer.python if offer else None,
            "ray": offer.ray if offer else None,
            "ahead_s": self.ahead_s,
        }


class HostOffers:
    """The machines that offer hosts, by their names; `free` is told of each offer.

    `wall` is the time here, Unix time, s, by which the machines' clocks are judged.
    """

    def __init__(self, free: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        self._free, self._wall = free, wall
        self._machines = defaultdict[str, OfferingMachine](OfferingMachine)
        self._changed = asyncio.Event()

    def add(self, offered: HostOffered, sock: socket.socket) -> None:
        """Take an offer, in place of one that waits."""
        machine = self._machines[offered.name]
        machine.drop()
        machine.waiting, machine.latest = (offered, sock), offered
        if offered.offer.now:
            machine.ahead_s = offered.offer.now - self._wall()
        self._changed.set()
        self._changed = asyncio.Event()
        if machine.left_alone is None:
            self._free(offered.name)

    def hear(self, name: str, load: TellLoad) -> None:
        """Take what a machine says of itself."""
        machine = self._machines[name]
        machine.said, machine.said_at = load, _now()

    def machine(self, name: str) -> LentMachine | None:
        """Return what is known of a machine; None if it is not there, or is left alone."""
        machine = self._machines[name]
        if machine.latest is None or machine.left_alone is not None or not machine.is_connected:
            return None
        offer = machine.latest.offer
        return LentMachine(name, offer.n_threads, offer.memory_bytes, machine.heard(_now()))

    def end(self, ended: HostEnded, *, is_let_go: bool = False) -> None:
        """A host has ended, taken or not; `is_let_go`: home has no layers for it any more."""
        machine = self._machines[ended.name]
        if machine.waiting is not None and machine.waiting[0].life == ended.life:
            machine.drop()
        life = machine.lives.pop(ended.life, None)
        if life is None:
            return
        life.over.set()
        machine.ended_at, machine.comes_s = _now(), COMES_S
        if ended.given_up and not is_let_go:  # what was offered before is no more alive than that: a new offer is
            machine.comes_s = COMES_AGAIN_S
            machine.drop()
        is_bad = ended.n_bytes < USEFUL_BYTES and not is_let_go
        machine.n_bad = machine.n_bad + 1 if is_bad else 0
        if machine.n_bad >= MAX_BAD and machine.left_alone is None:
            machine.left_alone = asyncio.get_running_loop().call_later(ALONE_S, self._try_again, ended.name)

    def _try_again(self, name: str) -> None:
        machine = self._machines[name]
        machine.spare()
        if machine.waiting is not None:
            self._free(name)

    def clear(self) -> None:
        """The relay has gone, and with it all that was offered and lent."""
        for machine in self._machines.values():
            machine.drop()
            for life in machine.lives.values():
                life.over.set()
            machine.lives.clear()
            machine.spare()

    def forget(self, name: str) -> None:
        """The machine is no member any more: nothing it said holds for whoever gets its name."""
        machine = self._machines.pop(name, OfferingMachine())
        machine.drop()
        machine.spare()
        if machine.lives:  # whoever has one is told when it ends
            self._machines[name].lives = machine.lives

    def is_there(self, name: str) -> bool:
        """Whether a host of that machine waits."""
        machine = self._machines[name]
        return machine.waiting is not None and machine.left_alone is None

    def has(self, name: str, files: Collection[str]) -> bool:
        """Whether a host of that machine waits, which has the files; one that lacks some is sent to fetch them.

        It is sent once: it offers a host again at once, and another one when it has them.
        """
        machine = self._machines[name]
        if machine.waiting is None:
            return False
        lacking, now = frozenset(files) - set(machine.waiting[0].offer.has), _now()
        if not lacking:
            machine.sent = lacking
            return True
        if lacking != machine.sent or now - machine.sent_at > SENT_AGAIN_S:
            machine.sent, machine.sent_at = lacking, now
            machine.drop()
        return False

    async def stage(self, name: str, files: Collection[str]) -> None:
        """Let that machine fetch files, and wait until it has them. Raises OSError if it does not get them."""
        try:
            async with asyncio.timeout(STAGE_S):
                while not self.has(name, files):
                    changed = self._changed
                    with suppress(TimeoutError):
                        async with asyncio.timeout(GONE_S):
                            await changed.wait()
                    machine = self._machines[name]
                    if not machine.is_connected and machine.heard(_now()) is None:  # else it is slow to offer one
                        raise OSError(f"{name} has gone")
        except TimeoutError as e:
            raise OSError(f"{name} has not fetched its layers within {STAGE_S:g} s") from e

    async def take(self, name: str, files: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        """Return a host of that machine, which has the files; waits for one that was there just now."""
        machine = self._machines[name]
        if machine.left_alone is not None:
            return None
        if machine.waiting is None and machine.is_coming(_now()):
            with suppress(TimeoutError):
                async with asyncio.timeout(machine.comes_s):
                    while self._machines[name].waiting is None:
                        await self._changed.wait()
        machine = self._machines[name]
        if not self.has(name, files) or machine.waiting is None:
            return None
        (offered, sock), machine.waiting = machine.waiting, None
        life = machine.lives[offered.life] = LentLife(name, offered.life, offered.offer.build.llama)
        return life, sock

    def describe(self, name: str) -> dict[str, Any]:
        """Return what is known of a machine: whether it is there, what it allows, and by what it computes."""
        return self._machines[name].describe()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def own_llama() -> str:
    """Return what the llama.cpp of this machine says of itself. Raises ConfigError."""
    from ..model_memory import run_checkup  # asked by a fleet's machines only, while every start would wait for it

    seen = await run_checkup()
    if seen.bindings is None:
        raise ConfigError(f"llama.cpp does not say its version: {seen.problem}")
    return seen.bindings.build
