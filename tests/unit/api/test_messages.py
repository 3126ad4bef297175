"""Anthropic's Messages API: a request becomes a chat, and an answer's stream says what its body says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.api.anthropic.messages_request import BILLING, to_chat
from disco_daemon.api.anthropic.messages_shape import MessagesShape, error_body
from disco_daemon.api.http.events import KEEP_ALIVE
from disco_daemon.errors import EndpointError, RequestError, Unavailable
from disco_daemon.types import Attempt, CallPart, Delta, Outcome, Plan, Side, Token, Usage

USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=4)
WON = Attempt(Side.SERVER, "big", 0.0, 0.1, censored=False, usage=USAGE)
OUTCOME = Outcome(
    "r", 5.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, 0.1, 2.0, 0, {Side.SERVER: 5}, (WON,), 0.0, 0.0
)  # fmt: skip
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "Hi"}


def asked(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "disco", "max_tokens": 9, "messages": [*messages] or [HI]} | more


def messages(*said: dict[str, Any], **more: Any) -> Any:
    return to_chat(asked(*said, **more)).chat["messages"]


# --- in ---------------------------------------------------------------------------------------------------------------


def test_a_request_is_a_chat_with_the_same_fields() -> None:
    made = to_chat(asked(stream=True, temperature=0.5, top_k=3, stop_sequences=["x"], metadata={"user_id": "u"}))
    assert made.chat == {
        "model": "disco", "max_tokens": 9, "messages": [HI], "stream": True, "temperature": 0.5, "top_k": 3,
        "stop": ["x"],
    }  # fmt: skip
    assert made.left_out == ()


def test_the_line_that_changes_with_each_request_goes_nowhere() -> None:
    line = f"{BILLING} cc_version=2.1; cch=abcde;"
    told = [
        {"type": "text", "text": line},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    assert messages(system=told) == [
        {"role": "system", "content": [told[1]]},
        HI,
    ]
    assert messages(system=f"{line}\n\nBe brief.") == [{"role": "system", "content": "Be brief."}, HI]
    assert messages(system=line) == [HI]


def test_calls_and_their_results_are_messages_of_their_own() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "x"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "is_error": True,
        "content": [{"type": "text", "text": "no"}, image],
    }
    said = messages(
        HI,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    )
    assert said[1:] == [
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]  # fmt: skip


def test_an_answer_that_the_client_has_begun_is_continued() -> None:
    assert messages(HI, {"role": "assistant", "content": "The answer is ("})[-1] == {
        "role": "assistant", "content": "The answer is (", "prefix": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_tools_are_functions_and_those_that_anthropic_runs_are_left_out(
    choice: dict[str, Any], made: dict[str, Any]
) -> None:
    found = to_chat(asked(tools=[LOOK, {"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice))
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert found.chat["tools"] == [{"type": "function", "function": function}]
    assert {key: found.chat[key] for key in made} == made
    assert found.left_out == ("tools.web_search_20250305",)


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"reasoning_effort": "low", "disco": {"thinking_tokens": 2000}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9000}, "disco": {"private": True}},
            {"reasoning_effort": "medium", "disco": {"thinking_tokens": 9000, "private": True}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 99000}, "disco": {"thinking_tokens": 7}},
            {"reasoning_effort": "high", "disco": {"thinking_tokens": 7}},
        ),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive"}}, {}),
    ],
)
def test_how_much_to_think_is_an_effort(fields: dict[str, Any], made: dict[str, Any]) -> None:
    found = to_chat(asked(**fields)).chat
    assert {key: found[key] for key in found if key in ("reasoning_effort", "thinking", "disco")} == made


def test_a_form_is_a_schema_and_what_no_chat_has_is_named() -> None:
    schema = {"type": "object"}
    for more in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                 {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
        assert to_chat(asked(**more)).chat["response_format"]["json_schema"]["schema"] == schema
    found = to_chat(asked({"role": "user", "content": [{"type": "search_result"}, {"type": "text", "text": "x"}]},
                          container="c", service_tier="auto"))  # fmt: skip
    assert found.left_out == ("messages.search_result", "container")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]},
            "messages[0].content[0].id",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [LOOK], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"system": [{"type": "image"}]}, "system"),
    ],
)
def test_bad_input_names_the_parameter(raw: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_chat(asked(**raw))
    assert caught.value.param == param


def test_tokens_are_counted_without_a_limit() -> None:
    assert "max_tokens" not in to_chat({"model": "m", "messages": [HI]}, counts=True).chat


# --- out --------------------------------------------------------------------------------------------------------------


def events_of(sent: bytes) -> list[dict[str, Any]]:
    """The events on the wire; each has its name twice."""
    found = []
    for event in sent.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(tokens: Sequence[Token], outcome: Outcome = OUTCOME) -> list[dict[str, Any]]:
    made = MessagesShape("r", 1, "disco")
    sent = b"".join(made.token(token, None, first=i == 0) for i, token in enumerate(tokens))
    return events_of(sent + made.ending(outcome, include_usage=False))


def gathered(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, as Anthropic's libraries do."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = dict(events[0]["message"])
    arguments, is_open = dict[int, str](), False
    for event in events[1:-2]:
        at = event["index"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert at == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                delta = {key: value for key, value in event["delta"].items() if key != "type"}
                [(key, value)] = delta.items()
                if key == "partial_json":
                    arguments[at] = arguments.get(at, "") + value
                else:
                    message["content"][at][key] += value
            case "content_block_stop":
                assert at == len(message["content"]) - 1
                is_open = False
    assert not is_open
    for at, text in arguments.items():
        message["content"][at]["input"] = json.loads(text)
    ends: dict[str, Any] = events[-2]["delta"]
    return message | ends | {"usage": events[-2]["usage"], "disco": events[-2]["disco"]}


def call(index: int, arguments: str, **head: Any) -> Token:
    """A piece of a call; the first one of each has an `id`, which is its name as well."""
    return Token("", 1, Delta(calls=(CallPart(index, arguments, head.get("id", ""), head.get("id", "")),)))


WORDS = st.text("ab \n<>é👩", min_size=1, max_size=4)
SAID = st.lists(st.one_of(WORDS.map(Token), WORDS.map(lambda text: Token("", 1, Delta(thought=text)))), max_size=9)
CALLED = st.lists(st.dictionaries(WORDS, WORDS, max_size=2), max_size=3)


@settings(max_examples=100)
@given(SAID, CALLED, st.integers(1, 5))
def test_a_stream_says_what_a_body_says(said: list[Token], called: list[dict[str, str]], size: int) -> None:
    tokens = list(said)
    for i, given_ in enumerate(called):
        text = json.dumps(given_)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        tokens += [call(i, "", id=f"c{i}"), *(call(i, piece) for piece in pieces)]
    whole = json.loads(json.dumps(MessagesShape("r", 1, "disco").body(tokens, {}, OUTCOME)))
    assert gathered(streamed(tokens)) == whole
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == called


@pytest.mark.parametrize("between", ["", "\n", "\n\n "])
def test_calls_by_turns_and_white_space_between_their_pieces_break_no_block(between: str) -> None:
    """A block cannot be opened again: what comes of another call waits until the open one is whole."""
    space = [Token(between)] if between else []
    heads = [call(0, '{"a":', id="a"), *space, call(1, '{"b":', id="b")]
    tokens = [Token("I look."), *heads, *space, call(0, " 1"), *space, call(1, "2"), call(0, "}"), *space, call(1, "}")]
    message = gathered(streamed(tokens))
    assert message == json.loads(json.dumps(MessagesShape("r", 1, "disco").body(tokens, {}, OUTCOME)))
    assert [(b["type"], b.get("name"), b.get("input")) for b in message["content"]] == [
        ("text", None, None), ("tool_use", "a", {"a": 1}), ("tool_use", "b", {"b": 2}),
    ]  # fmt: skip


def test_a_call_that_is_whole_is_closed_when_the_next_one_begins() -> None:
    made = MessagesShape("r", 1, "disco")
    sent = b"".join(made.token(one, None, first=False) for one in (call(0, "{}", id="a"), call(1, "{", id="b")))
    assert [event["type"].removeprefix("content_block_") for event in events_of(sent)[1:]] == [
        "start", "delta", "stop", "start", "delta",
    ]  # fmt: skip
    sent = made.token(Token("and "), None, first=False) + made.token(Token("so on"), None, first=False)
    assert sent == b"", "text waits until the call is whole"
    rest = events_of(made.token(call(1, "}"), None, first=False))
    assert "".join(event["delta"].get("text", "") for event in rest if "delta" in event) == "and so on"


def test_a_refusal_is_text() -> None:
    assert gathered(streamed([Token("", 1, Delta(refusal="No."))]))["content"] == [{"type": "text", "text": "No."}]


def test_usage_has_what_came_from_a_cache_beside_the_input() -> None:
    assert gathered(streamed([Token("Hi")]))["usage"] == {
        "input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use"), ("content_filter", "refusal")],
)
def test_why_an_answer_ended_is_told_in_this_apis_words(reason: str, told: str) -> None:
    outcome = replace(OUTCOME, finish_reason=reason)
    assert gathered(streamed([Token("Hi")], outcome))["stop_reason"] == told
    assert MessagesShape("r", 1, "m").body([], {}, outcome)["stop_reason"] == told


@pytest.mark.parametrize("stop", ["END", "\n\n", "é👩"])
def test_the_stop_sequence_that_ended_an_answer_is_told(stop: str) -> None:
    outcome = replace(OUTCOME, stop_sequence=stop)
    for told in (gathered(streamed([Token("Hi")], outcome)), MessagesShape("r", 1, "m").body([], {}, outcome)):
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    other = gathered(streamed([Token("Hi")]))
    assert (other["stop_reason"], other["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("begins", ["sign", "token", "ending", "failed"])
def test_a_message_begins_with_the_length_of_its_prompt_whatever_begins_it(begins: str) -> None:
    made = MessagesShape("r", 1, "disco")
    made.prompt(7)
    pieces: dict[str, Callable[[], bytes]] = {
        "sign": made.sign_of_life,
        "token": lambda: made.token(Token("Hi"), None, first=True),
        "ending": lambda: made.ending(OUTCOME, include_usage=False),
        "failed": lambda: made.failed(Unavailable("all is lost")),
    }
    sent = pieces[begins]()
    assert events_of(sent)[0]["message"]["usage"] == {
        "input_tokens": 7, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 0,
    }  # fmt: skip


def test_a_sign_of_life_is_a_ping_within_a_message_and_a_failure_is_told_in_band() -> None:
    made = MessagesShape("r", 1, "disco")
    assert made.sign_of_life() == KEEP_ALIVE, "a message begins with the length of its prompt, which nobody knows yet"
    made.prompt(7)
    sent = made.sign_of_life() + made.sign_of_life() + made.token(Token("Hi"), None, first=True)
    sent += made.failed(Unavailable("all is lost"))
    kinds = [event["type"] for event in events_of(sent)]
    assert kinds == ["message_start", "ping", "ping", "content_block_start", "content_block_delta", "error"]


def test_errors_have_this_apis_types() -> None:
    assert error_body(RequestError("no"))["error"] == {"type": "invalid_request_error", "message": "no"}
    assert error_body(Unavailable("no"))["error"]["type"] == "overloaded_error"
    assert error_body(EndpointError(Side.SERVER, "rate_limited", "no"))["error"]["type"] == "rate_limit_error"
    assert error_body(RequestError("no", status=404))["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("The maximum context length is 4096 tokens at the device, but the prompt has 6031.", "6031 > 4096"),
        ("This model's maximum context length is 512 tokens, but the prompt has about 600. Shorten it.", "600 > 512"),
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
         "9000 > 8192"),
        ("The maximum context length is 512 tokens at the device and 900 tokens at the server, but it has 3000.",
         "3000 > 512"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_told_in_words_by_which_agents_compact(said: str, told: str) -> None:
    body = error_body(RequestError(said, code="context_length_exceeded"))["error"]
    n, most = told.split(" > ")
    assert body["type"] == "invalid_request_error"
    assert body["message"] == f"prompt is too long: {n} tokens > {most} maximum. {said}"
    assert error_body(RequestError("odd", code="context_length_exceeded"))["error"]["message"] == "odd"
