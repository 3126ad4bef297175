"""A request is sent once; connections that are kept are not trusted after sleep, on another network, or when they drop.

The server is a raw socket that does with each request on each connection what a test's script says.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_daemon.endpoints import kept_connections, probe
from disco_daemon.endpoints.continuation import Way
from disco_daemon.endpoints.server import Server
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Token, Usage
from tests.fixtures.raw import serving
from tests.unit.conductor.test_answer_run import DEVICE, SERVER, Scripted, asked, context, played

BODY = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
REQUEST = GenerationRequest("r", ({"role": "user", "content": "x"},))
HI = [Token("hi"), Finish("stop")]


@dataclass
class Raw:
    """What becomes of request i, the first being 0: it is answered, `closed`, `reset`, `begun` and closed, or a `hole`.

    `n_read` requests were read whole, over `n_connections`.
    """

    script: Sequence[str] = ()
    n_read: int = 0
    n_connections: int = 0
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    read: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")]
        self.bodies.append(await reader.readexactly(sum(lengths)))
        what = self.script[self.n_read] if self.n_read < len(self.script) else ""
        self.n_read += 1
        self.read.set()
        if what == "closed":
            return False
        if what == "reset":
            end = writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
            return False
        if what == "begun":
            writer.write(ANSWER[:20])
            await writer.drain()
            return False
        if what == "hole":
            await asyncio.Event().wait()
        writer.write(ANSWER)
        await writer.drain()
        return True


@asynccontextmanager
async def raw(*script: str, **config: Any) -> AsyncIterator[tuple[Raw, Server]]:
    """Such a server, and its endpoint."""
    it = Raw(script)
    async with serving(it.serve, stream_usage=False, **config) as server:
        it.url = server.config.base_url
        yield it, server


async def heard(server: Server) -> list[Token | Finish]:
    async with aclosing(server.ask(REQUEST, Usage())) as events:
        return [event async for event in events]


# --- what is sent, and how often ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (["closed"], "cut"),
        (["reset"], "cut"),
        (["begun"], "cut"),
        (["", "closed"], "dropped"),
        (["", "reset"], "dropped"),
        (["", "begun"], "cut"),
        (["", "", "closed"], "dropped"),
    ],
)
async def test_no_request_is_sent_twice_and_a_drop_of_a_kept_connection_is_told_apart(
    script: list[str], reason: str
) -> None:
    async with raw(*script) as (it, server):
        for _ in script[:-1]:
            assert await heard(server) == HI
        with pytest.raises(EndpointError) as e:
            await heard(server)
        assert e.value.reason == reason
        assert it.n_read == len(script), "the request was sent once"
        assert await heard(server) == HI
        assert it.n_connections == 2


class Dropping(Scripted):
    """Closes so many kept connections unheard, then answers."""

    n_drops = 1

    async def generate(self, request: GenerationRequest, usage: Usage, controls: Any = None) -> AsyncIterator[Any]:  # type: ignore[override]
        if len(self.asked) < self.n_drops:
            self.asked.append(request)
            raise EndpointError(SERVER, "dropped", "closed")
        async for event in super().generate(request, usage, controls):
            yield event


def dropping(n: int = 1) -> Dropping:
    server = Dropping(SERVER, [Token("one"), Finish("stop")])
    server.n_drops = n
    return server


async def test_a_dropped_request_is_sent_once_more_and_both_are_booked() -> None:
    server = dropping()
    on = context(Scripted(DEVICE, [Finish("stop")]), server, "all-server", usd_per_day=2.0)
    text, outcome = await played(on, asked(prefers=SERVER))
    assert (text, len(server.asked)) == ("one", 2)
    assert [a.error for a in outcome.attempts] == ["dropped", None]
    assert [a.usage.prompt_tokens for a in outcome.attempts] == [10, 10]
    assert outcome.cost_usd == pytest.approx(sum(a.bill_usd for a in outcome.attempts))
    assert outcome.attempts[0].bill_usd >= 10e-6
    assert on.spending.caps.spent(on.clock.wall()).usd_today == pytest.approx(outcome.cost_usd)
    assert on.planner.knowledge.server.availability() >= 0.95, "a kept connection says nothing of the server"


async def test_a_request_that_is_dropped_twice_is_not_sent_a_third_time() -> None:
    server = dropping(5)
    on = context(Scripted(DEVICE, [Token("two"), Finish("stop")]), server, "all-server")
    text, outcome = await played(on, asked(prefers=SERVER))
    assert (text, len(server.asked)) == ("two", 2), "the device goes on"
    assert [a.error for a in outcome.attempts] == ["dropped", "dropped", None]


async def test_where_a_cap_or_a_limit_has_room_for_one_only_nothing_is_sent_again() -> None:
    one_usd = 10 * 1e-6 * 1.0
    for more, caps in (({"max_cost_usd": 1e-3}, {}), ({}, {"usd_per_day": 8e-4})):
        server = dropping()
        on = context(Scripted(DEVICE, [Token("two"), Finish("stop")]), server, "all-server", **caps)
        request = asked(prefers=SERVER, **more)
        request = replace(request, sampling=replace(request.sampling, max_tokens=80))
        text, outcome = await played(on, request)
        assert (text, len(server.asked)) == ("two", 1)
        assert one_usd <= outcome.cost_usd <= 1e-3


async def test_nothing_is_sent_again_once_nothing_may_leave_the_machine() -> None:
    server = dropping()
    on = context(Scripted(DEVICE, [Token("two"), Finish("stop")]), server, "all-server")
    before = server.generate

    async def turned(*args: Any) -> AsyncIterator[Any]:
        on.privacy.on = True
        async for event in before(*args):
            yield event

    cast(Any, server).generate = turned
    text, _ = await played(on, asked(prefers=SERVER))
    assert (text, len(server.asked)) == ("two", 1)


async def test_of_the_probe_both_are_counted() -> None:
    async with raw("", "closed") as (it, server):
        server._way = Way.from_setting("none", it.url)
        spent = Usage()
        inquiry = probe._Inquiry(server, spent)
        for _ in range(2):
            assert await inquiry._answer(replace(REQUEST, messages=({"role": "user", "content": "x" * 400},)), None)
        assert it.n_read == 3
        assert 100 <= spent.prompt_tokens <= 110


# --- when a kept one is not used any more --------------------------------------------------------------------------


class Machine:
    """Its clocks and its routes, as the connections see them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asleep, self.address = 100.0, 0.0, "127.0.0.1"
        self.n_lookups = 0
        clocks = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(kept_connections, "time", clocks)
        monkeypatch.setattr(kept_connections, "slept_s", lambda: self.asleep)
        monkeypatch.setattr(kept_connections, "source_of", self._source_of)

    def _source_of(self, there: tuple[Any, ...]) -> str | None:
        assert there[0] == "127.0.0.1"
        self.n_lookups += 1
        return self.address or None


