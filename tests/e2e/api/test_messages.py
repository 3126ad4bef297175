"""The Messages API says what a chat says, on the wire, whichever side answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.bench.loopback import SSE_HEADERS
from disco_daemon.bench.script import DONE, sse
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
Ends = tuple[Upstream, DaemonProcess]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colours please"}], "max_tokens": 8}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """One daemon with both sides."""
    async with Upstream(tokens=8) as upstream, running(tmp_path_factory.mktemp("d"), server=upstream.url) as daemon:
        await daemon.device_ready()
        yield upstream, daemon


async def post(daemon: DaemonProcess, path: str, body: Any) -> tuple[int, str]:
    async with daemon.session.post(f"{daemon.url.removesuffix('/v1')}{path}", json=body) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("model", ["disco/device", "disco/server"])
async def test_whole_and_streamed_it_says_what_a_chat_says(model: str, ends: Ends) -> None:
    _, daemon = ends
    chat = await daemon.client.chat.completions.create(model=model, temperature=0, **ASKED)
    asked = ASKED | {"model": model, "temperature": 0}
    status, body = await post(daemon, "/v1/messages?beta=true", asked)
    whole = json.loads(body)
    assert status == 200
    assert whole["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    _, told = await post(daemon, "/v1/messages", asked | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in told.split("\n") if line.startswith("data: ")]
    assert (
        "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == whole["content"][0]["text"]
    )
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    _, counted = await post(daemon, "/v1/messages/count_tokens", {k: asked[k] for k in ("model", "messages")})
    assert json.loads(counted)["input_tokens"] > 0


def events_of(told: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in told.split("\n") if line.startswith("data: ")]


def read_of(usage: dict[str, int]) -> int:
    """The whole prompt: what a cache gave is not among the input's."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


async def test_the_device_tells_which_stop_sequence_ended_an_answer(ends: Ends) -> None:
    _, daemon = ends
    asked = ASKED | {"model": "disco/device", "temperature": 0}
    said = json.loads((await post(daemon, "/v1/messages", asked))[1])["content"][0]["text"]
    stop = said[len(said) // 2 :][:3]
    asked["stop_sequences"] = ["never said by it", stop]
    whole = json.loads((await post(daemon, "/v1/messages", asked))[1])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in whole["content"]) == said[: said.index(stop)]
    events = events_of((await post(daemon, "/v1/messages", asked | {"stream": True}))[1])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


@pytest.mark.parametrize(
    ("told", "ended"), [({"stop_reason": "END"}, "END"), ({"stop_reason": "other"}, None), ({}, None)]
)
async def test_of_a_server_that_names_the_stop_sequence_it_is_told(
    told: dict[str, Any], ended: str | None, ends: Ends
) -> None:
    upstream, daemon = ends
    choices = [{"index": 0, "delta": {"content": "Red"}}, {"index": 0, "delta": {}, "finish_reason": "stop"} | told]
    said = (b"".join(sse({"choices": [choice]}) for choice in choices) + DONE).decode()
    asked = ASKED | {"model": "disco/server", "stop_sequences": ["END"]}
    with upstream.status(200, said, headers=SSE_HEADERS):
        whole = json.loads((await post(daemon, "/v1/messages", asked))[1])
        events = events_of((await post(daemon, "/v1/messages", asked | {"stream": True}))[1])
    reason = {"stop_reason": "end_turn" if ended is None else "stop_sequence", "stop_sequence": ended}
    assert {key: whole[key] for key in reason} == events[-2]["delta"] == reason


async def test_a_message_begins_with_the_length_of_its_prompt(ends: Ends) -> None:
    _, daemon = ends
    for model in ("disco/device", "disco/server"):
        events = events_of((await post(daemon, "/v1/messages", ASKED | {"model": model, "stream": True}))[1])
        begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
        assert begun["output_tokens"] == 0
        if model == "disco/device":
            assert read_of(begun) == read_of(ended)
        else:
            n_chars = len(ASKED["messages"][0]["content"])
            assert n_chars // 8 <= read_of(begun) <= n_chars, "an estimate of its text"


async def test_a_call_of_a_tool_comes_as_a_block_and_its_result_goes_back(ends: Ends) -> None:
    upstream, daemon = ends
    calls = [{"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}]
    choices = [{"index": 0, "delta": {"tool_calls": calls}}, {"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    said = (b"".join(sse({"choices": [choice]}) for choice in choices) + DONE).decode()
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    asked = ASKED | {"model": "disco/server", "tools": tools, "tool_choice": {"type": "any"}}
    with upstream.status(200, said, headers=SSE_HEADERS):
        whole = json.loads((await post(daemon, "/v1/messages", asked))[1])
    assert whole["content"] == [{"type": "tool_use", "id": "a", "name": "look", "input": {"at": "x"}}]
    assert whole["stop_reason"] == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "seen"}]}
    turns = [*ASKED["messages"], {"role": "assistant", "content": whole["content"]}, result]
    status, _ = await post(daemon, "/v1/messages", asked | {"messages": turns, "tool_choice": {"type": "auto"}})
    assert status == 200
    assert upstream.exchanges[-1].body["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": "seen"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_bad_bodies_are_told_in_this_apis_shape(path: str, ends: Ends) -> None:
    bodies: list[Any] = [[], {}, {"model": "nobody", **ASKED}, {"model": "disco", "messages": [], "max_tokens": 1}]
    for body in bodies:
        status, told = await post(ends[1], path, body)
        error = json.loads(told)
        assert 400 <= status < 500
        assert error["type"] == "error"
        assert error["error"]["type"] in ("invalid_request_error", "not_found_error")
