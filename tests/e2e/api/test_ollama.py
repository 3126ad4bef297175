"""Ollama's API says what a chat says, on the wire, whichever side answers; at its own port, too."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.bench.loopback import SSE_HEADERS
from disco_daemon.bench.script import DONE, sse
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.raw import message, replied
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
Ends = tuple[Upstream, DaemonProcess, int]
HI = [{"role": "user", "content": "Name three colours please"}]
OPTIONS = {"num_predict": 8, "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """One daemon with both sides, a second port, and the name of another program's model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"api": {"ollama_port": port, "aliases": {"llama*": "disco/device"}}, "policy": {"shadow": False}}
    folder = tmp_path_factory.mktemp("d")
    async with Upstream(tokens=8) as upstream, running(folder, server=upstream.url, settings=settings) as daemon:
        await daemon.device_ready()
        yield upstream, daemon, port


async def post(daemon: DaemonProcess, path: str, body: Any) -> tuple[int, str]:
    async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
        return response.status, await response.text()


async def whole(daemon: DaemonProcess, path: str, body: Any) -> dict[str, Any]:
    status, told = await post(daemon, path, body | {"stream": False})
    assert status == 200, told
    found: dict[str, Any] = json.loads(told)
    return found


async def lines(daemon: DaemonProcess, path: str, body: Any) -> list[dict[str, Any]]:
    async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


