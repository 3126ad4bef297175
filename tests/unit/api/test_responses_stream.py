"""A stream of the Responses API is what OpenAI's own types allow, numbered without a gap, and says what a body says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from disco_daemon.api.responses.responses_request import to_chat
from disco_daemon.api.responses.responses_shape import ResponsesShape
from disco_daemon.endpoints.chunks import CutError, Reader
from disco_daemon.errors import DiscoError, EndpointError, RequestError
from disco_daemon.types import Attempt, CallPart, Delta, Outcome, Plan, Side, Token, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
WON = Attempt(Side.SERVER, "big", 0.0, 0.1, censored=False, usage=USAGE)
OUTCOME = Outcome(
    "r", 5.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, 0.1, 2.0, 0, {Side.SERVER: 5}, (WON,), 0.0, 0.0,
    ignored=("tools.web_search",),
)  # fmt: skip
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
         {"type": "custom", "name": "patch"}]  # fmt: skip


def shape(**more: Any) -> ResponsesShape:
    return ResponsesShape("r", 1, "disco", to_chat({"model": "disco", "input": "Hi", "tools": TOOLS} | more))


def events_of(sent: bytes) -> list[dict[str, Any]]:
    """The events on the wire; each has its name twice, and is one that OpenAI's types allow."""
    found = []
    for event in sent.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    for one in found:
        EVENT.validate_python(one)
    return found


def streamed(tokens: Sequence[Token], outcome: Outcome = OUTCOME, **more: Any) -> list[dict[str, Any]]:
    made = shape(**more)
    sent = b"".join(made.token(token, None, first=i == 0) for i, token in enumerate(tokens))
    return events_of(sent + made.ending(outcome, include_usage=False))


def call(index: int, arguments: str = "", **more: Any) -> CallPart:
    return CallPart(index, arguments, more.get("id") or "", more.get("name") or "")


def calling(*calls: CallPart) -> Token:
    return Token("", 1, Delta(calls=calls))


THINKS = Token("", 1, Delta(thought="Hm."))
ROUND = [
    THINKS, Token("Loo"), Token("king."), calling(call(0, id="a", name="look")), calling(call(0, '{"x":')),
    calling(call(0, "1}"), call(1, '{"input": "say \\"ü\\""}', id="b", name="patch")),
]  # fmt: skip


def accumulated(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client gathers it from deltas alone; what is whole must say the same."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = json.loads(json.dumps(event["item"]))
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert item["id"] == event["item_id"]
        if kind == "response.content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        elif kind == "response.content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind.endswith(".delta"):
            part = item["content"][event["content_index"]] if "content_index" in event else item
            key = next(key for key in ("text", "refusal", "arguments", "input") if key in part)
            part[key] += event["delta"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert item == {k: v for k, v in event["item"].items() if k != "encrypted_content"}
    return [items[i] for i in sorted(items)]


# --- one stream ---------------------------------------------------------------------------------------------------


def test_a_round_with_thought_words_and_calls_tells_each_item_from_its_beginning_to_its_end() -> None:
    events = streamed(ROUND)
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "output_item.added",
        "function_call_arguments.done", "output_item.done",
        "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    thought, message, look, patch = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"] == [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}]
    assert (look["type"], look["call_id"], look["name"], look["arguments"]) == ("function_call", "a", "look", '{"x":1}')
    assert (patch["type"], patch["call_id"], patch["input"]) == ("custom_tool_call", "b", 'say "ü"')
    assert "encrypted_content" not in thought


