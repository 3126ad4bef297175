"""The check of forced calls sees what is wrong with a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.engine.tool_schemas import TOOLS, problems
from benchmarks.engine.tools import Call, Written, table

BY_NAME = {tool["function"]["name"]: tool for tool in TOOLS}
GOOD = Call("get_weather", '{"location": "Lisbon", "unit": "celsius"}', 1, "tool_calls", has_id=True)


def test_a_call_is_one_only_if_all_of_it_is_right() -> None:
    tool = BY_NAME["get_weather"]
    assert GOOD.fault(tool) is None
    for wrong in (
        {"name": "grep"}, {"n_calls": 2}, {"has_id": False}, {"finish_reason": "length"},
        {"arguments": '{"location": "Lis'}, {"arguments": '{"location": "Lisbon"}'},
    ):  # fmt: skip
        changed: dict[str, Any] = wrong
        assert replace(GOOD, **changed).fault(tool)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("get_weather", {"location": "x", "unit": "kelvin"}, "$.unit is none of"),
        ("get_weather", {"location": "x", "unit": "celsius", "more": 1}, "$ has more"),
        ("get_weather", {"location": "x" * 17, "unit": "celsius"}, "$.location has 17 characters"),
        ("read_file", {"path": "x", "limit": 2001}, "$.limit is 2001"),
        ("read_file", {"path": "x", "limit": True}, "$.limit is no integer"),
        ("edit_file", {"path": "x", "dry_run": True, "edits": []}, "$.edits has 0 items"),
        ("ship_order", {"order_id": 1, "to": {"street": "x"}}, "$.to lacks city"),
        ("refund", {"payment": "pay_1", "reason": "duplicate"}, "$.payment does not match"),
        ("move", {"steps": [{"kind": "turn", "degrees": "x"}]}, "$.steps[0] is none of the alternatives"),
        ("draw_chart", {"kind": "pie", "series": []}, "$.kind is not 'line'"),
        ("pick", {}, "$ is none of the alternatives"),
    ],
)
def test_arguments_that_are_not_as_their_schema_says_are_seen(name: str, arguments: Any, why: str) -> None:
    schema = BY_NAME[name]["function"]["parameters"]
    assert any(found.startswith(why) for found in problems(arguments, schema, schema))


def test_an_answer_by_a_schema_is_one_only_if_all_of_it_is_right() -> None:
    tool = BY_NAME["get_weather"]
    assert Written(GOOD.arguments, "stop").fault(tool) is None
    for text, reason in ((GOOD.arguments, "length"), (GOOD.arguments[:-3], "stop"), ('{"location": "Lisbon"}', "stop")):
        assert Written(text, reason).fault(tool)


def test_the_faults_are_listed() -> None:
    found = {"asked": 4, "right": 3, "whole": 2, "streamed": 1, "alike": 1, "pairs": 2, "faults": ["1 grep: no"]}
    said = table({"calls": found, "answers": found | {"faults": []}}).splitlines()
    assert said[0].startswith("3 of 4 forced calls are as their schema says")
    assert said[1] == "1 grep: no"
    assert said[2].startswith("3 of 4 answers by a schema")