@pytest.mark.parametrize("model", ["disco/device", "disco/server:latest"])
async def test_whole_and_streamed_it_says_what_a_chat_says(model: str, ends: Ends) -> None:
    _, daemon, _ = ends
    own = model.removesuffix(":latest")
    chat = await daemon.client.chat.completions.create(model=own, messages=HI, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    asked = {"model": model, "messages": HI, "options": OPTIONS}
    told = await whole(daemon, "/api/chat", asked)
    assert told["message"] == {"role": "assistant", "content": chat.choices[0].message.content}
    *said, last = await lines(daemon, "/api/chat", asked)
    assert "".join(line["message"]["content"] for line in said) == told["message"]["content"]
    assert (last["done"], last["done_reason"]) == (True, told["done_reason"])
    assert last["eval_count"] == told["eval_count"]
    times = [last[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert min(times[1:]) > 0
    assert sum(times) <= last["total_duration"] + 3  # each is rounded
    prompt = {"model": model, "prompt": HI[0]["content"], "options": OPTIONS}
    assert (await whole(daemon, "/api/generate", prompt))["response"] == told["message"]["content"]


async def test_a_raw_prompt_is_gone_on_with_as_a_text_completion_is(ends: Ends) -> None:
    _, daemon, _ = ends
    text = await daemon.client.completions.create(model="disco", prompt="Once upon a", max_tokens=6, temperature=0)
    asked = {"model": "disco", "prompt": "Once upon a", "raw": True, "options": {"num_predict": 6, "temperature": 0}}
    assert (await whole(daemon, "/api/generate", asked))["response"] == text.choices[0].text
    said = await lines(daemon, "/api/generate", asked)
    assert "".join(line["response"] for line in said) == text.choices[0].text


async def test_a_call_of_a_tool_is_an_object_and_its_result_goes_back(ends: Ends) -> None:
    upstream, daemon, _ = ends
    calls = [{"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}]
    choices = [{"index": 0, "delta": {"tool_calls": calls}}, {"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    said = (b"".join(sse({"choices": [choice]}) for choice in choices) + DONE).decode()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    asked: dict[str, Any] = {"model": "disco/server", "messages": HI, "tools": tools, "think": False}
    with upstream.status(200, said, headers=SSE_HEADERS):
        made = (await whole(daemon, "/api/chat", asked))["message"]
    assert made["tool_calls"] == [{"id": "a", "function": {"name": "look", "arguments": {"at": "x"}}}]
    assert "think" not in upstream.exchanges[-1].body, "no server of OpenAI's API knows it"
    turns = [*HI, made, {"role": "tool", "tool_name": "look", "content": "seen"}]
    await whole(daemon, "/api/chat", asked | {"messages": turns})
    assert upstream.exchanges[-1].body["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": "seen"}


async def test_an_image_goes_to_the_server(ends: Ends) -> None:
    upstream, daemon, _ = ends
    told = await whole(daemon, "/api/generate", {"model": "disco", "prompt": "What?", "images": ["iVBORw0KGgo="]})
    assert told["disco"]["winner"] == "server"
    (_, image) = upstream.exchanges[-1].body["messages"][-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="


async def test_models_are_listed_and_shown_with_what_they_can(ends: Ends) -> None:
    _, daemon, port = ends
    async with daemon.session.get(f"http://127.0.0.1:{port}/api/tags") as response:
        listed = {model["name"]: model for model in (await response.json())["models"]}
    device = listed["disco/device:latest"]
    assert {"disco:latest", "disco/server:latest"} < listed.keys()
    assert "llama*" not in "".join(listed)
    assert device["size"] > 1e7
    assert device["details"] == {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": "134.52M", "quantization_level": "Q4_1",
    }  # fmt: skip
    assert listed["disco/server:latest"]["size"] == 0
    assert len({model["digest"][:12] for model in listed.values()}) == len(listed)
    async with daemon.session.get(f"{daemon.root}/api/ps") as response:
        loaded = {model["name"]: model for model in (await response.json())["models"]}
    assert "disco/server:latest" not in loaded
    assert loaded["disco/device:latest"]["context_length"] == 8192
    for name in ("disco:latest", "llama3.2:1b"):
        shown = await whole(daemon, "/api/show", {"model": name})
        assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 8192
    assert shown["capabilities"] == ["completion"], "the embedded model calls a tool only where it is forced to"
    assert (await whole(daemon, "/api/show", {"name": "disco"}))["capabilities"][:2] == ["completion", "tools"]
    async with daemon.session.get(f"{daemon.root}/api/version") as response:
        assert all(part.isdigit() for part in (await response.json())["version"].split("."))


async def test_vectors_are_those_of_v1(ends: Ends) -> None:
    _, daemon, _ = ends
    found = await daemon.client.embeddings.create(model="disco", input=["a cat", "a dog"], encoding_format="float")
    told = await whole(daemon, "/api/embed", {"model": "disco:latest", "input": ["a cat", "a dog"]})
    assert told["embeddings"] == [one.embedding for one in found.data]
    assert told["prompt_eval_count"] == found.usage.prompt_tokens
    one = await whole(daemon, "/api/embeddings", {"model": "disco", "prompt": "a cat"})
    assert one == {"embedding": told["embeddings"][0]}
    assert (await whole(daemon, "/api/embed", {"model": "disco", "input": ""}))["embeddings"] == []
    assert (await whole(daemon, "/api/embeddings", {"model": "disco", "prompt": ""})) == {"embedding": []}


async def test_without_a_question_nothing_is_asked(ends: Ends) -> None:
    upstream, daemon, _ = ends
    before = len(upstream.exchanges)
    for path in ("/api/chat", "/api/generate"):
        assert (await whole(daemon, path, {"model": "disco"}))["done_reason"] == "load"
        assert (await post(daemon, path, {"model": "nobody"}))[0] == 404
    assert len(upstream.exchanges) == before


@pytest.mark.parametrize("verb", ["create", "push", "copy", "delete", "blobs/sha256:0"])
async def test_models_are_fetched_elsewhere(verb: str, ends: Ends) -> None:
    _, daemon, _ = ends
    method = "DELETE" if verb == "delete" else "POST"
    async with daemon.session.request(method, f"{daemon.root}/api/{verb}", json={"model": "llama3"}) as response:
        assert response.status == 501
        assert "`disco models pull USER/REPO`" in (await response.json())["error"]


async def test_a_page_of_a_stranger_and_a_rebound_name_are_refused_at_the_second_port_too(ends: Ends) -> None:
    upstream, _, port = ends
    before = len(upstream.exchanges)
    body = json.dumps({"model": "disco", "messages": HI}).encode()
    for told in ({"Origin": "https://evil.example"}, {"Host": f"evil.example:{port}"}):
        reply = await replied(f"http://127.0.0.1:{port}", message("POST", "/api/chat", body, **told))
        assert reply.status == 403
        assert isinstance(json.loads(reply.body)["error"], str)
    assert len(upstream.exchanges) == before


async def test_a_failure_in_mid_answer_is_a_line(ends: Ends) -> None:
    upstream, daemon, _ = ends
    with upstream.cut_after(3):
        *_, last = await lines(daemon, "/api/chat", {"model": "disco/server", "messages": HI})
    assert isinstance(last["error"], str)


async def test_a_second_port_that_is_taken_or_needs_a_key_is_told_and_no_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        api = {"ollama_port": taken.getsockname()[1], "key": "secret"}
        async with Upstream(tokens=4) as upstream, running(tmp_path, device=False, server=upstream.url,
                                                           settings={"api": api}) as daemon:  # fmt: skip
            reply = await replied(daemon.url, message("GET", "/api/tags"))
            assert (reply.status, json.loads(reply.body)["code"]) == (401, "invalid_api_key")
            shown = message("GET", "/api/tags", Authorization="Bearer secret")
            assert (await replied(daemon.url, shown)).status == 200
            assert f"api.ollama_port: cannot listen on 127.0.0.1:{api['ollama_port']}" in daemon.log
