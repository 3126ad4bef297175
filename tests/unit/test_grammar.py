from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.engine.grammar import MAX_SCHEMA, GrammarError, grammar_of

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": of}}


def test_any_object_and_a_schema_have_a_grammar() -> None:
    assert grammar_of({"type": "json_object"}).lstrip().startswith("root")
    assert '\\"x\\"' in grammar_of(schema(POINT))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"type": "xml"}, "must be text, json_object or json_schema, not 'xml'"),
        ({}, "not None"),
        ({"type": "json_schema"}, "schema is missing"),
        (schema("point"), "schema is missing"),
        (schema({"type": "nonsense"}), "cannot be turned into a grammar"),
        (schema({"$ref": "#/nowhere"}), "cannot be turned into a grammar"),
        (schema({"description": "x" * MAX_SCHEMA}), "at most"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_a_reason(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        grammar_of(wanted)
