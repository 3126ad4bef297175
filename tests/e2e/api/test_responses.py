"""The unmodified openai client speaks the Responses API to a daemon, whichever side answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from disco_daemon.bench.loopback import SSE_HEADERS
from disco_daemon.bench.script import DONE, sse
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

OFTEN = "import disco_daemon.api.http.signs_of_life as s; s.SIGN_OF_LIFE_S = 0.2"
DEVICE, SERVER = "disco/device", "disco/server"
BOTH = pytest.mark.parametrize("model", [DEVICE, SERVER])
# Words alone: the scripted server says each as one token, where a mark would count as another one and cut the answer.
ASKED: dict[str, Any] = {"input": "Name three colours please", "max_output_tokens": 8, "temperature": 0}
LOOK: Any = {"type": "function", "name": "look", "description": "Look.", "strict": False,
             "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}  # fmt: skip
PATCH: Any = {"type": "custom", "name": "patch", "description": "Change a file."}
Ends = tuple[Upstream, DaemonProcess]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """One daemon with both sides."""
    folder = tmp_path_factory.mktemp("d")
    async with Upstream(tokens=8) as upstream, running(folder, server=upstream.url, before=OFTEN) as daemon:
        await daemon.device_ready()
        yield upstream, daemon


def scripted(*deltas: dict[str, Any], reason: str = "tool_calls") -> str:
    """A server's stream of these deltas."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    return (b"".join(sse({"choices": [choice]}) for choice in choices) + DONE).decode()


def calling(index: int, call_id: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    first: dict[str, Any] = {
        "index": index,
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
    more = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [piece]} for piece in (first, *more)]


@BOTH
async def test_whole_and_streamed_it_says_what_a_chat_says(model: str, ends: Ends) -> None:
    client = ends[1].client
    messages: Any = [{"role": "user", "content": ASKED["input"]}]
    chat = await client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
    whole = await client.responses.create(model=model, **ASKED)
    text, kinds, numbers = "", [], []
    async for event in await client.responses.create(model=model, stream=True, **ASKED):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text == chat.choices[0].message.content
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert numbers == list(range(len(numbers)))
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


async def test_the_clients_own_helper_gathers_the_stream(ends: Ends) -> None:
    async with ends[1].client.responses.stream(model=SERVER, input="red green blue") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "red green blue red green blue red green "


class Animal(BaseModel):
    """An answer with a form."""

    name: Literal["fox", "owl"]


async def test_the_device_holds_to_a_schema(ends: Ends) -> None:
    parsed = await ends[1].client.responses.parse(
        model=DEVICE, input="Which animal is red?", text_format=Animal, max_output_tokens=30, temperature=0
    )
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.name in ("fox", "owl")


async def test_a_round_of_tools_goes_to_the_server_and_back(ends: Ends) -> None:
    upstream, daemon = ends
    history: list[Any] = [{"role": "user", "content": "Mend it."}]
    tools = [LOOK, PATCH, {"type": "web_search"}]
    said = scripted({"reasoning_content": "Hm."}, *calling(0, "a", "look", '{"at":', '"x"}'),
                    *calling(1, "b", "patch", '{"input": "*** "}'))  # fmt: skip
    with upstream.status(200, said, headers=SSE_HEADERS):
        answer = await daemon.client.responses.with_raw_response.create(
            model=SERVER, input=history, tools=tools, instructions="Be brief.", store=False
        )
    found = answer.parse()
    _, look, patch = found.output
    assert look.type == "function_call"
    assert (look.call_id, look.name, look.arguments) == ("a", "look", '{"at":"x"}')
    assert patch.type == "custom_tool_call"
    assert (patch.call_id, patch.name, patch.input) == ("b", "patch", "*** ")
    assert answer.headers["X-Disco-Ignored"] == "tools.web_search"
    assert (found.model_extra or {})["disco"]["ignored"] == ["tools.web_search"]

    history += [item.model_dump(exclude_none=True) for item in found.output]
    history += [
        {"type": "function_call_output", "call_id": "a", "output": "It is broken."},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "Done."},
    ]
    with upstream.answering("It is mended. "):
        last = await daemon.client.responses.create(model=SERVER, input=history, tools=tools)
    assert last.output_text == "It is mended. "
    sent = upstream.exchanges[-1].body
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["look", "patch"]
    _, called, *outputs = sent["messages"]
    assert called["reasoning_content"] == "Hm."
    assert [json.loads(call["function"]["arguments"]) for call in called["tool_calls"]] == [
        {"at": "x"},
        {"input": "*** "},
    ]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in outputs] == [
        ("tool", "a", "It is broken."),
        ("tool", "b", "Done."),
    ]


