"""What a connection may wait for, and how much there may be of everything; against a real loopback server."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from disco_daemon.api.http import connections
from disco_daemon.api.http.connections import MAX_CONNECTIONS, ConnectionLimits, Connections, Runner, bounded
from disco_daemon.api.http.failures import MAX_BODY, shape_errors
from disco_daemon.api.http.peers import Peer, Whose
from disco_daemon.daemon import open_files
from tests.fixtures.raw import message, parsed, replied

PATIENCE_S = 60.0
WHOLE = b"x" * 8 * 1024 * 1024


class House:
    """A server with one route, which answers with the length of the body once `go` is set."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.go = asyncio.Event()
        self.came = asyncio.Event()
        self.n_answered = 0
        self.app = web.Application(middlewares=[shape_errors, bounded], client_max_size=MAX_BODY)
        self.app.router.add_post("/", self._answer)
        self.app.router.add_get("/much", self._much)
        self.runner = Runner(self.app, None, limits, shutdown_timeout=0.1)

    async def _answer(self, request: web.Request) -> web.Response:
        read = await connections.body(request)
        self.came.set()
        await self.go.wait()
        self.n_answered += 1
        return web.Response(text=str(len(read)))

    async def _much(self, request: web.Request) -> web.Response:
        self.came.set()
        return web.Response(body=WHOLE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    @property
    def server(self) -> Connections:
        return cast("Connections", self.runner.server)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.005)  # the other end of a socket has no event


@asynccontextmanager
async def house(**limits: float) -> AsyncIterator[House]:
    found = House(ConnectionLimits(**limits))  # type: ignore[arg-type]
    await found.runner.setup()
    await web.TCPSite(found.runner, "127.0.0.1", 0).start()
    try:
        yield found
    finally:
        found.go.set()
        await found.runner.cleanup()
        assert found.server is None


