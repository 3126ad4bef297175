"""The daemon's handle on its relay process: start it, tell it what to be, hear what happens, start it again.

    relay = RelayProcess(on_event)
    relay.start()
    relay.serve(ServeMembers(identity, listen, members, pairing, welcome))   # the partner, or
    relay.join(JoinPartner(identity, name, addresses, hello))                # the edge; each call replaces the former
    relay.give_engine(sock)             # one end of a socketpair whose other end an engine that has started has
    relay.give_engine(None)             # that engine has gone: all links end, and stand again with the next engine
    relay.offer(OfferFile(…), file)     # in answer to FileAsked; relay.send(RefuseFile(…)) says no
    relay.send(MemberAnswer(…))         # in answer to MemberAsks
    relay.join(LendHosts(identity, name, addresses, offer))                  # of a fleet: lend home hosts
    await relay.close()

`on_event` gets each message of the relay (`control.RelayEvent`) in the daemon's loop and must not block; RelayReady is
the first one of each life. A relay that dies is started again by itself and told again what to be. The socket to the
engine dies with it: the engine reads its end, and `on_event` gets `RelayLost`, upon which the daemon gives the engine a
new socket. `on_host` gets the two events that have a socket, HostOffered and HomeReached, and owns that. All methods
may be called at any time, in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from ...system.control_socket import ControlClosedError, ControlSocket
from ...system.supervised import ChildProcess, SupervisedProcess
from . import orders
from .orders import (
    EngineSocket,
    HomeReached,
    HostOffered,
    JoinPartner,
    LendHosts,
    Member,
    OfferFile,
    RelayEvent,
    ServeMembers,
    StopRole,
    ToRelay,
)

log = logging.getLogger("disco.link")

STOP_TIMEOUT_S = 3.0  # after the socket is closed, for good-byes to other machines; then SIGKILL
MAX_ORDERS = 1000  # messages that wait for a relay; one that takes none for so long hangs


class RelayLost(msgspec.Struct, frozen=True):
    """The relay process has died, and with it the socket that the engine has; it is being started again."""

    why: str


class RelayProcess:
    """The relay process of one daemon; see the module for how it is used.

    All mutable state: what the relay is to be, the messages that wait for it, and the life that there is now.
    """

    def __init__(
        self,
        on_event: Callable[[RelayEvent | RelayLost], None],
        on_host: Callable[[HostOffered | HomeReached, socket.socket], None] = lambda _, sock: sock.close(),
    ) -> None:
        self._on_event, self._on_host = on_event, on_host
        self._role: ServeMembers | JoinPartner | LendHosts | None = None
        self._orders: deque[tuple[ToRelay, int | None]] = deque()
        self._ordered = asyncio.Event()
        self._supervised: SupervisedProcess | None = None
        self.last_error = ""

    @property
    def pid(self) -> int | None:
        """The process of the present life; None between two of them."""
        child = self._supervised.child if self._supervised is not None else None
        return child.pid if child is not None else None

    @property
    def n_restarts(self) -> int:
        """How often it has been started again."""
        return self._supervised.n_restarts if self._supervised is not None else 0

    def start(self) -> None:
        """Begin to supervise; the process is started in the background."""
        self._supervised = SupervisedProcess(
            "relay", lambda: ChildProcess.start("disco_daemon.link.relay.worker", n_sockets=1),
            self._converse, self._has_ended,
            patience_s=STOP_TIMEOUT_S, log=log,
        )  # fmt: skip

    async def close(self) -> None:
        """End the process and wait for it; idempotent."""
        if self._supervised is not None:
            await self._supervised.close()
            self._supervised = None
        self._forget_orders()

    # --- orders ---------------------------------------------------------------------------------------------------

    def serve(self, role: ServeMembers) -> None:
        """Be the partner, as this says from now on."""
        self._role = role
        self.send(role)

    def keep_only(self, members: Collection[Member]) -> None:
        """Serve none but these members from now on, and else as before: who was revoked is cut off at once."""
        if isinstance(self._role, ServeMembers):
            left = tuple(one for one in self._role.members if one in members)
            self.serve(msgspec.structs.replace(self._role, members=left))

    def join(self, role: JoinPartner | LendHosts) -> None:
        """Be the edge, or a machine that lends hosts, as this says from now on."""
        self._role = role
        self.send(role)

    def stop(self) -> None:
        """Be neither."""
        self._role = None
        self.send(StopRole())

    def give_engine(self, sock: socket.socket | None) -> None:
        """Hand over the relay's end of a socket to an engine, which is closed here; None: the engine has gone."""
        if sock is None:
            self.send(EngineSocket(there=False))
        else:
            self._order(EngineSocket(there=True), sock.detach())

    def offer(self, message: OfferFile, descriptor: int) -> None:
        """Let members fetch a file, by a descriptor open for reading; a duplicate of it is taken."""
        self._order(message, os.dup(descriptor))

    def send(self, message: ToRelay) -> None:
        """Send a message that has no descriptor."""
        self._order(message, None)

    def _order(self, message: ToRelay, descriptor: int | None) -> None:
        if len(self._orders) >= MAX_ORDERS:
            log.error("relay takes no orders: starting it anew")
            self._forget_orders()
            if self._supervised is not None and self._supervised.child is not None:
                self._supervised.child.kill()
        self._orders.append((message, descriptor))
        self._ordered.set()

    def _forget_orders(self) -> None:
        while self._orders:
            _, descriptor = self._orders.popleft()
            if descriptor is not None:
                os.close(descriptor)

    # --- life -----------------------------------------------------------------------------------------------------

    async def _converse(self, child: ChildProcess) -> str:
        """Speak with one life of the process until its socket ends; return why it ended."""
        sock = ControlSocket(child.sockets[0], orders.FRAMES)
        sending = asyncio.create_task(self._send(sock), name="orders")
        try:
            while True:
                body, descriptor = await sock.receive()
                self._take(orders.relay_event.decode(body), descriptor)
        except msgspec.MsgspecError as e:
            return str(e)
        except ControlClosedError:
            return ""
        finally:
            sending.cancel()
            sock.close()

    def _has_ended(self, why: str) -> None:
        self.last_error = why
        self._on_event(RelayLost(why))

    def _take(self, event: RelayEvent, descriptor: int | None) -> None:
        if isinstance(event, HostOffered | HomeReached):
            if descriptor is None:
                raise msgspec.ValidationError(f"{type(event).__name__} came without its socket")
            self._on_host(event, socket.socket(fileno=descriptor))
            return
        if descriptor is not None:
            os.close(descriptor)
        self._on_event(event)

    async def _send(self, sock: ControlSocket) -> None:
        """Tell a new relay what to be, and then each order as it comes."""
        with contextlib.suppress(ControlClosedError):
            if self._role is not None:
                await sock.send(self._role)
            while True:
                while self._orders:
                    message, descriptor = self._orders.popleft()
                    try:
                        await sock.send(message, descriptor)
                    finally:
                        if descriptor is not None:
                            os.close(descriptor)
                self._ordered.clear()
                await self._ordered.wait()
