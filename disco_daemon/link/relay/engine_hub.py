"""The relay's end of the socket to its engine: frames of all links, each with the number of its machine."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from ...system.tasks import cancel_all
from ..protocol import FRAMES, BadFrameError, PeerFrame, PeerJoined, PeerLeft, decode, frame
from ..trust.refusals import LinkEndedError
from .frame_stream import READ_AHEAD, FrameStream

ENGINE_WAITING = 1 << 22  # bytes that wait for the engine before rows of other machines are not read any more
CALLS_WAITING = 1 << 25  # bytes that wait for it before calls are not, either


class LinkEnd(Protocol):
    """What the hub knows of a link."""

    number: int
    name: str
    salt: int
    credits: int
    n_ctx: int
    life: int

    def send(self, message: PeerFrame, data: bytes) -> None:
        """Send a frame to the other machine; it has bytes behind its message only if it is SendRows."""
        ...

    async def room(self) -> None:
        """Wait until the other machine has taken most of what was sent to it."""
        ...

    def end(self, reason: str, message: str, *, tell: bool = False) -> None:
        """End the link soon."""
        ...


class EngineHub:
    """The socket to the engine of the day, and the links that stand.

    All mutable state: that socket with the task that reads it, its `life`, which counts engines, and the links by the
    numbers of their machines, which are never used again.
    """

    def __init__(self) -> None:
        self.attached = asyncio.Event()
        self.life = 0
        self._stream: FrameStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._links: dict[int, LinkEnd] = {}
        self._n_numbers = 0

    def next_number(self) -> int:
        """Return a number for a machine that has none yet."""
        self._n_numbers += 1
        return self._n_numbers

    async def attach(self, sock: socket.socket) -> None:
        """Work with an engine that has just started, by a connected stream socket."""
        await self.detach("the engine has started anew")
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_AHEAD)
        stream = self._stream = FrameStream(reader, writer)
        writer.transport.set_write_buffer_limits(high=ENGINE_WAITING)
        self.life += 1
        self._reader = asyncio.create_task(self._read(stream), name="frames of the engine")
        self.attached.set()

    async def detach(self, why: str) -> None:
        """The engine has gone, and with it all that the links are about; idempotent."""
        self._lose(why)
        await cancel_all(self._reader)
        self._reader = None

    def join(self, link: LinkEnd) -> None:
        """Tell the engine that a machine is there. Raises LinkEndedError if there is no engine."""
        if self._stream is None:
            msg = "no model is in memory"
            raise LinkEndedError("not_ready", msg, tell=True)
        link.life = self.life
        self._links[link.number] = link
        joined = PeerJoined(name=link.name, salt=link.salt, credits=link.credits, n_ctx=link.n_ctx)
        self._stream.write(frame(joined, peer=link.number))

    def leave(self, link: LinkEnd, why: str) -> None:
        """Tell the engine that a machine has gone."""
        self._links.pop(link.number, None)
        if self._stream is not None and link.life == self.life:
            self._stream.write(frame(PeerLeft(reason=why[:1000]), peer=link.number))

    async def deliver(self, link: LinkEnd, body: bytes, payload: bytes) -> None:
        """Give the engine a frame of a machine; wait while it has too much to read. Raises LinkEndedError."""
        stream = self._stream
        if stream is None or link.life != self.life:
            msg = "the engine has gone"
            raise LinkEndedError("engine_gone", msg)
        stream.write(FRAMES.pack(body, payload, link.number))
        if payload or stream.n_waiting > CALLS_WAITING:
            await stream.drain()

    async def _read(self, stream: FrameStream) -> None:
        """Pass the engine's frames on, each to its machine."""
        try:
            while True:
                body, payload, number = await stream.read()
                link = self._links.get(number)
                if link is None:  # it has left, and the engine will hear of it
                    continue
                link.send(decode(body), FRAMES.pack(body, payload))
                if len(self._links) == 1:  # nobody else waits; with others a link that is too slow is ended
                    await link.room()
        except LinkEndedError as e:
            self._lose(e.message)
        except BadFrameError as e:  # not an engine of this version
            self._lose(str(e))

    def _lose(self, why: str) -> None:
        if self._stream is None:
            return
        self._stream.abort()
        self._stream = None
        self.attached.clear()
        for link in self._links.values():
            link.end("engine_gone", f"the model has left the memory: {why}", tell=False)
        self._links.clear()
