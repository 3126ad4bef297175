"""A stream as it leaves, byte for byte, through a real server on loopback."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from openai import AsyncOpenAI

from disco_daemon.api.http.sse import StreamSink
from disco_daemon.api.openai.shapes import ChatShape, TextShape
from disco_daemon.clock import SystemClock
from disco_daemon.errors import Unavailable
from disco_daemon.types import Outcome, Plan, Side, Token

Play = Callable[[StreamSink], Awaitable[web.StreamResponse]]
TOKENS = {Side.DEVICE: 2, Side.SERVER: 3}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
OUTCOME = Outcome(
    "r", 0.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, 0.1, 1.0, 1, TOKENS, (), 0.0, 0.0
)  # fmt: skip


def app(play: Play, *, text: bool = False, **options: Any) -> web.Application:
    async def serve(request: web.Request) -> web.StreamResponse:
        shape = (TextShape if text else ChatShape)("r", 1, "disco")
        sink = StreamSink(request, shape, "r", SystemClock(), **options)
        try:
            return await play(sink)
        finally:
            await sink.closed()

    made = web.Application()
    made.router.add_post("/{path:.*}", serve)
    return made


async def lines(play: Play, **options: bool) -> list[str]:
    """The lines of the body that are not empty."""
    async with TestClient(TestServer(app(play, **options))) as client, client.post("/") as response:
        return [line for line in (await response.text()).split("\n") if line]


def chunks(told: list[str]) -> list[dict[str, Any]]:
    assert told[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in told[:-1] if line.startswith("data: ")]


async def moved(sink: StreamSink) -> web.StreamResponse:
    """An answer of three tokens that is handed over after the second."""
    sink.note("too early for anybody")
    sink.token(Token("On", ids=(1,)), Side.DEVICE)
    await sink.flush()
    sink.token(Token("ce", ids=(2,)), Side.DEVICE)
    sink.note("handoff device to server at 2\n\ndata: {}")
    sink.token(Token(" upon", ids=(3,)), Side.SERVER)
    return await sink.finish(OUTCOME)


async def test_a_note_is_a_comment_between_the_tokens_it_came_between() -> None:
    told = await lines(moved)
    assert [line for line in told if not line.startswith("data: ")] == [
        ": disco handoff device to server at 2 data: {}"
    ]
    at = told.index(": disco handoff device to server at 2 data: {}")
    assert json.loads(told[at - 1].removeprefix("data: "))["choices"][0]["delta"]["content"] == "ce"
    assert json.loads(told[at + 1].removeprefix("data: "))["choices"][0]["delta"]["content"] == " upon"
    assert not any(line.startswith(("id:", "event:")) for line in told)


@pytest.mark.parametrize("text", [False, True])
async def test_the_openai_client_sees_no_more_than_the_answer(text: bool) -> None:
    server = TestServer(app(moved, text=text, include_usage=True))
    async with TestClient(server), AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="x") as client:
        said = []
        if text:
            async for part in await client.completions.create(model="disco", prompt="x", stream=True):
                said += [choice.text for choice in part.choices]
                usage = part.usage
        else:
            messages: Any = [{"role": "user", "content": "x"}]
            async for chunk in await client.chat.completions.create(model="disco", messages=messages, stream=True):
                said += [choice.delta.content or "" for choice in chunk.choices]
                usage = chunk.usage
    assert said == ["On", "ce", " upon", ""]
    assert usage is not None
    assert usage.total_tokens == 12


async def test_token_ids_end_where_another_side_goes_on() -> None:
    choices = [chunk["choices"][0] for chunk in chunks(await lines(moved, token_ids=True))]
    assert [choice.get("token_ids") for choice in choices] == [[1], [2], None, None]
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks(await lines(moved)))


async def test_each_chunk_names_its_side_if_that_is_asked_for() -> None:
    found = chunks(await lines(moved, sides=True))
    assert [chunk["disco"] for chunk in found[:-1]] == [{"side": "device"}, {"side": "device"}, {"side": "server"}]
    assert "side" not in found[-1]["disco"], "the end is of both"


async def test_each_chunk_says_whether_a_part_of_a_model_made_it_alone() -> None:
    async def alone(sink: StreamSink) -> web.StreamResponse:
        sink.token(Token("On", alone=True), Side.DEVICE)
        sink.token(Token("ce"), Side.DEVICE)
        return await sink.finish(OUTCOME)

    found = chunks(await lines(alone, sides=True))
    assert [chunk["disco"] for chunk in found[:2]] == [{"side": "device", "alone": True}, {"side": "device"}]
    assert "disco" not in chunks(await lines(alone))[0]


async def test_the_end_says_why_and_how_once() -> None:
    for include_usage in (False, True):
        found = chunks(await lines(moved, include_usage=include_usage))
        reasons = [c["finish_reason"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
        assert reasons == ["stop"]
        assert [chunk for chunk in found if "disco" in chunk] == found[-1:]
        assert [chunk["usage"] for chunk in found if "usage" in chunk] == ([USAGE] if include_usage else [])


async def test_a_failure_in_mid_answer_is_told_as_data_and_nothing_follows() -> None:
    async def broken(sink: StreamSink) -> web.StreamResponse:
        sink.token(Token("On"), Side.DEVICE)
        return await sink.fail(Unavailable("all is lost"))

    told = await lines(broken)
    assert json.loads(told[-1].removeprefix("data: "))["error"]["message"] == "all is lost"
    assert "data: [DONE]" not in told
