"""A process of this machine that computes for another one, and what it may have of this one's threads and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...link.relay.handshake import SegmentFact
from ...link.trust.pairing_code import PairingError
from ...system.supervised import ChildProcess
from ..owner import OwnerTerms
from .spare_host import MODULE


@dataclass(eq=False, slots=True)
class LentProcess:
    """One such process, its terms in force, and what says that its life is `over`.

    Threads and more memory are its own at once; less memory is in force as soon as it takes no more than that, since
    until then home still moves layers away, and what has no memory ends.
    """

    child: ChildProcess
    over: asyncio.Event
    n_threads: int
    memory_bytes: int

    @staticmethod
    async def begin(fd: int, folder: Path, terms: OwnerTerms, over: asyncio.Event) -> LentProcess:
        """Start one behind the socket `fd`. Raises OSError."""
        words = str(folder), str(terms.n_threads), str(terms.memory_bytes)
        child = await ChildProcess.start(MODULE, *words, fds=[fd], piped=True)
        return LentProcess(child, over, terms.n_threads, terms.memory_bytes)

    def go_by(self, terms: OwnerTerms) -> bool:
        """Put the terms in force as far as that is possible now; return whether all of them are."""
        wanted, present = terms.memory_bytes, self.memory_bytes
        if wanted and (not present or wanted < present) and (taken_by(self.child.pid) or 0) > wanted:
            wanted = present
        if (terms.n_threads, wanted) != (self.n_threads, present):
            self.n_threads, self.memory_bytes = terms.n_threads, wanted
            self._say(f"terms {self.n_threads} {self.memory_bytes}")
        return self.memory_bytes == terms.memory_bytes

    async def serve(self, have: Callable[[SegmentFact], Awaitable[None]]) -> None:
        """Let each file that it asks for be there, by `have`, until it ends."""
        assert self.child.process.stdout is not None
        assert self.child.process.stdin is not None
        with suppress(OSError, ValueError):
            while line := await self.child.process.stdout.readline():
                first, last, name = line.decode("utf-8", "replace").rstrip("\n").split(" ", 2)
                answer = "there"
                try:
                    await have(SegmentFact(int(first), int(last), name))
                except PairingError as e:
                    answer = " ".join(f"missing {e}".split())
                self._say(answer)
                await self.child.process.stdin.drain()

    def _say(self, line: str) -> None:
        assert self.child.process.stdin is not None
        if not self.child.process.stdin.is_closing():
            self.child.process.stdin.write(line.encode() + b"\n")


def taken_by(pid: int) -> int | None:
    """Return the memory that RLIMIT_DATA counts of a process, bytes; where nothing tells, what it has in memory.

    None if it has ended.
    """
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return int(getattr(found, "data", found.rss))