async def test_the_device_calls_a_function_that_is_forced(ends: Ends) -> None:
    asked: dict[str, Any] = {"model": DEVICE, "input": "Look at the fox.", "tools": [LOOK], "tool_choice": "required"}
    whole = await ends[1].client.responses.create(
        **asked, parallel_tool_calls=False, temperature=0, max_output_tokens=60
    )
    call = whole.output[0]
    assert call.type == "function_call"
    assert call.name == "look"
    assert call.arguments.startswith("{")
    told = await ends[1].client.responses.input_tokens.count(**asked, parallel_tool_calls=False)
    assert whole.usage is not None
    assert told.input_tokens == whole.usage.input_tokens, "tools are a part of the prompt"


async def test_a_prompt_is_counted_exactly_for_the_device_and_guessed_for_a_server(ends: Ends) -> None:
    client = ends[1].client
    whole = await client.responses.create(model=DEVICE, instructions="Be brief.", **ASKED)
    told = await client.responses.input_tokens.count(model=DEVICE, instructions="Be brief.", input=ASKED["input"])
    assert whole.usage is not None
    assert told.input_tokens == whole.usage.input_tokens
    assert (told.model_extra or {})["disco"] == {"estimated": False}
    guessed = await client.responses.input_tokens.count(model=SERVER, input=ASKED["input"], tools=[LOOK])
    assert guessed.input_tokens > 10
    assert (guessed.model_extra or {})["disco"] == {"estimated": True}


async def test_a_stream_that_waits_sends_events_and_not_only_comments(ends: Ends) -> None:
    upstream, daemon = ends
    speak = asyncio.Event()
    with upstream.held_until(speak):
        stream = await daemon.client.responses.create(model=SERVER, stream=True, input="red green blue")
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if kinds.count("response.in_progress") == 3:
                speak.set()
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert kinds[-1] == "response.completed"


async def test_a_failure_in_mid_answer_is_an_event_and_one_before_it_a_status(ends: Ends) -> None:
    upstream, daemon = ends
    with upstream.error_event_after(2):
        events = [e async for e in await daemon.client.responses.create(model=SERVER, stream=True, **ASKED)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "injected" in events[-1].response.error.message
    with upstream.status(429), pytest.raises(openai.RateLimitError):
        await daemon.client.responses.create(model=SERVER, **ASKED)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"temperature": 9}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_the_parameter(
    more: dict[str, Any], param: str, ends: Ends
) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        await ends[1].client.responses.create(**{"model": DEVICE, **ASKED, **more})
    assert e.value.param == param


async def test_a_model_that_is_not_there_is_a_404(ends: Ends) -> None:
    with pytest.raises(openai.NotFoundError):
        await ends[1].client.responses.create(model="gpt-9", **ASKED)


async def test_the_list_of_models_is_codexs_too(ends: Ends) -> None:
    daemon = ends[1]
    async with daemon.session.get(f"{daemon.url}/models") as response:
        told = await response.json()
    assert [one["slug"] for one in told["models"]] == [card["id"] for card in told["data"]]
    (device,) = [one for one in told["models"] if one["slug"] == DEVICE]
    assert device["context_window"] == 8192
