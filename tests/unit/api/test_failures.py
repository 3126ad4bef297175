"""How failures are told: status, shape and Retry-After; and what nobody expected."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from disco_daemon.api import answering
from disco_daemon.api.control.scrape import Handler
from disco_daemon.api.http.connections import Runner
from disco_daemon.api.http.failures import MAX_RETRY_S, RETRY_S, failure, plain, shape_errors, signed
from disco_daemon.api.http.sse import StreamSink
from disco_daemon.api.openai import openai_request
from disco_daemon.api.openai.shapes import ChatShape
from disco_daemon.clock import SystemClock
from disco_daemon.errors import DiscoError, EndpointError, RequestError, Unavailable
from disco_daemon.types import BOTH, Side, Token
from tests.fixtures import chat_bodies


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Unavailable("full", retry_after_s=10.0), "10"),
        (Unavailable("full"), f"{RETRY_S:g}"),
        (Unavailable("full", retry_after_s=math.nan), f"{RETRY_S:g}"),
        (EndpointError(Side.DEVICE, "overloaded", "the queue is full"), f"{RETRY_S:g}"),
        (EndpointError(Side.SERVER, "rate_limited", "slower", retry_after_s=0.2), "1"),
        (EndpointError(Side.SERVER, "rate_limited", "slower", retry_after_s=-5), "1"),
        (EndpointError(Side.SERVER, "rate_limited", "slower", retry_after_s=math.nan), None),
        (EndpointError(Side.SERVER, "rate_limited", "slower", retry_after_s=math.inf), None),
        (EndpointError(Side.SERVER, "rate_limited", "slower", retry_after_s=1e300), f"{MAX_RETRY_S:.0f}"),
        (RequestError("no"), None),
    ],
)
def test_who_has_to_wait_is_told_how_long(error: DiscoError, told: str | None) -> None:
    assert failure(error).headers.get("Retry-After") == told


def test_a_full_queue_is_503() -> None:
    error = EndpointError(Side.DEVICE, "overloaded", "the queue is full")
    assert (error.status, error.type, error.code) == (503, "server_error", "overloaded")


def test_what_a_stranger_sent_becomes_one_short_line() -> None:
    assert plain("a\x1b[31m\r\nb\u202ec\x00") == "a [31m b c"
    assert len(plain("x" * 1000)) == 200


@pytest.fixture
async def served() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Serve one handler behind the middleware; its address."""
    runners = []

    async def serve(handler: Handler, run: Callable[..., Awaitable[None]] | None = None) -> str:
        context = SimpleNamespace(endpoints={}, private=False, clock=SystemClock(), servers=None)
        found: Any = SimpleNamespace(run=run, rules=None, context=context, context_of=lambda _: context)
        served_app = web.Application(middlewares=[shape_errors])
        served_app[answering.CONDUCTOR] = found
        served_app.on_response_prepare.append(signed)
        served_app.router.add_get("/", handler)
        runner = Runner(served_app, None, shutdown_timeout=1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def test_what_nobody_expected_is_a_500_in_shape_and_a_line_in_the_log(
    served: Callable[..., Awaitable[str]], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        raise ZeroDivisionError("of ours, with a secret")

    url = await served(broken)
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 500
        body = json.loads(await response.read())
    assert body["error"]["type"] == "server_error"
    assert "secret" not in body["error"]["message"]
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_an_answer_that_has_begun_breaks_off(
    served: Callable[..., Awaitable[str]], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half of it")
        raise ZeroDivisionError("of ours")

    url = await served(broken)
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert "unexpectedly" in caplog.text


async def test_a_stream_that_breaks_unexpectedly_says_so_in_band(
    served: Callable[..., Awaitable[str]], caplog: pytest.LogCaptureFixture
) -> None:
    async def run(generation: object, model: str, sink: StreamSink) -> None:
        sink.token(Token("Half", 1), Side.DEVICE)
        await sink.flush()
        raise ZeroDivisionError("of ours, with a secret")

    async def answer(request: web.Request) -> web.StreamResponse:
        asked, extra = chat_bodies.parse(
            b'{"model": "disco", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
        )
        return await answering.answer(
            request, asked, openai_request.to_generation(asked, extra, "r", BOTH), ChatShape("r", 0, "disco")
        )

    async with aiohttp.ClientSession() as session, session.get(await served(answer, run)) as response:
        events = (await response.read()).decode().split("\n\n")
    assert "Half" in events[0]
    assert json.loads(events[1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[2:] == [""]
    assert "secret" not in events[1]
    assert "unexpectedly" in caplog.text
