"""A stream that has nothing to send yet says that it lives: by a clock, beside everything, and never in between."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from disco_daemon.api import answering
from disco_daemon.api.http import signs_of_life, sse
from disco_daemon.api.http.connections import Runner
from disco_daemon.api.http.failures import shape_errors
from disco_daemon.api.http.signs_of_life import SignsOfLife
from disco_daemon.api.http.sse import StreamSink
from disco_daemon.api.openai import openai_request
from disco_daemon.api.openai.shapes import ChatShape
from disco_daemon.clock import Clock, SystemClock
from disco_daemon.errors import RequestError
from disco_daemon.types import BOTH, Outcome, Plan, Side, Token
from tests.fixtures import chat_bodies
from tests.fixtures.clock import StoppedClock
from tests.fixtures.jumping import JumpingLoop

PATIENCE_S = 30.0
INTERVAL_S = 0.05
KEEP_ALIVE = b": keep-alive\n"
CHAT = b'{"model": "disco", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
OUTCOME = Outcome(
    "r", 0.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, 0.1, 1.0, 0, {Side.SERVER: 2}, (), 0.0, 0.0
)  # fmt: skip
Run = Callable[[StreamSink], Awaitable[Outcome]]
Serve = Callable[..., Awaitable[str]]


class PingShape(ChatShape):
    """A shape whose clients count no comments."""

    def sign_of_life(self) -> bytes:
        return b"event: ping\ndata: {}\n\n"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "SIGN_OF_LIFE_S", INTERVAL_S)


@asynccontextmanager
async def serving(clock: Clock) -> AsyncIterator[Serve]:
    """Serve streams that `run` fills; their address."""
    runners = []

    async def serve(run: Run, kind: type[ChatShape] = ChatShape) -> str:
        async def conduct(_generation: object, _model: str, sink: StreamSink) -> Outcome:
            return await run(sink)

        async def answer(request: web.Request) -> web.StreamResponse:
            asked, extra = chat_bodies.parse(CHAT)
            generation = openai_request.to_generation(asked, extra, "r", BOTH)
            return await answering.answer(request, asked, generation, kind("r", 0, "disco"))

        context = SimpleNamespace(endpoints={}, private=False, clock=clock, servers=None)
        served: Any = SimpleNamespace(run=conduct, rules=None, context=context, context_of=lambda _: context)
        made = web.Application(middlewares=[shape_errors])
        made[answering.CONDUCTOR] = served
        made.router.add_get("/", answer)
        runner = Runner(made, None, shutdown_timeout=1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/"

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with serving(SystemClock()) as serve:
        yield serve


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as opened:
        yield opened


def events(told: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in told.split(b"\n") if line.startswith(b"data: {")]


async def test_headers_and_signs_leave_while_the_first_token_is_awaited_and_between_tokens(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def run(sink: StreamSink) -> Outcome:
        await first.wait()
        sink.token(Token("One"), Side.SERVER)
        await sink.flush()
        await second.wait()
        sink.token(Token(" two"), Side.SERVER)
        return OUTCOME

    async with session.get(await serve(run)) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Disco-Request-Id"] == "r"
        assert "X-Disco-Route" not in response.headers, "nobody knows it yet"
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE + b"\n"
        first.set()
        while KEEP_ALIVE in (said := await response.content.readuntil(b"\n\n")):
            pass
        (one,) = events(said)
        assert (one["choices"][0]["delta"]["content"], one["disco"]) == ("One", {"side": "server"})
        assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE + b"\n"
        second.set()
        rest = await response.read()
    two, end = events(rest)
    assert (two["choices"][0]["delta"]["content"], "disco" in two) == (" two", False)
    assert end["disco"]["winner"] == "server"
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_what_comes_in_time_has_its_route_in_the_headers_and_no_sign(
    serve: Serve, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "SIGN_OF_LIFE_S", PATIENCE_S)

    async def run(sink: StreamSink) -> Outcome:
        sink.token(Token("One"), Side.SERVER)
        return OUTCOME

    async with session.get(await serve(run)) as response:
        assert response.headers["X-Disco-Route"] == "server"
        told = await response.read()
    assert b"keep-alive" not in told
    assert "disco" not in events(told)[0]


async def test_a_failure_before_the_headers_left_keeps_its_status(
    serve: Serve, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "SIGN_OF_LIFE_S", PATIENCE_S)
    error = RequestError("too dear", status=429, code="cap_reached")

    async def run(sink: StreamSink) -> Outcome:
        raise error

    async with session.get(await serve(run)) as response:
        assert (response.status, response.content_type) == (429, "application/json")
        assert (await response.json())["error"]["code"] == "cap_reached"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("too dear", status=429, code="cap_reached"), "cap_reached"), (ZeroDivisionError("a secret"), None)],
)
async def test_a_failure_after_the_headers_left_is_told_in_band_and_no_done_follows(
    error: Exception, code: str | None, serve: Serve, session: aiohttp.ClientSession
) -> None:
    fail = asyncio.Event()

    async def run(sink: StreamSink) -> Outcome:
        await fail.wait()
        raise error

    async with session.get(await serve(run)) as response:
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        fail.set()
        told = await response.read()
    (event,) = events(told)
    assert set(event) == {"error"}
    assert event["error"]["code"] == code
    assert b"[DONE]" not in told
    assert b"secret" not in told


async def test_a_shape_may_give_a_sign_of_its_own(serve: Serve, session: aiohttp.ClientSession) -> None:
    end = asyncio.Event()

    async def run(sink: StreamSink) -> Outcome:
        await end.wait()
        return OUTCOME

    async with session.get(await serve(run, PingShape)) as response:
        assert await response.content.readuntil(b"\n\n") == b"event: ping\ndata: {}\n\n"
        end.set()
        assert b"keep-alive" not in await response.read()


async def test_signs_between_many_tokens_cut_none_of_them(serve: Serve, session: aiohttp.ClientSession) -> None:
    words = [f"w{i} " for i in range(200)]

    async def run(sink: StreamSink) -> Outcome:
        for i, word in enumerate(words):
            sink.token(Token(word), Side.SERVER)
            await sink.flush()
            if i % 50 == 0:  # the fault: a server that pauses
                await asyncio.sleep(2 * INTERVAL_S)
        return OUTCOME

    async with session.get(await serve(run)) as response:
        told = await response.read()
    said = [event["choices"][0]["delta"].get("content", "") for event in events(told) if event["choices"]]
    assert "".join(said) == "".join(words)
    assert told.count(KEEP_ALIVE) >= 4


def test_while_a_prompt_is_read_for_a_minute_no_gap_on_the_wire_is_longer_than_eleven_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything as it is, but the loop's time, which jumps to the next timer when nothing else is left to do."""
    monkeypatch.undo()
    assert signs_of_life.SIGN_OF_LIFE_S == 10.0
    loop = JumpingLoop()

    async def run(sink: StreamSink) -> Outcome:
        await asyncio.sleep(60.0)
        sink.token(Token("One"), Side.SERVER)
        return OUTCOME

    async def heard() -> list[float]:
        async with serving(loop) as serve, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
            times = [loop.time()]
            async with session.get(await serve(run)) as response:
                while said := await response.content.readany():
                    times.append(loop.time())
                    assert KEEP_ALIVE in said or b"One" in said
                assert response.status == 200
            return times

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        times = runner.run(heard())
    assert times[1] - times[0] <= 10.5
    assert max(after - before for before, after in itertools.pairwise(times)) <= 11.0
    assert 60.0 <= times[-1] - times[0] <= 61.0
    assert len(times) >= 7


