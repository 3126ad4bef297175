"""A process of this machine that computes for another one, and what it may have of this one's threads and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from ...engine.lent_messages import FileAnswer, HostTerms
from ...link.relay.handshake import SegmentFact
from ...link.trust.pairing_code import PairingError
from ...system.control_socket import ControlClosedError, ControlSocket
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
    terms: HostTerms
    _control: ControlSocket = field(init=False)

    def __post_init__(self) -> None:
        self._control = ControlSocket(self.child.sockets[0])

    @staticmethod
    async def begin(fd: int, folder: Path, terms: OwnerTerms, over: asyncio.Event) -> LentProcess:
        """Start one behind the socket `fd`. Raises OSError."""
        words = str(folder), str(terms.n_threads), str(terms.memory_bytes)
        child = await ChildProcess.start(MODULE, *words, n_sockets=1, fds=[fd])
        return LentProcess(child, over, HostTerms(terms.n_threads, terms.memory_bytes))

    async def go_by(self, terms: OwnerTerms) -> bool:
        """Put the terms in force as far as that is possible now; return whether all of them are."""
        wanted, present = terms.memory_bytes, self.terms.memory_bytes
        if wanted and (not present or wanted < present) and (taken_by(self.child.pid) or 0) > wanted:
            wanted = present
        if (new := HostTerms(terms.n_threads, wanted)) != self.terms:
            self.terms = new
            with suppress(ControlClosedError):
                await self._control.send(new)
        return wanted == terms.memory_bytes

    async def serve(self, have: Callable[[SegmentFact], Awaitable[None]]) -> None:
        """Let each file that it asks for be there, by `have`, until it ends."""
        try:
            while True:
                body, _ = await self._control.receive()
                missing = ""
                try:
                    await have(msgspec.msgpack.decode(body, type=SegmentFact))
                except PairingError as e:
                    missing = str(e)
                await self._control.send(FileAnswer(missing))
        except (ControlClosedError, msgspec.MsgspecError):
            return
        finally:
            self._control.close()


def taken_by(pid: int) -> int | None:
    """Return the memory that RLIMIT_DATA counts of a process, bytes; where nothing tells, what it has in memory.

    None if it has ended.
    """
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return int(getattr(found, "data", found.rss))
