"""The bytes of a fleet's host: between the encrypted connection to the other machine and a socket pair of this one.

At home the socket pair's other end is the engine's, at the machine that lends a host it is the process that computes.
Neither sees a network, and nothing here knows what the bytes say: whoever reads them checks them.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ...system.tasks import cancel_all
from ..protocol import Welcome
from ..trust.refusals import LinkEndedError, check_builds
from .frame_stream import FrameStream
from .handshake import HostAccepted, OfferHost, first_frame
from .orders import HostEnded, HostOffered, RelayEvent

OWN_END = "its process has ended"  # why a connection ends whose end on this machine was closed
START_S = 30.0  # for a machine to start a host's process: seconds where it is busy
PIECE = 1 << 17  # bytes that are passed on at a time: a socket holds hardly more
# A machine that is gone without a word is noticed after 5 + 3 x 2 s, also while nobody computes; an engine that waits
# for rows notices after 3.5 s by itself.
KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


class Report(Protocol):
    """Tells the daemon of something, with a descriptor that is closed here when it has been sent."""

    def __call__(self, event: RelayEvent, descriptor: int | None = None, /) -> None:
        """Tell it, soon."""
        ...


class HostPipes:
    """Home's side: each connection of a member that lends a host is one life of it.

    It is told to the daemon once the host's process has said something: then it is there, and silence is no slow start.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lives = itertools.count(1)

    async def serve(
        self, stream: FrameStream, offer: OfferHost, name: str, welcome: Welcome | None, only_llama: str
    ) -> None:
        """Accept a host, tell the daemon that it is there, and carry its bytes to its end.

        Raises LinkEndedError to refuse it, and for one whose process says nothing for START_S.
        """
        if welcome is None:
            raise LinkEndedError("not_ready", "no model of a fleet is there yet", tell=True)
        check_builds(welcome.build, offer.build, 1, 1)
        if only_llama and offer.build.llama != only_llama:
            msg = (
                f"home computes by {only_llama}, and this machine by {offer.build.llama}, which rounds in another way: "
                "home takes it with device.rounding = fast"
            )
            raise LinkEndedError("build", msg, tell=True)
        life, why, before = next(self._lives), "this machine has ended it", stream.n_received
        ours, theirs = socket.socketpair()
        address = (stream.writer.get_extra_info("peername") or ("",))[0]
        is_offered = False
        try:
            stream.write(first_frame(HostAccepted()))
            async with asyncio.timeout(START_S) as start:

                def begin() -> None:
                    nonlocal is_offered
                    is_offered = True
                    start.reschedule(None)
                    self._report(HostOffered(name=name, life=life, address=str(address), offer=offer), theirs.detach())

                why = await carry(stream, ours, begin)
        except TimeoutError as e:
            raise LinkEndedError("silent", f"its process has said nothing for {START_S:g} s") from e
        finally:
            ours.close()
            theirs.close()
            if is_offered:
                n_bytes = stream.n_received - before
                self._report(HostEnded(name=name, life=life, message=why, n_bytes=n_bytes, given_up=why == OWN_END))


async def carry(stream: FrameStream, sock: socket.socket, heard: Callable[[], None] = lambda: None) -> str:
    """Pass bytes both ways until one side ends; return which. `heard` is called when the first come by `stream`."""
    keep_alive(stream)
    sock.setblocking(False)
    ways = {
        asyncio.create_task(_out(stream, sock), name="bytes to the other machine"),
        asyncio.create_task(_in(stream, sock, heard), name="bytes of the other machine"),
    }
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_all(*ways)


async def _out(stream: FrameStream, sock: socket.socket) -> str:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(sock, PIECE):
            stream.write(data)
            await stream.drain()
    except LinkEndedError as e:
        return e.message
    except OSError:
        pass
    return OWN_END


async def _in(stream: FrameStream, sock: socket.socket, heard: Callable[[], None]) -> str:
    loop, is_first = asyncio.get_running_loop(), True
    try:
        while data := await stream.read_some(PIECE):
            if is_first:
                is_first = False
                heard()
            await loop.sock_sendall(sock, data)
    except LinkEndedError as e:
        return e.message
    except OSError:
        return OWN_END
    return "the other machine has ended it"


def keep_alive(stream: FrameStream) -> None:
    """Let the kernel find out whether the other machine is still there, while nothing is said."""
    sock: socket.socket | None = stream.writer.get_extra_info("socket")
    if sock is None:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
