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
