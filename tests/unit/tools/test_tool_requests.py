"""What a request says of tools, and which of them the device takes."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.endpoints.continuation import chat
from disco_daemon.engine.constraints import SchemaError, check_tools
from disco_daemon.engine.tool_rules import callable_tools, offered
from disco_daemon.errors import RequestError
from disco_daemon.types import Refusal, ToolUse
from tests.unit.types.test_fields import HI, TOOL, asked, at_engine, device


def refused(form: str = "hermes", **more: Any) -> str | None:
    """The parameter for which the device refuses a request; None if it takes it."""
    refusal = device(form).refuses(asked(**more))
    assert refusal is None or isinstance(refusal, Refusal)
    return None if refusal is None else refusal.param


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_model_whose_template_knows_no_tools_is_asked_for_forced_calls_only(choice: Any) -> None:
    assert refused(tools=[TOOL], tool_choice=choice) is None
    assert refused("generic", tools=[TOOL], tool_choice=choice) == ("tools" if choice == "auto" else None)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL] * 129}, "tools"),
    ],
)
def test_tools_that_only_a_server_may_take(more: dict[str, Any], param: str) -> None:
    assert refused(**more) == param


def test_a_tools_schema_has_the_bounds_of_a_forms_where_a_call_is_forced() -> None:
    wide = {"type": "object", "properties": {"x": {"type": "string", "minLength": 10**9}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wide}}]
    refusal = device().refuses(asked(tools=tools, tool_choice="required"))
    assert refusal == "'minLength' is 1000000000 in the tool f's schema; at most 1000000 is possible."
    assert device().refuses(asked(tools=tools)) is None


@pytest.mark.parametrize(
    "costly",
    [
        {"type": "array", "minItems": -1},
        {"type": "string", "pattern": "a" * 1001},
        {"type": "string", "enum": [str(i) for i in range(2000)]},
    ],
)
def test_a_tool_that_no_grammar_can_have_keeps_its_names_and_types_where_no_call_is_forced(
    costly: dict[str, Any],
) -> None:
    schemas = {
        "f": {"type": "object", "properties": {"x": costly, "y": {"type": "integer"}}, "required": ["y"]},
        "g": {"type": "object", "properties": {"z": {"type": "string", "maxLength": 524_288}}},  # of Claude Code
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in schemas.items()]
    use = at_engine(asked(tools=tools)).tools
    assert use is not None
    told = offered(use, "hermes")
    assert {tool.name: tool.parameters for tool in told} == schemas  # the model reads all of it
    f, g = callable_tools(told, use)
    kinds = {"x": {"type": costly["type"]}, "y": {"type": "integer"}}
    assert f.parameters == {"type": "object", "properties": kinds, "required": ["y"]}
    assert g.parameters == schemas["g"]


def test_no_tool_may_be_as_long_as_it_likes() -> None:
    with pytest.raises(SchemaError, match="larger than"):
        check_tools({"a": {"type": "object", "description": "x" * 300_000}}, lenient=True)


@pytest.mark.parametrize(
    ("more", "allowed", "forced", "parallel"),
    [
        ({}, ("f", "g"), False, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("f", "g"), True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ("g",), True, False),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}},
            ("f",), True, True,
        ),
    ],
)  # fmt: skip
def test_which_tools_may_be_called_and_whether_they_have_to(
    more: dict[str, Any], allowed: tuple[str, ...], forced: bool, parallel: bool
) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    sent = at_engine(asked(tools=tools, **more)).tools
    assert sent == ToolUse(tools=tuple(tools), allowed=allowed, forced=forced, parallel=parallel)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_calls_and_results_are_what_templates_expect_and_a_server_gets_them_as_they_are() -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
    ]
    request = asked(messages=[*HI, *said])
    assert device().refuses(request) is None
    assert chat(request, "none").body["messages"][1]["tool_calls"] == [CALL]
    assert list(device().prepare(request).messages[1:]) == [
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": 3}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": [1]}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id"),
    ],
)
def test_a_call_in_the_history_that_is_none_is_an_error_that_names_it(message: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(messages=[*HI, message])
    assert caught.value.param == f"messages[1].{where}"
