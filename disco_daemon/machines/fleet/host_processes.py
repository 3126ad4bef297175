"""The hosts of an engine that is a fleet's home: started as it asks for them, and ended with it.

A host of this machine is a process of ours. One of another machine is what that lends; while it is not there, a process
of this machine *stands in* for it, and gives way when it comes: to the engine that is a host that was lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from ...engine.door import HostWanted, SocketPassed
from ...errors import ConfigError
from ...plain import reason_of
from ...system.control_socket import ControlClosedError, ControlSocket
from ...system.supervised import ChildProcess
from ...system.tasks import cancel_all
from .host_places import Borrower, Lenders, LentLife, LentMachine, RangePath
from .layer_plan import host_name
from .spare_host import SpareHost, start_host

log = logging.getLogger("disco.fleet")

REAPED_S = 0.2  # for the news that a host has ended, which home had by its socket; a process that hangs is killed then
ENDED_S = 2.0  # for a host whose home has gone, until it is killed: a batch that is being computed takes less than 1 s


@dataclass(slots=True)
class HostLife:
    """One host: its process of the present life, and how many lives it had."""

    number: int
    child: ChildProcess | None = None
    epoch: int = 0
    lent: LentLife | None = None  # in place of a process

    @property
    def is_up(self) -> bool:
        """Whether it computes, wherever it is."""
        return self.pid is not None or (self.lent is not None and not self.lent.has_ended)

    @property
    def machine(self) -> str:
        """The other machine where it is; "" = this one."""
        return "" if self.lent is None or self.lent.has_ended else self.lent.machine

    @property
    def pid(self) -> int | None:
        """The process that computes; None if there is none, or if it has ended."""
        return self.child.pid if self.child is not None and self.child.is_alive else None


class HostProcesses:
    """The hosts 1 to `n` of one engine; `write` writes the files of all ranges, if they are missing.

    The hosts above `n_local` are of other machines, by their places, where there are `lenders`; `files` are the layers
    of a host, by its number, with their files, and `coming` those that it will have when a move has ended; it takes
    `needs` bytes with the present ones. All mutable state: the door to the present engine process, each host's life,
    and the process for the next one that is lost.
    """

    def __init__(
        self,
        n: int,
        write: Callable[[], object],
        n_local: int | None = None,
        files: Callable[[int], Sequence[RangePath]] = lambda _: (),
        lenders: Lenders | None = None,
        coming: Callable[[int], Sequence[RangePath] | None] = lambda _: None,
        needs: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self.hosts = [HostLife(number) for number in range(1, n + 1)]
        self._n_local = n if n_local is None or lenders is None else n_local
        self._write, self._files, self._coming, self._lenders = write, files, coming, lenders
        self._needs = needs
        self._ending: Callable[[Borrower], None] | None = None
        self._spare = SpareHost()
        self._door: ControlSocket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Write the ranges' files, if they are missing. Raises OSError."""
        try:
            await asyncio.to_thread(self._write)
        except ConfigError as e:
            raise OSError(str(e)) from e
        if self._lenders is not None:
            self._ending = self._lenders.end
            self._lenders.borrow_for(self)

    def machine_is_there(self, place: int) -> None:
        """Let a process that stands in for a machine end, now that this is there: the engine asks for a host then."""
        index = self._n_local + place
        if index < len(self.hosts) and (child := self.hosts[index].child) is not None:
            child.kill()

    def files_of(self, place: int) -> Sequence[RangePath]:
        """Return the layers that the machine at a place has, and those that are to come to it, with their files."""
        number = self._n_local + 1 + place
        present = list(self._files(number))
        return [*present, *(one for one in self._coming(number) or () if one not in present)]

    def keeps(self, place: int) -> bool:
        """Whether the machine at a place has layers, also when the move that is under way has ended."""
        number = self._n_local + 1 + place
        coming = self._coming(number)
        return bool(self._files(number) if coming is None else coming)

    async def stage(self) -> None:
        """Let other machines fetch what will be theirs when the move that is under way has ended.

        Raises OSError if one of them does not get it; a machine for which a process stands in gets nothing.
        """
        for number, machine in self.elsewhere().items():
            names = [path.name for _, path in self._coming(number) or ()]
            if not set(names) - {path.name for _, path in self._files(number)}:
                continue
            if machine is None or machine.stood_in or self._lenders is None:
                raise OSError(f"{self.name_of(self.hosts[number - 1])} is not there just now")
            await self._lenders.stage(number - self._n_local - 1, names)

    def elsewhere(self) -> dict[int, LentMachine | None]:
        """Return the machines of hosts that are not this one's, by the hosts' numbers; None of one that is not there.

        There are none where nothing is borrowed.
        """
        if self._lenders is None:
            return {}
        found = dict[int, LentMachine | None]()
        for host in self.hosts[self._n_local :]:
            machine = self._lenders.machine_at(host.number - self._n_local - 1)
            found[host.number] = machine and replace(machine, stood_in=host.pid is not None)
        return found

    def name_of(self, host: HostLife) -> str:
        """Return what a host is called: by its number, or by the machine that has its layers."""
        place = host.number - self._n_local - 1
        name = self._lenders.name_of(place) if self._lenders is not None and place >= 0 else ""
        return name or host_name(host.number)

    def state_of(self, host: HostLife) -> str:
        """Return `up`, `lost`, or `stand-in` where a process of this machine computes in place of another one."""
        place = host.number - self._n_local - 1
        if self._lenders is None or place < 0:
            return "up" if host.is_up else "lost"
        if host.lent is not None or not host.is_up:
            return "up" if host.is_up or self._lenders.is_there(place) else "lost"
        return "stand-in"

    @property
    def may_borrow(self) -> bool:
        """Whether rows may reach another machine now, or during the next answer."""
        return self._lenders is not None

    def stay_here(self) -> None:
        """Borrow nothing any more: private texts are computed from now on, whose rows a later host would get."""
        self._lenders = None

    def attach(self, door: socket.socket) -> None:
        """Start hosts as a new engine process asks for them by its end of `door`."""
        self._door = ControlSocket(door)
        self._spare.prepare()
        self._serving = asyncio.create_task(self._serve(self._door), name="fleet hosts")

    async def detach(self) -> None:
        """End all hosts, and wait for them: their engine process has gone. Idempotent."""
        if self._ending is not None:
            self._ending(self)
        await cancel_all(self._serving)
        if self._door is not None:
            self._door.close()
            self._door = None
        await self._spare.close()
        await asyncio.gather(*(_bury(host) for host in self.hosts))
        for host in self.hosts:
            host.lent = None  # its socket was the engine's

    async def _serve(self, door: ControlSocket) -> None:
        """Answer the engine until it has gone."""
        with suppress(ControlClosedError, msgspec.MsgspecError):
            while True:
                number = msgspec.msgpack.decode((await door.receive())[0], type=HostWanted).number
                try:
                    sock = await self._open(number)
                except OSError as e:
                    log.warning("no process for host %d of the fleet: %s", number, e)
                    await door.send(SocketPassed(why=reason_of(e)))
                    continue
                with sock:
                    await door.send(SocketPassed(self.hosts[number - 1].lent is not None), sock.fileno())

    async def _open(self, number: int) -> socket.socket:
        """Begin a new life of a host in place of the one before; return home's end of its socket. Raises OSError."""
        if not 1 <= number <= len(self.hosts):
            raise OSError(f"the fleet has no host {number}")
        host = self.hosts[number - 1]
        if host.child is not None:
            log.warning("host %d of the fleet is replaced: %s", number, await _bury(host, REAPED_S))
            await self.prepare()  # its file may have been removed since
        if (sock := await self._borrow(host)) is not None:
            return sock
        host.child = await self._spare.take() or await start_host()
        self._spare.prepare()
        host.epoch += 1
        log.info("host %d of the fleet: process %d", number, host.child.pid)
        return host.child.sockets[0]

    async def _borrow(self, host: HostLife) -> socket.socket | None:
        """Return the socket to a host of another machine; None if it is this machine's, or if that is not there."""
        before, host.lent = host.lent, None
        if before is not None:  # the engine has closed it, or has found it closed: the relay says which
            with suppress(TimeoutError):
                async with asyncio.timeout(REAPED_S):
                    await before.over.wait()
        if self._lenders is None or host.number <= self._n_local:
            return None
        place = host.number - self._n_local - 1
        present = self._files(host.number)
        machine, taken = self._lenders.machine_at(place), None
        if machine is None or not present or not 0 < machine.memory_bytes < self._needs(host.number):
            taken = await self._lenders.take(place, [path.name for _, path in present])
        else:  # three processes that end for want of memory would fail the answers
            log.warning("host %d of the fleet: %s may not have its layers any more", host.number, machine.name)
        if taken is None and not present and self._coming(host.number):
            msg = f"{self.name_of(host)} is not there just now"  # nothing moves to what would stand in for it
            raise OSError(msg)
        if taken is None:
            log.info("host %d of the fleet: a process of this machine stands in", host.number)
            return None
        host.lent, sock = taken
        host.epoch += 1
        log.info("host %d of the fleet: lent by %s", host.number, host.lent.machine)
        return sock


async def _bury(host: HostLife, wait_s: float = ENDED_S) -> str:
    """Wait for the end of a host's process, and kill it if it does not end; return what became of it."""
    child = host.child
    if child is None:
        return "it never began"
    by_itself = await child.end(wait_s)
    host.child = None
    return f"it {child.ending if by_itself else 'no longer answered'}{child.last_words}"
