"""A TCP proxy on loopback that breaks what passes through it, as networks and gateways do.

One proxy stands before one server. Nothing of HTTP is changed but where a fault answers in the server's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from disco_daemon.bench.loopback import bind

PIECE = 65536  # bytes read at once
CONNECT_S = 5.0  # to the server behind
CRUMB, CRUMB_S = 7, 0.002  # bytes, and the pause after them, s, of a line that trickles

Connection = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Proxy:
    """Passes connections on to a port of this machine. `passed` counts them; `seen` says whether a text went by.

    Faults: `cut` ends all connections, `stalled` holds every byte back, `refusing` answers new connections with a
    reset, `trickling` lets the answer through in crumbs. `instead` is a whole HTTP response, which the next `n_instead`
    connections get in the server's place. `cut_after` bytes of answer the next connection is reset.
    """

    def __init__(self, port: int, watched: bytes = b"") -> None:
        self.port = 0
        self.passed = 0
        self.seen = False
        self.instead = b""
        self.n_instead = 0
        self.cut_after: int | None = None
        self.refusing = self.trickling = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._target, self._watched = port, watched
        self._open: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def n_open(self) -> int:
        """Connections that pass through now."""
        return len(self._open)

    def cut(self) -> None:
        """Reset all connections."""
        for pair in self._open:
            for writer in pair:
                writer.transport.abort()

    @asynccontextmanager
    async def stalled(self) -> AsyncIterator[None]:
        """Let nothing through, either way."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Reset all connections and refuse to be connected to; listen again on the same port at the end."""
        assert self._server is not None
        self._server.close()
        reserved = bind(self.port)  # no other process gets the port
        self.cut()
        try:
            yield
        finally:
            self._server = await asyncio.start_server(self._accept, sock=reserved)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, as a task of ours that `__aexit__` ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            return
        if self.n_instead > 0:
            self.n_instead -= 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.instead)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return
        async with asyncio.timeout(CONNECT_S):
            theirs, onward = await asyncio.open_connection("127.0.0.1", self._target)
        pair = (writer, onward)
        self._open.add(pair)
        self.passed += 1
        limit, self.cut_after = self.cut_after, None
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, onward, None, answer=False))
                both.create_task(self._pass(theirs, writer, limit, answer=True))
        except* OSError:
            pass
        finally:
            self._open.discard(pair)
            onward.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None, *, answer: bool
    ) -> None:
        """Bytes one way, until they end; the end is passed on. Raises OSError."""
        n_passed = 0
        while data := await reader.read(PIECE):
            await self._flows.wait()
            self.seen |= bool(self._watched) and self._watched in data
            n_passed += len(data)
            if limit is not None and n_passed >= limit:
                raise ConnectionResetError
            if answer and self.trickling:
                for at in range(0, len(data), CRUMB):
                    writer.write(data[at : at + CRUMB])
                    await asyncio.sleep(CRUMB_S)
            else:
                writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