def sleeps(machine: Machine) -> None:
    machine.asleep += 30


def moves(machine: Machine) -> None:
    machine.now += 10
    machine.address = "192.168.7.4"


def goes_offline(machine: Machine) -> None:
    machine.now += 10
    machine.address = ""


def waits(machine: Machine) -> None:
    machine.now += 10


def naps(machine: Machine) -> None:
    machine.asleep += 0.2


@pytest.mark.parametrize(
    ("happens", "kept"), [(sleeps, False), (moves, False), (goes_offline, False), (waits, True), (naps, True)]
)
async def test_a_connection_that_slept_or_is_of_another_network_is_not_used(
    happens: Callable[[Machine], None], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other end is a hole by then: a request into it would wait for its time-out."""
    machine = Machine(monkeypatch)
    async with raw(*[""] * 3, "hole" if not kept else "", first_token_timeout_s=5.0) as (it, server):
        for _ in range(2):
            assert await heard(server) == HI
        happens(machine)
        assert await heard(server) == HI
        assert it.n_connections == (1 if kept else 2)


async def test_routes_are_not_looked_up_for_requests_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    async with raw() as (it, server):
        for _ in range(5):
            assert await heard(server) == HI
            machine.now += 1
        assert (it.n_connections, machine.n_lookups) == (1, 0)


async def test_the_kernel_tells_where_it_would_connect_from() -> None:
    assert kept_connections.source_of(("127.0.0.1", 9)) == "127.0.0.1"
    assert kept_connections.source_of(("255.255.255.255.1", 9)) is None
    before = kept_connections.slept_s()
    assert abs(kept_connections.slept_s() - before) < 0.1


async def test_a_connection_whose_other_end_is_gone_is_the_kernels_to_give_up() -> None:
    async with raw() as (_, server):
        assert await heard(server) == HI
        assert server._client is not None
        connector = server._client._session.connector
        assert connector is not None
        ends = [
            cast(Any, protocol.transport).get_extra_info("socket")
            for kept in connector._conns.values()
            for protocol, _ in kept
        ]
        assert len(ends) == 1
        assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in kept_connections._OPTIONS:
            if hasattr(socket, name):
                assert ends[0].getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


async def test_any_order_of_drops_answers_and_sleeps_sends_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for script in itertools.product(["", "closed", "reset", "begun"], repeat=3):
        async with raw(*script) as (it, server):
            for i in range(len(script)):
                if i == 1:
                    sleeps(machine)
                try:
                    assert await heard(server) == HI
                except EndpointError as e:
                    assert e.reason in ("cut", "dropped")  # noqa: PT017
                assert it.n_read == i + 1
