"""What machines of a fleet offer: which place each has, and the hosts that wait to be taken."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from ...config.layers import changing, write_private
from ...errors import ConfigError
from ...link.protocol import Build
from ...link.relay.first_frames import TellLoad
from ...link.relay.orders import HostEnded, HostOffered
from ...system import process
from .host_places import LentLife, LentMachine
from .spare_host import MODULE

COMES_S = 1.0  # that an engine waits for the next host of a machine that was there just now: it offers one at once
COMES_AGAIN_S = 0.3  # after one that fell silent: a machine that is there connects again within two round trips
USEFUL_BYTES = 1024  # came of a host that has computed anything: less than one row has, more than it says at its begin
MAX_BAD = 2  # lives in a row that computed nothing; then the machine is left alone
ALONE_S = 30.0  # for which it is
STAGE_S = 600.0  # for a machine to fetch layers that are to come to it: gigabytes by a slow line
GONE_S = 15.0  # without host and word, after which a machine that is to fetch something has gone
SENT_AGAIN_S = 60.0  # after which a machine is told once more to fetch the same
SAID_S = 10.0  # for which what a machine has said of itself counts: it does so every two seconds
BUILD_S = 60.0  # to ask llama.cpp for its version: half a second, on a machine that is busy with everything else


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


class HostOffers:
    """The hosts that wait, by the names of their machines, and those that were taken; `free` is told of each offer.

    `wall` is the time here, Unix time, s, by which the machines' clocks are judged.
    """

    def __init__(self, free: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        self._free, self._wall = free, wall
        self._ahead_s: dict[str, float] = {}
        self._waiting: dict[str, tuple[HostOffered, socket.socket]] = {}
        self._lives: dict[tuple[str, int], LentLife] = {}
        self._latest: dict[str, HostOffered] = {}
        self._ended_at: dict[str, float] = {}
        self._comes_s: dict[str, float] = {}
        self._n_bad: dict[str, int] = {}
        self._left_alone: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._sent: dict[str, tuple[frozenset[str], float]] = {}  # machines that were sent to fetch what they lack
        self._said: dict[str, tuple[TellLoad, float]] = {}

    def add(self, offered: HostOffered, sock: socket.socket) -> None:
        """Take an offer, in place of one that waits."""
        self._drop(offered.name)
        self._waiting[offered.name] = offered, sock
        self._latest[offered.name] = offered
        if offered.offer.now:
            self._ahead_s[offered.name] = offered.offer.now - self._wall()
        self._changed.set()
        self._changed = asyncio.Event()
        if offered.name not in self._left_alone:
            self._free(offered.name)

    def hear(self, name: str, load: TellLoad) -> None:
        """Take what a machine says of itself."""
        self._said[name] = load, asyncio.get_running_loop().time()

    def machine(self, name: str) -> LentMachine | None:
        """Return what is known of a machine; None if it is not there, or is left alone."""
        offered = self._latest.get(name)
        if offered is None or name in self._left_alone or not self._is_connected(name):
            return None
        offer = offered.offer
        return LentMachine(name, offer.n_threads, offer.memory_bytes, self._heard(name))

    def _heard(self, name: str) -> TellLoad | None:
        """Return what a machine has said of itself of late; None if that is too long ago."""
        said, at_s = self._said.get(name, (None, 0.0))
        return said if asyncio.get_running_loop().time() - at_s < SAID_S else None

    def end(self, ended: HostEnded, *, is_let_go: bool = False) -> None:
        """A host has ended, taken or not; `is_let_go`: home has no layers for it any more."""
        offered, _ = self._waiting.get(ended.name, (None, None))
        if offered is not None and offered.life == ended.life:
            self._drop(ended.name)
        life = self._lives.pop((ended.name, ended.life), None)
        if life is None:
            return
        life.over.set()
        loop = asyncio.get_running_loop()
        self._ended_at[ended.name] = loop.time()
        self._comes_s[ended.name] = COMES_S
        if ended.given_up and not is_let_go:  # what was offered before is no more alive than that: a new offer is
            self._comes_s[ended.name] = COMES_AGAIN_S
            self._drop(ended.name)
        is_bad = ended.n_bytes < USEFUL_BYTES and not is_let_go
        self._n_bad[ended.name] = self._n_bad.get(ended.name, 0) + 1 if is_bad else 0
        if self._n_bad[ended.name] >= MAX_BAD and ended.name not in self._left_alone:
            self._left_alone[ended.name] = loop.call_later(ALONE_S, self._try_again, ended.name)

    def _try_again(self, name: str) -> None:
        self._left_alone.pop(name, None)
        self._n_bad.pop(name, None)
        if name in self._waiting:
            self._free(name)

    def clear(self) -> None:
        """The relay has gone, and with it all that was offered and lent."""
        for name in list(self._waiting):
            self._drop(name)
        for life in self._lives.values():
            life.over.set()
        self._lives.clear()
        for timer in self._left_alone.values():
            timer.cancel()
        self._left_alone.clear()
        self._n_bad.clear()

    def forget(self, name: str) -> None:
        """The machine is no member any more: nothing it said holds for whoever gets its name."""
        self._drop(name)
        if (timer := self._left_alone.pop(name, None)) is not None:
            timer.cancel()
        for known in (
            self._latest, self._said, self._sent, self._ahead_s, self._ended_at, self._comes_s, self._n_bad,
        ):  # fmt: skip
            known.pop(name, None)

    def is_there(self, name: str) -> bool:
        """Whether a host of that machine waits."""
        return name in self._waiting and name not in self._left_alone

    def has(self, name: str, files: Collection[str]) -> bool:
        """Whether a host of that machine waits, which has the files; one that lacks some is sent to fetch them.

        It is sent once: it offers a host again at once, and another one when it has them.
        """
        offered, _ = self._waiting.get(name, (None, None))
        if offered is None:
            return False
        lacking, now = frozenset(files) - set(offered.offer.has), asyncio.get_running_loop().time()
        if not lacking:
            self._sent.pop(name, None)
            return True
        before, at_s = self._sent.get(name, (frozenset[str](), 0.0))
        if lacking != before or now - at_s > SENT_AGAIN_S:
            self._sent[name] = lacking, now
            self._drop(name)
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
                    if not self._is_connected(name) and self._heard(name) is None:  # else it is slow to offer one
                        msg = f"{name} has gone"
                        raise OSError(msg)
        except TimeoutError as e:
            msg = f"{name} has not fetched its layers within {STAGE_S:g} s"
            raise OSError(msg) from e

    async def take(self, name: str, files: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        """Return a host of that machine, which has the files; waits for one that was there just now."""
        if name in self._left_alone:
            return None
        ended_at, now = self._ended_at.get(name), asyncio.get_running_loop().time()
        comes_s = self._comes_s.get(name, COMES_S)
        is_coming = any(machine == name for machine, _ in self._lives) or (ended_at and now - ended_at < comes_s)
        if name not in self._waiting and is_coming:
            with suppress(TimeoutError):
                async with asyncio.timeout(comes_s):
                    while name not in self._waiting:
                        await self._changed.wait()
        if not self.has(name, files):
            return None
        offered, sock = self._waiting.pop(name)
        life = LentLife(name, offered.life, offered.offer.build.llama)
        self._lives[name, offered.life] = life
        return life, sock

    def describe(self, name: str) -> dict[str, Any]:
        """Return what is known of a machine: whether it is there, what it allows, and by what it computes."""
        offered = self._latest.get(name)
        return {
            "connected": self._is_connected(name),
            "lent": self._is_lent(name),
            "left_alone": name in self._left_alone,
            "address": offered.address if offered else None,
            "n_threads": offered.offer.n_threads if offered else None,
            "memory_bytes": offered.offer.memory_bytes if offered else None,
            "llama": offered.offer.build.llama if offered else None,
            "disco": offered.offer.build.disco if offered else None,
            "python": offered.offer.python if offered else None,
            "ray": offered.offer.ray if offered else None,
            "ahead_s": self._ahead_s.get(name),
        }

    def _is_lent(self, name: str) -> bool:
        return any(machine == name for machine, _ in self._lives)

    def _is_connected(self, name: str) -> bool:
        return self._is_lent(name) or name in self._waiting

    def _drop(self, name: str) -> None:
        if (waiting := self._waiting.pop(name, None)) is not None:
            waiting[1].close()


def own_llama(build: Build) -> Build:
    """Return what is said of a model, with the llama.cpp that this machine computes by. Raises ConfigError; blocks."""
    try:
        done = process.run(MODULE, "--build", timeout_s=BUILD_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        msg = f"llama.cpp does not say its version: {e}"
        raise ConfigError(msg) from e
    lines = done.stdout.decode("utf-8", "replace").split("\n")
    if done.returncode != 0 or not lines[0].strip():
        msg = f"llama.cpp does not say its version (exit status {done.returncode})"
        raise ConfigError(msg)
    return msgspec.structs.replace(build, llama=lines[0].strip())