def silence() -> tuple[Callable[[StreamSink], Awaitable[Outcome]], asyncio.Event]:
    """An answer that says nothing and does not end by itself, and what tells that it was ended."""
    ended = asyncio.Event()

    async def run(sink: StreamSink) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    return run, ended


async def test_a_client_that_leaves_while_it_waits_ends_the_answer(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    run, ended = silence()
    async with session.get(await serve(run)) as response:
        await response.content.readuntil(b"\n\n")
    await ended.wait()


async def test_a_reader_that_takes_no_sign_is_cut_off_and_its_answer_ends(
    serve: Serve, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoudShape(ChatShape):
        def sign_of_life(self) -> bytes:
            return b":" * (64 << 20)  # more than sockets hold

    monkeypatch.setattr(sse, "READER_TIMEOUT_S", INTERVAL_S)
    run, ended = silence()
    async with session.get(await serve(run, LoudShape)) as response:
        await ended.wait()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


# --- the timer ----------------------------------------------------------------------------------------------------


async def test_a_sign_is_due_by_the_clock_that_is_passed_in_and_not_while_others_speak() -> None:
    clock, given = StoppedClock(), asyncio.Semaphore(0)

    async def give() -> None:
        given.release()

    living = SignsOfLife(give, clock, INTERVAL_S)
    await asyncio.sleep(2 * INTERVAL_S)  # the loop's time passes, that of the clock does not
    assert given.locked()
    clock.at += INTERVAL_S
    living.heard()
    await asyncio.sleep(2 * INTERVAL_S)
    assert given.locked()
    clock.at += INTERVAL_S
    await asyncio.wait_for(given.acquire(), PATIENCE_S)
    await living.closed()


async def test_nothing_of_it_runs_when_it_is_closed_also_in_the_middle_of_a_sign() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def give() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    living = SignsOfLife(give, SystemClock(), 0.0)
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.wait_for(living.closed(), PATIENCE_S)
    assert ended.is_set()
    assert not living.under_way
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "sign-of-life"] == []
