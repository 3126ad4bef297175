"""The relay process: `python -m disco_daemon.link.relay.worker FD`. It alone touches the network for linked machines.

Its one socket to the daemon says what to be (`control`): the partner, which members connect to, or the edge, which
connects; or, of a fleet, home or a machine that lends it hosts. Frames of the link go to and come from an engine by a
socket of their own. When the daemon goes away, its socket ends and so does this process. One thread, one loop; nothing
is written to a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
from collections import deque

import msgspec

from ...plain import reason_of
from ...system.confine import Access, confine
from ...system.control_socket import ControlClosedError, ControlSocket
from ...system.tasks import cancel_all
from ..trust.tls import meaning
from . import orders
from .connector import Connector
from .engine_hub import EngineHub
from .host_lender import HostLender
from .listener import MemberListener
from .offers import Offers
from .orders import (
    EngineSocket,
    JoinPartner,
    LendHosts,
    MemberAnswer,
    OfferFile,
    RefuseFile,
    RelayEvent,
    ServeMembers,
    StopRole,
    TellHome,
)

NICE = 5  # added to our niceness, as the engine's: the daemon comes first
MAX_EVENTS = 10_000  # that wait for the daemon; one that takes none for so long has gone


class RelayService:
    """The process: the control socket, the engine's, and one role.

    All mutable state: the present role with its task, and the events that wait for the daemon.
    """

    def __init__(self, sock: socket.socket, confined: tuple[str, ...]) -> None:
        self._confined = confined
        self._control = ControlSocket(sock, orders.FRAMES)
        self._events: deque[tuple[RelayEvent, int | None]] = deque()
        self._happened = asyncio.Event()
        self._hub = EngineHub()
        self._offers = Offers(self.report)
        self._listener: MemberListener | None = None
        self._joined: JoinPartner | LendHosts | None = None
        self._lender: HostLender | None = None
        self._connecting: asyncio.Task[None] | None = None

    def report(self, event: RelayEvent, descriptor: int | None = None) -> None:
        """Tell the daemon, soon, and close the descriptor that goes with it."""
        if len(self._events) >= MAX_EVENTS:
            os._exit(1)
        self._events.append((event, descriptor))
        self._happened.set()

    async def run(self) -> None:
        """Do what the daemon says until it has gone."""
        self.report(orders.RelayReady(confined=self._confined))
        telling = asyncio.create_task(self._tell(), name="events")
        try:
            while True:
                body, descriptor = await self._control.receive()
                await self._do(orders.to_relay.decode(body), descriptor)
        except ControlClosedError:
            pass
        finally:
            await cancel_all(telling)
            await self._stop()
            await self._hub.detach("this machine ends")
            self._offers.drop_files()
            self._control.close()

    async def _tell(self) -> None:
        with contextlib.suppress(ControlClosedError):
            while True:
                while self._events:
                    event, descriptor = self._events.popleft()
                    try:
                        await self._control.send(event, descriptor)
                    finally:
                        if descriptor is not None:
                            os.close(descriptor)
                self._happened.clear()
                await self._happened.wait()

    async def _do(self, message: orders.ToRelay, descriptor: int | None) -> None:
        match message:
            case ServeMembers():
                await self._serve(message)
            case JoinPartner() | LendHosts():
                await self._join(message)
            case TellHome(load=load):
                if self._lender is not None:
                    self._lender.tell(load)
            case StopRole():
                await self._stop()
            case EngineSocket():
                if descriptor is None:
                    await self._hub.detach("the engine has stopped")
                else:
                    await self._hub.attach(socket.socket(fileno=descriptor))
            case OfferFile():
                assert descriptor is not None
                self._offers.offer(message, descriptor)
            case RefuseFile():
                self._offers.refuse_file(message)
            case MemberAnswer():
                self._offers.answer(message)

    async def _serve(self, message: ServeMembers) -> None:
        await self._stop_connecting()
        self._offers.welcome, self._offers.only_llama = message.welcome, message.only_llama
        self._offers.ray = message.ray
        self._offers.drop_files()  # another exit may have been trained since they came
        if self._listener is None:
            self._listener = MemberListener(self._hub, self.report, self._offers.pair, self._offers.serve)
        try:
            await self._listener.configure(message)
        except ssl.SSLError as e:
            self.report(orders.Listening(port=0, error=f"the certificate of this machine cannot be used: {e.reason}"))

    async def _join(self, message: JoinPartner | LendHosts) -> None:
        if message == self._joined:
            return  # the link goes on
        if self._lender is not None and isinstance(message, LendHosts) and self._lender.use(message):
            self._joined = message
            return  # hosts that compute go on
        await self._stop()
        try:
            connector: Connector | HostLender
            if isinstance(message, LendHosts):
                connector = self._lender = HostLender(self.report, message)
            else:
                connector = Connector(self._hub, self.report, message)
        except ssl.SSLError as e:
            _, why = meaning(e)
            self.report(orders.LinkDown(name=message.name, reason="certificate", message=why, final=True))
            return
        self._joined = message
        self._connecting = asyncio.create_task(connector.run(), name="link to the partner")

    async def _stop(self) -> None:
        await self._stop_connecting()
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    async def _stop_connecting(self) -> None:
        await cancel_all(self._connecting)
        self._connecting = self._joined = self._lender = None


async def _run(sock: socket.socket, confined: tuple[str, ...]) -> None:
    await RelayService(sock, confined).run()


def give_up_rights() -> tuple[str, ...]:
    """Give up what a relay never does; return the measures in force.

    It opens no file but those of the interpreter, writes to none, and starts no process; the network is its work.
    What it sends of a model comes open from the daemon, and keys come by its socket.
    """
    sys.dont_write_bytecode = True
    found = confine(Access(network=True)).in_force
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        found.append("no writing to files")
    return tuple(found)


def main() -> None:
    """Run on the inherited socket whose number is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; it ends us by closing the socket
    os.nice(NICE)
    confined = give_up_rights()
    try:
        asyncio.run(_run(socket.socket(fileno=int(sys.argv[1])), confined))
    except (msgspec.MsgspecError, OSError) as e:
        sys.exit(reason_of(e))


if __name__ == "__main__":
    main()
