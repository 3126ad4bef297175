from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.tools.format import MAX_TOOLS, Tool, ToolError, tools_of
from disco_daemon.tools.references import Document
from disco_daemon.tools.schemas import TYPES, properties, types_of


def function(name: Any = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_tools_are_read_as_openai_has_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = [function("add", description="Adds.", parameters=schema), function("ns.now-1_x", description=None)]
    assert tools_of(given) == (
        Tool("add", "Adds.", schema),
        Tool("ns.now-1_x", "", {"type": "object", "properties": {}}),
    )
    assert tools_of(None) == tools_of([]) == ()
    assert tools_of([function(parameters={"properties": {}})])[0].parameters["type"] == "object"


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ({}, "tools must be a list"),
        ("add", "tools must be a list"),
        ([None], r"tools\[0\] must be an object"),
        ([function(), {"type": "web_search"}], r"tools\[1\].type is 'web_search'"),
        ([{"type": "function"}], r"tools\[0\].function must be an object"),
        ([function(None)], r"tools\[0\].function.name must be .* not None"),
        ([function("a b")], "letters, digits"),
        ([function("")], "letters, digits"),
        ([function("x" * 65)], "1 to 64"),
        ([function('a"b')], "letters, digits"),
        ([function(description=1)], r"description must be a text"),
        ([function(parameters=[])], r"tools\[0\].function.parameters must be the JSON schema"),
        ([function(parameters={"type": "array"})], r"parameters.type is 'array'"),
        ([function(parameters={"properties": []})], r"parameters.properties must be"),
        ([function(parameters={"required": "a"})], r"parameters.required must be"),
        ([function(), function()], r"tools\[1\].function.name is 'add', as is that of another"),
        ([function(f"f{i}") for i in range(MAX_TOOLS + 1)], "at most 128"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_name(tools: Any, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        tools_of(tools)


ROOT = {
    "$defs": {
        "name": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"type": "null"},
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None, 1.5, True, [], {}]}, TYPES),
        ({"const": "a"}, {"string"}),
        ({"$ref": "#/$defs/name"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"$ref": "#/nowhere"}, TYPES),
        ({"$ref": "https://example.com"}, TYPES),
        ({"$ref": "#/$defs/loop"}, TYPES),
        ({"$ref": "#/$defs/tree"}, TYPES),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, {"string", "integer"}),
        ({"oneOf": [{"items": {}}, {"properties": {}}]}, {"array", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 1}]}, {"string"}),
        ({"description": "Whatever"}, TYPES),
        (True, TYPES),
        ({"type": "nonsense"}, TYPES),
    ],
)
def test_which_types_a_value_may_have(schema: Any, types: set[str]) -> None:
    assert types_of(schema, Document(ROOT)) == types


def test_an_argument_brings_its_definitions_along() -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/name"}, "b": True}, "required": ["b"], **ROOT}
    a, b = properties(root)
    assert [(each.name, each.is_required) for each in (a, b)] == [("a", False), ("b", True)]
    assert a.types == {"string"}
    assert b.types == TYPES


def test_python_has_words_of_its_own_for_three_values() -> None:
    of = {"a": {"type": ["boolean", "null"]}, "b": {"type": "boolean"}, "c": {"type": "string"}, "d": {"const": True}}
    words = [each.python_words for each in properties({"properties": {**of, "e": {"$ref": "#/properties/b"}}})]
    assert words == [["True", "False", "None"], ["True", "False"], [], [], ["True", "False"]]