def test_the_end_has_usage_what_was_ignored_and_what_the_client_asked() -> None:
    response = streamed(ROUND, instructions="Be brief.", metadata={"a": "b"}, top_p=0.5)[-1]["response"]
    assert response["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip
    assert response["disco"]["ignored"] == ["tools.web_search"]
    assert (response["instructions"], response["metadata"], response["top_p"]) == ("Be brief.", {"a": "b"}, 0.5)
    assert (response["id"], response["status"], response["store"]) == ("resp_r", "completed", False)
    assert (response["created_at"], response["completed_at"]) == (1, 7)


@pytest.mark.parametrize(("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(reason: str, why: str) -> None:
    events = streamed([THINKS, Token("Look")], replace(OUTCOME, finish_reason=reason))
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": why}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_answer_without_a_word_is_whole() -> None:
    events = streamed([])
    assert [e["type"] for e in events] == ["response.created", "response.in_progress", "response.completed"]
    assert events[-1]["response"]["output"] == []


def test_a_sign_of_life_is_an_event_and_the_first_begins_the_response() -> None:
    made = shape()
    first = events_of(made.sign_of_life())
    assert [e["type"] for e in first] == ["response.created", "response.in_progress"]
    sent = made.token(THINKS, None, first=True) + made.token(Token("Hi"), None, first=False) + made.sign_of_life()
    events = first + events_of(sent)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.in_progress"
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning"], "what is whole by now"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EndpointError(Side.SERVER, "rate_limited", "later"), "rate_limit_exceeded"),
        (RequestError("no", code="context_length_exceeded"), "context_length_exceeded"),
        (RequestError("no"), "invalid_prompt"),
        (DiscoError("oh"), "server_error"),
    ],
)
def test_a_failure_is_the_last_event_and_says_why(error: DiscoError, code: str) -> None:
    made = shape()
    sent = made.token(THINKS, None, first=True) + made.token(Token("Hi"), None, first=False) + made.failed(error)
    last = json.loads(sent.decode().split("\n\n")[-2].split("data: ")[1])
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": str(error)}
    assert [item["type"] for item in last["response"]["output"]] == ["reasoning"]
    made = shape()
    begun = made.failed(error).decode()
    assert begun.startswith("event: response.created\n"), "clients read nothing before that"


def test_a_client_that_carries_thoughts_gets_them_in_the_form_it_gives_back() -> None:
    item = streamed(ROUND, include=["reasoning.encrypted_content"])[-1]["response"]["output"][0]
    again = to_chat({"model": "m", "input": [item | {"content": None}, {"role": "assistant", "content": "x"}]})
    assert again.chat["messages"] == [{"role": "assistant", "content": "x", "reasoning_content": "Hm."}]


def test_an_output_can_be_the_next_requests_input() -> None:
    output = streamed(ROUND)[-1]["response"]["output"]
    asked = to_chat({"model": "m", "input": output})
    (message,) = asked.chat["messages"]
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("Looking.", "Hm.", 2)
    assert asked.left_out == ()


@pytest.mark.parametrize("arguments", ["", "{", "[]", '{"input": 3}', '{"other": "x"}', "patch me"])
def test_a_text_tool_that_was_called_with_no_such_json_gets_what_was_written(arguments: str) -> None:
    output = streamed([calling(call(0, arguments, id="b", name="patch"))])[-1]["response"]["output"]
    assert output[0]["input"] == arguments


def test_logprobs_ids_and_sides_go_with_the_words_they_are_of() -> None:
    top = {"token": "Hi", "logprob": -0.5, "bytes": None}
    told = {"content": [top | {"top_logprobs": [top]}]}
    made = shape(top_logprobs=1)
    sent = made.token(Token("Hi", logprobs=told), (5,), first=True, side=Side.DEVICE)
    (delta,) = [e for e in events_of(sent) if e["type"] == "response.output_text.delta"]
    plain = top | {"bytes": []}
    assert delta["logprobs"] == [plain | {"top_logprobs": [plain]}]
    assert (delta["token_ids"], delta["disco"]) == (
        (5,) if isinstance(delta["token_ids"], tuple) else [5],
        {"side": "device"},
    )
    body = made.body([Token("Hi", logprobs=told)], {0: (5,)}, OUTCOME)
    assert body["output"][0]["content"][0]["logprobs"] == delta["logprobs"]
    assert body["token_ids"] == (5,)


ODD: list[Any] = [None, 3, "x", [None], [[]], [{}], [{"index": 0}], [{"index": 0, "function": 3}],
                  [{"index": [], "id": 4, "function": {"name": 5, "arguments": {}}}]]  # fmt: skip


@pytest.mark.parametrize("calls", ODD)
def test_calls_that_cannot_be_read_break_nothing(calls: Any) -> None:
    """They are left out where the server's stream is read, or its error: no shape sees them."""
    reader, said = Reader(), [Token("Hi")]
    with suppress(TypeError, CutError):
        delta = {"tool_calls": calls, "reasoning_content": calls, "refusal": calls}
        said += [token for token in [reader.token({"delta": delta})] if token]
        said += [event for event in reader.ends(is_done=True) if isinstance(event, Token)]
    events = streamed(said)
    assert accumulated(events) == events[-1]["response"]["output"]


# --- any stream ---------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=5)
PIECES = st.lists(st.tuples(TEXTS, st.sampled_from(["look", "patch", "other"])), max_size=3)
DELTAS = st.builds(lambda thought, refusal: Delta(thought, refusal), TEXTS, TEXTS)
SAID = st.lists(st.builds(lambda text, delta: Token(text, 1, delta), TEXTS, st.none() | DELTAS), max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[Token]:
    """Words, thoughts and refusals, and pieces of calls by turns."""
    pieces = [CallPart(i, text, f"id_{i}", name) for i, (text, name) in enumerate(draw(PIECES))]
    more = draw(st.lists(st.builds(CallPart, st.integers(0, len(pieces) - 1), TEXTS), max_size=4)) if pieces else []
    said = draw(SAID)
    return [*said, *map(calling, pieces), *draw(st.permutations([*said, *map(calling, more)]))]


TOKENS = answers()
REASONS = st.sampled_from(["stop", "length", "tool_calls", "content_filter", None])


@given(TOKENS, REASONS, st.sets(st.integers(0, 6)))
@settings(max_examples=60, deadline=None)
def test_a_stream_says_what_the_body_says_whatever_comes(
    tokens: list[Token], reason: str | None, silences: set[int]
) -> None:
    outcome = replace(OUTCOME, finish_reason=reason)
    made, sent = shape(), b""
    for i, token in enumerate(tokens):
        sent += made.sign_of_life() if i in silences else b""
        sent += made.token(token, None, first=i == 0)
    told = (sent + made.ending(outcome, include_usage=False)).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in told.split("\n") if line.startswith("data: ")]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    body = json.loads(json.dumps(shape().body(tokens, {}, outcome)))
    assert events[-1]["response"] == body
    assert accumulated(events) == body["output"]
    Response.model_validate(body)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))  # as the openai client does: it raises where nothing fits
