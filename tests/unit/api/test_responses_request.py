"""A request of the Responses API says to an endpoint what it would have said as a chat; what no chat has is named."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.api.answering import unread_bytes
from disco_daemon.api.openai import openai_request
from disco_daemon.api.openai.codex import INSTRUCTIONS, codex_models
from disco_daemon.api.responses.responses_items import carried, uncarried
from disco_daemon.api.responses.responses_request import responses_error, to_chat
from disco_daemon.errors import RequestError

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
HOSTED = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [LOOK]}, {"type": "image_generation"}]


def asked(**more: Any) -> Any:
    return to_chat({"model": "disco", "input": "Hi"} | more)


def messages(*items: dict[str, Any], **more: Any) -> Any:
    return asked(input=list(items), **more).chat["messages"]


def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


# --- items --------------------------------------------------------------------------------------------------------


def test_a_text_is_a_question_and_instructions_stand_before_it() -> None:
    assert asked().chat["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked(instructions="Be brief.").chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_instructions_before_all_else_are_one_message_and_those_between_turns_stay_there() -> None:
    """Many chat templates know one system message, at the head."""
    heard = messages(
        said("developer", "One."), said("developer", ""), said("system", "Two."), said("user", "Hi"),
        said("developer", "Three."),
        said("user", "Go"), instructions="Zero.",
    )  # fmt: skip
    assert [(m["role"], m["content"]) for m in heard] == [
        ("system", "Zero.\n\nOne.\n\nTwo."), ("user", "Hi"), ("system", "Three."), ("user", "Go"),
    ]  # fmt: skip


def test_a_round_of_tools_becomes_messages_with_calls_and_their_outputs() -> None:
    heard = messages(
        {"role": "user", "content": "Look twice"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        said("assistant", "Looking.", "output_text"),
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"x":1}', "id": "fc"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'say "ü"'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
    )  # fmt: skip
    calls = heard[1].pop("tool_calls")
    assert [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("a", "look", {"x": 1}), ("b", "patch", {"input": 'say "ü"'}),
    ]  # fmt: skip
    assert heard == [
        {"role": "user", "content": "Look twice"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "I look."},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]


def test_a_call_without_words_has_its_thought_and_a_thought_that_leads_to_nothing_is_named() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": carried("I look.")}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    (message,) = messages(thought, call)
    assert (message["content"], message["reasoning_content"]) == (None, "I look.")
    assert asked(input=[thought, said("user", "Hi")]).left_out == ("input.reasoning",)
    assert asked(input=[said("user", "Hi"), thought]).left_out == ("input.reasoning",)
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    assert asked(input=[foreign, said("user", "Hi")]).left_out == ("input.reasoning",)


@given(st.text(max_size=40))
@settings(max_examples=50)
def test_a_thought_that_a_client_carries_comes_back_as_it_was(thought: str) -> None:
    assert uncarried(carried(thought)) == thought.encode("utf-8", "replace").decode()
    assert uncarried(thought) == ""


def test_images_and_files_are_a_chats_parts() -> None:
    url = "data:image/png;base64,AAAA"
    (message,) = messages({
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": url, "detail": "low"},
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
        ],
    })  # fmt: skip
    assert message["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}},
    ]


def test_items_of_what_openai_itself_does_are_left_out_by_name() -> None:
    found = asked(input=[{"type": "web_search_call", "id": "w", "status": "completed"}, said("user", "Hi")])
    assert found.chat["messages"] == [{"role": "user", "content": "Hi"}]
    assert found.left_out == ("input.web_search_call",)


# --- tools --------------------------------------------------------------------------------------------------------


def test_functions_are_functions_and_a_tool_that_takes_a_text_is_one_too() -> None:
    found = asked(tools=[LOOK, PATCH], tool_choice="auto", parallel_tool_calls=False)
    look, patch = found.chat["tools"]
    assert look == {"type": "function", "function": {k: v for k, v in LOOK.items() if k != "type"}}
    assert patch["function"]["parameters"]["required"] == ["input"]
    assert "start: /a/" in patch["function"]["parameters"]["properties"]["input"]["description"]
    assert (found.chat["tool_choice"], found.chat["parallel_tool_calls"]) == ("auto", False)
    assert found.custom == {"patch"}
    assert found.left_out == ("tools.patch.format",), "nobody holds the model to the grammar"


def test_tools_of_other_kinds_are_left_out_and_named_not_refused() -> None:
    found = asked(tools=[*HOSTED, LOOK])
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == ["look"]
    assert found.left_out == ("tools.web_search", "tools.namespace", "tools.image_generation")
    assert found.echoed["tools"] == [LOOK]
    alone = asked(tools=HOSTED, tool_choice="required", parallel_tool_calls=True)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & alone.chat.keys()
    assert alone.left_out[-1] == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "names", "told"),
    [
        ({"type": "function", "name": "look"}, ["look", "patch"], {"type": "function", "function": {"name": "look"}}),
        ({"type": "custom", "name": "patch"}, ["look", "patch"], {"type": "function", "function": {"name": "patch"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}, {"name": []}]}, ["look"], "auto"),
        ("required", ["look", "patch"], "required"),
        ("none", ["look", "patch"], "none"),
        ({"type": "web_search"}, ["look", "patch"], None),
    ],
)  # fmt: skip
def test_a_choice_of_tools_is_a_chats(choice: Any, names: list[str], told: Any) -> None:
    found = asked(tools=[LOOK, PATCH], tool_choice=choice)
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == names
    assert found.chat.get("tool_choice") == told
    assert ("tool_choice" in found.left_out) is (told is None)


# --- fields -------------------------------------------------------------------------------------------------------


def test_fields_with_another_name_in_a_chat_are_translated() -> None:
    form = {"type": "json_schema", "name": "point", "schema": SCHEMA, "strict": True}
    found = asked(
        max_output_tokens=7, text={"format": form, "verbosity": "low"}, reasoning={"effort": "low"}, stream=True,
        top_logprobs=2, include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )  # fmt: skip
    assert {k: v for k, v in found.chat.items() if k not in ("model", "messages")} == {
        "stream": True, "max_completion_tokens": 7, "verbosity": "low", "reasoning_effort": "low",
        "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}},
    }  # fmt: skip
    assert found.carries_thoughts
    assert found.left_out == ()


def test_what_asks_for_the_usual_asks_for_nothing() -> None:
    found = asked(
        store=False, truncation="disabled", text={"format": {"type": "text"}, "verbosity": "medium"}, background=False,
        include=[], tools=[], tool_choice="auto", top_logprobs=0, reasoning={}, previous_response_id=None,
        client_metadata={"installation": "secret"}, metadata={"a": "b"}, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert found.chat == {"model": "disco", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    assert found.left_out == ()
    assert found.echoed["metadata"] == {"a": "b"}


def test_other_fields_travel_as_in_a_chat_and_those_with_another_meaning_there_are_named() -> None:
    found = asked(
        temperature=0.5, top_k=3, disco={"private": True}, prompt_cache_key="k", max_tokens=5, n=2, store=True,
        truncation="auto", reasoning={"summary": "auto"}, include=["web_search_call.results"],
        context_management=[{"type": "compaction"}],
    )  # fmt: skip
    travels = {"temperature": 0.5, "top_k": 3, "disco": {"private": True}, "prompt_cache_key": "k"}
    assert {k: v for k, v in found.chat.items() if k not in ("model", "messages", "stream")} == travels
    assert sorted(found.left_out) == [
        "context_management", "include.web_search_call.results", "max_tokens", "n", "reasoning.summary", "store",
        "truncation",
    ]  # fmt: skip


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [{"type": "message", "role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "message", "role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [said("user", "x"), {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "leap"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": "perhaps"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("more", "param"), BAD, ids=[param for _, param in BAD])
def test_an_error_names_the_parameter(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        asked(**more)
    assert (e.value.status, e.value.param) == (400, param)
    assert param in str(e.value)


def test_an_error_that_is_found_further_on_has_this_apis_name_of_the_parameter() -> None:
    told = responses_error(RequestError("no", param="response_format.json_schema"))
    assert told["error"]["param"] == "text.format"
    assert responses_error(RequestError("no", param="temperature"))["error"]["param"] == "temperature"
    assert responses_error(RequestError("no"))["error"]["param"] is None


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", "user", "message", "function", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "name", "text", "call_id", "output", "effort", "format", "tools"]),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip
FIELDS = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "include",
    "metadata",
    "stream",
    "store",
)


@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=4))
@settings(max_examples=100, deadline=None)
def test_whatever_is_asked_it_is_a_chat_or_an_error_of_the_clients(more: dict[str, Any]) -> None:
    with suppress(RequestError):
        openai_request.parse_chat(asked(**more).chat)


def test_an_estimate_counts_tools_and_calls_too() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"x": 12345678}'}
    assert unread_bytes(asked().chat) == 0
    assert unread_bytes(asked(tools=[LOOK]).chat) > len("look Look.")
    assert unread_bytes(asked(input=[call]).chat) > len(call["arguments"])


def test_codex_is_told_of_each_model_that_has_a_name_and_how_long_its_context_is() -> None:
    cards: list[dict[str, Any]] = [{"id": "disco", "context_length": 4096}, {"id": "claude-*"}, {"id": "disco/server"}]
    first, second = codex_models([*cards, {"id": "disco/minilm", "capabilities": {"chat": False}}])
    assert (first["slug"], first["context_window"], first["priority"]) == ("disco", 4096, 0)
    assert (second["slug"], "context_window" in second) == ("disco/server", False)
    assert first["base_instructions"] == INSTRUCTIONS