async def opened(found: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", found.runner.addresses[0][1])


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the other end closes."""
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read()


BEGUN = {
    "nothing": b"",
    "half a header": b"POST / HTTP/1.1\r\nHost: 127.0",
    "an empty line": b"\r\n",
}


@pytest.mark.parametrize("what", BEGUN)
async def test_a_connection_on_which_no_header_comes_is_ended(what: str) -> None:
    async with house(receive_timeout_s=0.2) as found:
        reader, writer = await opened(found)
        writer.write(BEGUN[what])
        assert await ended(reader) == b""
        await found.until(lambda: found.server.n["client"] == 0)
        writer.close()


async def test_one_that_is_idle_after_an_answer_is_ended() -> None:
    async with house(receive_timeout_s=1.0) as found:
        found.go.set()
        reader, writer = await opened(found)
        for _ in range(2):
            writer.write(message("POST", "/", b"abc", Connection="keep-alive"))
            assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200")
        assert await ended(reader) == b""
        writer.close()


async def test_a_header_that_dribbles_is_ended_too() -> None:
    async with house(receive_timeout_s=0.3) as found:
        reader, writer = await opened(found)
        writer.write(b"POST / HTTP/1.1\r\nX: ")
        end = asyncio.ensure_future(ended(reader))
        for _ in range(200):
            if end.done():
                break
            writer.write(b"a")
            await asyncio.wait([end], timeout=0.05)
        assert end.done()
        await asyncio.gather(end, return_exceptions=True)  # a reset, if a byte was still on its way
        writer.close()


@pytest.mark.parametrize("dribbles", [False, True])
async def test_a_body_that_does_not_come_is_a_408(dribbles: bool) -> None:
    async with house(receive_timeout_s=0.3) as found:
        reader, writer = await opened(found)
        writer.write(message("POST", "/", b"", Content_Length="1000", Connection="keep-alive"))
        answer = asyncio.ensure_future(reader.readuntil(b"}}"))
        for _ in range(200 if dribbles else 0):
            writer.write(b"a")
            if (await asyncio.wait([answer], timeout=0.05))[0]:
                break
        reply = parsed(await asyncio.wait_for(answer, PATIENCE_S))
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "timeout", "close")
        await found.until(lambda: found.server.n["client"] == 0 and found.server.held == 0)
        writer.close()


async def test_a_promise_of_50_gb_is_a_413_at_once() -> None:
    async with house() as found:
        sent = message("POST", "/", b"x", Content_Length=str(50 * 10**9))
        async with asyncio.timeout(PATIENCE_S):
            reply = await replied(found.url, sent)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "request_too_large", "close")
        await found.until(lambda: found.server.held == 0)


async def test_a_body_without_a_length_is_cut_where_it_is_too_large() -> None:
    async with house() as found:
        head = message("POST", "/", b"", Transfer_Encoding="chunked", Content_Length="")
        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        reply = await replied(found.url, head + chunk * 9 + b"0\r\n\r\n")
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")


async def test_bodies_are_bounded_in_all_and_who_comes_later_is_told_when_to_come_again() -> None:
    async with house(body_bytes=1000) as found:
        first = asyncio.create_task(replied(found.url, message("POST", "/", b"x" * 900)))
        await asyncio.wait_for(found.came.wait(), PATIENCE_S)
        assert found.server.held == 900
        reply = await replied(found.url, message("POST", "/", b"x" * 200))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert found.server.held == 900
        found.go.set()
        assert (await first).body == b"900"
        await found.until(lambda: found.server.held == 0)
        assert (await replied(found.url, message("POST", "/", b"x" * 200))).body == b"200"


async def test_a_client_that_leaves_holds_no_body() -> None:
    async with house() as found:
        _, writer = await opened(found)
        writer.write(message("POST", "/", b"x" * 900))
        await asyncio.wait_for(found.came.wait(), PATIENCE_S)
        writer.close()
        await found.until(lambda: found.server.held == 0 and found.server.n["client"] == 0)
        assert found.n_answered == 0


async def test_connections_are_bounded_and_one_too_many_is_told_when_to_come_again() -> None:
    async with house(connections=3) as found:
        found.go.set()
        held = [await opened(found) for _ in range(3)]
        await found.until(lambda: found.server.n["client"] == 3)
        reply = await replied(found.url, message("POST", "/", b"x" * 100_000))
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["server"] == "disco"
        held[0][1].close()
        await found.until(lambda: found.server.n["client"] == 2)
        assert (await replied(found.url, message("POST", "/", b"abc"))).body == b"3"
        for _, writer in held:
            writer.close()
        await found.until(lambda: not +found.server.n)


async def test_one_too_many_that_has_gone_before_it_is_told_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with house(connections=0) as found:
        with socket.create_connection(found.runner.addresses[0]):
            pass
        await found.until(lambda: connections.SURPLUS in found.server.n and not +found.server.n)
    assert not caplog.records


async def test_a_reader_who_takes_nothing_is_not_waited_for_for_ever() -> None:
    async with house(reader_timeout_s=0.2, receive_timeout_s=0.2) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.runner.addresses[0][1], limit=1)
        writer.write(message("GET", "/much"))
        await asyncio.wait_for(found.came.wait(), PATIENCE_S)
        await found.until(lambda: found.server.n["client"] == 0)
        writer.close()
        del reader


def test_each_kind_of_peer_has_its_own_bound() -> None:
    limits = ConnectionLimits()
    kinds = {whose: limits.of(Peer(whose)) for whose in Whose}
    assert kinds[Whose.DOOR] == limits.doors
    assert kinds[Whose.OTHER] == kinds[Whose.NOBODY] == limits.strangers
    assert kinds[Whose.OURS] == kinds[Whose.ROOT] == kinds[Whose.UNTOLD] == limits.connections == MAX_CONNECTIONS


def test_no_handler_reads_a_body_without_its_bounds() -> None:
    folder = Path(connections.__file__).parents[1]
    for file in folder.rglob("*.py"):
        found = re.findall(r"request\.(?:read|text|json|post|multipart)\(|request\.content\.", file.read_text("utf-8"))
        assert not found or file.name == "connections.py", file


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert open_files.raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        hard = before[1]
        assert open_files.raise_limit() == (open_files.WANTED_FILES if hard < 0 else min(open_files.WANTED_FILES, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_go_with_the_files_there_may_be() -> None:
    assert open_files.connections(open_files.WANTED_FILES) == MAX_CONNECTIONS
    assert open_files.connections(1024) == 448
    assert open_files.connections(100) == open_files.LEAST_CONNECTIONS
