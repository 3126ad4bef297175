"""What the owner of this machine lets a fleet have, in files, so that it can be changed while hosts are lent.

`disco machines join` with other words writes a *wish* beside the layers; the program that lends them takes it within a
second, and then keeps it as the terms in force. Whatever starts that program again begins with those.

It is no frame of a socket: the two programs are not parent and child, so each would need a place to meet, a check of
who is there and a stale name to remove. And the one that lends looks each second in any case, at the memory that a
host takes, of which nothing tells it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from ...config.layers import write_private
from ...errors import ConfigError
from ..owner import OwnerTerms

OTHER_S = 10.0  # for another program that lends to end, such as one whose Ray has just gone
TAKEN_S = 10.0  # for the program that lends to take a wish: it looks once a second, and may be busy
LOOK_S = 0.1  # between two looks: neither a lock nor a file tells anybody


class _Terms(msgspec.Struct, frozen=True):
    """The terms as they are written down."""

    n_threads: Annotated[int, Meta(ge=1)]
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    only_idle: bool = False
    only_mains: bool = False


@dataclass(frozen=True, slots=True)
class TermsFolder:
    """The terms for one home, in the folder of the layers that are computed for it."""

    folder: Path

    @property
    def _in_force(self) -> Path:
        return self.folder / "terms.json"

    @property
    def _wish(self) -> Path:
        return self.folder / "wish.json"

    def in_force(self) -> OwnerTerms | None:
        """Return the terms of the program that lends, or lent last; None where there are none."""
        return _read(self._in_force)

    def keep(self, terms: OwnerTerms) -> None:
        """Let these be in force. Raises OSError."""
        _write(self._in_force, terms)

    def take_wish(self) -> OwnerTerms | None:
        """Return what the owner has wished since the last time, which is then no wish any more; None for nothing."""
        taken = self.folder / "taken.json"
        try:
            self._wish.replace(taken)  # so one that comes just now is kept for the next time
        except FileNotFoundError:
            return None
        return _read(taken)

    def is_lending(self) -> bool:
        """Whether a program lends from this folder."""
        try:
            file = _opened(self.folder)
        except FileNotFoundError:
            return False
        with file:
            return not _locked(file)

    def agree(self, terms: OwnerTerms) -> bool:
        """Let the program that lends go by these terms; return False if it has ended before it took them.

        Blocks for TAKEN_S at most. Raises ConfigError if it does not take them, OSError if they cannot be written.
        """
        _write(self._wish, terms)
        deadline = time.monotonic() + TAKEN_S
        while self._wish.exists() or _written(self.in_force()) != _written(terms):
            if not self.is_lending():
                self.take_wish()
                return False
            if time.monotonic() > deadline:
                self.take_wish()
                raise ConfigError(f"what lends this machine's hosts has not taken the new terms within {TAKEN_S:g} s")
            time.sleep(LOOK_S)
        return True

    async def alone(self) -> IO[bytes]:
        """Let no other program lend from this folder until the file is closed. Raises ConfigError, OSError."""
        file = _opened(self.folder)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OTHER_S
        while not _locked(file):
            if loop.time() > deadline:
                file.close()
                raise ConfigError(
                    "this machine lends hosts already: `disco machines join` runs elsewhere. With --cpus, --memory, "
                    "--only-idle or --only-mains it changes what those may have"
                )
            await asyncio.sleep(LOOK_S)
        return file


def _opened(folder: Path) -> IO[bytes]:
    return os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b")


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _written(terms: OwnerTerms | None) -> _Terms | None:
    if terms is None:
        return None
    return _Terms(terms.n_threads, terms.memory_bytes, terms.only_idle, terms.only_mains)


def _write(path: Path, terms: OwnerTerms) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, msgspec.json.encode(_written(terms)).decode())


def _read(path: Path) -> OwnerTerms | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Terms)
    except (OSError, msgspec.MsgspecError):
        return None
    return OwnerTerms(found.n_threads, found.memory_bytes, found.only_idle, found.only_mains)
