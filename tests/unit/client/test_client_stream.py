"""The client of a daemon against everything that may be at the other end of its address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from disco_daemon.client import stream as link_module
from disco_daemon.client.once import NOT_RUNNING, REFUSED_KEY, DaemonError
from disco_daemon.client.stream import MAX_LINE, AnswerPiece, Link
from disco_daemon.errors import DiscoError
from disco_daemon.types import Side
from tests.fixtures.socketdoor import socket_beside

HI = [{"role": "user", "content": "Hi"}]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def linked(handler: Handler, key: str = "", *, local: bool = True) -> AsyncIterator[Link]:
    """A link to a server that does the same whatever is asked; unless `local`, over TCP only."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        assert server.runner is not None
        assert server.port is not None
        beside = socket_beside(server.runner, server.port) if local else nullcontext()
        async with beside, Link(str(server.make_url("")), key) as link:
            yield link


def streaming(*parts: bytes) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        return response

    return handle


def answering(status: int, body: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    return handle


def data(*choices: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": list(choices), **more}, ensure_ascii=False).encode() + b"\n\n"


def said(text: str, **more: Any) -> bytes:
    return data({"delta": {"content": text}, "finish_reason": None}, **more)


def error(message: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": None, "code": code}}


END = data({"delta": {}, "finish_reason": "stop"}, disco={"request_id": "r", "qoe": 1.0}) + b"data: [DONE]\n\n"


async def collect(link: Link, came: list[str]) -> None:
    async for piece in link.chat(HI):
        came += [piece.text] if piece.text else []


async def heard(link: Link, **options: Any) -> list[AnswerPiece]:
    async with aclosing(link.chat(HI, **options)) as pieces:
        return [piece async for piece in pieces]


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_in_pieces_with_sides_thoughts_notes_and_its_end() -> None:
    thought = {"delta": {"role": "assistant", "content": "", "reasoning_content": "Hm."}, "finish_reason": None}
    parts = (
        data(thought, disco={"side": "device"}),
        said("Grö", disco={"side": "device"}),
        b": disco handoff device to server\n\n",
        b": keep-alive\n\nevent: x\nretry: 3\n\n",
        said("ße", disco={"side": "server"}),
        said("n", disco={"side": "device", "alone": True}),
        said(""),
        END,
    )
    async with linked(streaming(*parts)) as link:
        assert await heard(link) == [
            AnswerPiece(thought="Hm.", side=Side.DEVICE),
            AnswerPiece("Grö", side=Side.DEVICE),
            AnswerPiece(note="handoff device to server"),
            AnswerPiece("ße", side=Side.SERVER),
            AnswerPiece("n", side=Side.DEVICE, alone=True),
            AnswerPiece(finish="stop", disco={"request_id": "r", "qoe": 1.0}),
        ]


async def test_a_stream_may_be_cut_anywhere_and_have_long_lines() -> None:
    long = "x" * (256 * 1024)
    whole = said("é🦊") + said(long).replace(b"\n\n", b"\r\n\r\n") + END
    async with linked(streaming(*(whole[i : i + 1] for i in range(200)), whole[200:])) as link:
        assert [piece.text for piece in await heard(link)] == ["é🦊", long, ""]


@pytest.mark.parametrize("local", [True, False])
async def test_the_question_carries_its_options_and_over_tcp_the_key(local: bool) -> None:
    asked: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/health":  # a service manager would start the daemon now
            assert "Authorization" not in request.headers
            return web.Response()
        asked.update(await request.json(), path=request.path, key=request.headers.get("Authorization"))
        return await streaming(END)(request)

    async with linked(handle, "hush", local=local) as link:
        await heard(link, model="disco/server", max_tokens=5, disco={"delivery": "off"})
    assert asked == {
        "path": "/v1/chat/completions", "key": None if local else "Bearer hush", "model": "disco/server",
        "messages": HI, "max_tokens": 5, "stream": True, "disco": {"sides": True, "delivery": "off"},
    }  # fmt: skip


async def test_a_long_conversation_is_sent_whole_and_never_is_in_memory_whole() -> None:
    asked: list[tuple[str | None, Any]] = []
    n_alive = most = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append((request.headers.get("Transfer-Encoding"), await request.json()))
        return await streaming(END)(request)

    class Counted(dict[str, str]):
        def __init__(self, text: str) -> None:
            nonlocal n_alive, most
            super().__init__(role="user", content=text)
            n_alive += 1
            most = max(most, n_alive)

        def __del__(self) -> None:
            nonlocal n_alive
            n_alive -= 1

    for n in (1, 300):
        async with linked(handle) as link, aclosing(link.chat(Counted(f"{i}é" * 1000) for i in range(n))) as pieces:
            assert [piece.finish async for piece in pieces] == ["stop"]
        assert [message["content"] for message in asked[-1][1]["messages"]] == [f"{i}é" * 1000 for i in range(n)]
        assert asked[-1][1]["stream"] is True
    assert [encoding for encoding, _ in asked] == [None, "chunked"]
    assert most < 3


async def test_a_conversation_that_cannot_be_read_on_is_told() -> None:
    def broken() -> Iterator[dict[str, str]]:
        for _ in range(300):
            yield {"role": "user", "content": "x" * 4096}
        raise DiscoError("the disk is gone")

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return await streaming(END)(request)

    async with linked(handle) as link:
        with pytest.raises(DaemonError, match="the disk is gone"):
            async with aclosing(link.chat(broken())) as pieces:
                await anext(pieces)


async def test_closing_the_pieces_closes_the_connection() -> None:
    left = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(said("Once"))
        try:
            while True:
                await response.write(b": \n\n")
                await asyncio.sleep(0)
        finally:
            left.set()

    async with linked(handle) as link:
        async with aclosing(link.chat(HI)) as pieces:
            assert (await anext(pieces)).text == "Once"
        async with asyncio.timeout(30):
            await left.wait()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([said("On")], "too early"),
        ([said("On"), END.removesuffix(b"data: [DONE]\n\n")], "too early"),
        ([b"<html>sign in</html>"], "too early"),
        ([said("On"), b"data: " + json.dumps(error("all is lost", "stalled")).encode() + b"\n\n"], "all is lost"),
        ([said("On"), b'data: {"choices": 7}\n\n'], "cannot be read"),
        ([said("On"), b"data: nonsense\n\n"], "cannot be read"),
        ([said("On"), b"data: [1]\n\n"], "cannot be read"),
        ([said("On", disco={"side": "moon"})], "cannot be read"),
        ([b"data: " + b"x" * (MAX_LINE + 1)], "a line of more than"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error_after_what_came(parts: list[bytes], message: str) -> None:
    came: list[str] = []
    async with linked(streaming(*parts)) as link:
        with pytest.raises(DaemonError, match=message) as raised:
            await collect(link, came)
    assert came == (["On"] if said("On") in parts else [])
    assert raised.value.code == ("stalled" if message == "all is lost" else None)


async def test_a_connection_that_breaks_in_mid_answer_is_told() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(said("On"))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with linked(handle) as link:
        with pytest.raises(DaemonError, match=r"broke( before the end of its answer$|.*reset)"):
            await heard(link)


# --- documents --------------------------------------------------------------------------------------------------------


async def test_documents_are_asked_for_where_the_daemon_has_them() -> None:
    asked: list[tuple[str, str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append((request.method, request.path_qs, await request.json() if request.can_read_body else None))
        return web.json_response({"data": [{"id": "disco"}]})

    async with linked(handle) as link:
        assert await link.state() == {"data": [{"id": "disco"}]}
        await link.settings()
        await link.change({"policy.budget": 0.25})
        assert await link.models() == ["disco"]
        assert await link.history(7) == await link.ledger(31) == [{"id": "disco"}]
        await link.plan(100)
        assert await link.whatif(2.5, 0.1) == {"data": [{"id": "disco"}]}
        assert await link.trace("req/1 2") == {"data": [{"id": "disco"}]}
        await link.whatif(2.5, 0.1, kappa=0.5)
    assert asked == [
        ("GET", "/disco/v1/state", None),
        ("GET", "/disco/v1/settings", None),
        ("PATCH", "/disco/v1/settings", {"policy.budget": 0.25}),
        ("GET", "/v1/models", None),
        ("GET", "/disco/v1/history?limit=7", None),
        ("GET", "/disco/v1/ledger?days=31", None),
        ("GET", "/disco/v1/plan?tokens=100", None),
        ("GET", "/disco/v1/whatif?rate=2.5&budget=0.1", None),
        ("GET", "/disco/v1/trace/req%2F1%202", None),
        ("GET", "/disco/v1/whatif?rate=2.5&budget=0.1&kappa=0.5", None),
    ]


async def test_a_what_if_without_history_is_none_and_other_errors_are_errors() -> None:
    async with linked(answering(404, error("Only 3 requests yet.", "too_little"))) as link:
        assert await link.whatif(1, 1) is None
    async with linked(answering(404, error("Invalid URL", "not_found"))) as link:
        with pytest.raises(DaemonError, match="Invalid URL") as raised:
            await link.whatif(1, 1)
    assert raised.value.code == "not_found"


async def test_a_trace_that_is_not_kept_is_none_also_where_the_daemon_knows_of_no_traces() -> None:
    for code in ("trace_gone", "not_found"):
        async with linked(answering(404, error("no trace", code))) as link:
            assert await link.trace("req-1") is None
    async with linked(answering(401, error("no", "invalid_api_key"))) as link:
        with pytest.raises(DaemonError, match="API key"):
            await link.trace("req-1")


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (401, error("Incorrect API key provided.", "invalid_api_key"), "`disco config set api.key KEY`", REFUSED_KEY),
        (429, error("the cap of the day is reached", "cap_reached"), "the cap of the day", "cap_reached"),
        (400, error("odd", 7), "odd", None),  # type: ignore[arg-type]
        (500, "oops", "HTTP 500: is it a disco daemon", None),
        (302, "elsewhere", "HTTP 302", None),
        (200, "<html>", "is no disco daemon", None),
        (200, [1], "is no disco daemon", None),
    ],
)
async def test_each_refusal_says_what_it_is(status: int, body: Any, message: str, code: str | None) -> None:
    async with linked(answering(status, body)) as link:
        with pytest.raises(DaemonError, match=message) as raised:
            await link.state()
    assert raised.value.code == code


async def test_a_redirect_is_not_followed_and_the_key_stays_here() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    for local in (True, False):
        async with linked(handle, "hush", local=local) as link:
            with pytest.raises(DaemonError, match="HTTP 302"):
                await link.state()
    assert asked == ["/disco/v1/state", "/health", "/disco/v1/state"]


async def test_rows_that_are_none_are_told() -> None:
    async with linked(answering(200, {"rows": []})) as link:
        with pytest.raises(DaemonError, match="no disco daemon"):
            await link.history(1)


async def test_without_a_daemon_the_next_step_is_told(unused_tcp_port: int) -> None:
    async with Link(f"http://127.0.0.1:{unused_tcp_port}") as link:
        for asked in (link.state(), heard(link)):
            with pytest.raises(DaemonError, match="start one with `disco up`") as raised:
                await asked
            assert raised.value.code == NOT_RUNNING


async def test_a_daemon_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE_TIMEOUT_S", 0.05)
    over = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    async with linked(handle) as link:
        with pytest.raises(DaemonError, match="broke"):
            await heard(link)
        with pytest.raises(DaemonError, match="broke"):
            await link._document("/", timeout_s=0.05)
        over.set()


@pytest.mark.parametrize("root", ["127.0.0.1:4747", "ftp://x", "http://", "http://[::1"])
async def test_what_is_no_address_is_told(root: str) -> None:
    async with Link(root) as link:
        with pytest.raises(DaemonError, match="no address of a daemon"):
            await link.state()


async def test_credentials_in_an_address_are_not_shown(unused_tcp_port: int) -> None:
    async with Link(f"http://me:secret@127.0.0.1:{unused_tcp_port}") as link:
        assert "secret" not in repr(link)
        with pytest.raises(DaemonError) as raised:
            await link.state()
        assert "secret" not in str(raised.value)
