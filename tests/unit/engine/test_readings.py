from __future__ import annotations

import time
from typing import Any

import pytest

from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama.ambiguity import MAX_READINGS, readings
from disco_daemon.engine.llama.grammar import grammar_of
from tests.unit.engine.test_grammar import schema

SELF = {"$ref": "#/properties/n"}


def held(*arms: dict[str, Any], union: str = "anyOf") -> dict[str, Any]:
    """A schema whose alternatives may hold themselves."""
    return {"type": "object", "properties": {"n": {union: list(arms)}}, "required": ["n"]}


def thing(*names: str, **properties: Any) -> dict[str, Any]:
    found = {name: {"type": "string"} for name in names} | properties
    return {"type": "object", "properties": found, "required": list(found), "additionalProperties": False}


LIST = {"type": "array", "items": SELF}
FULL = {"type": "array", "items": SELF, "minItems": 1}


@pytest.mark.parametrize(
    "of",
    [
        held(*[LIST | {"maxItems": 50 + i} for i in range(10)]),
        held(*[LIST | {"maxItems": 50 + i} for i in range(200)]),
        held(*[thing("a", kids=LIST | {"maxItems": 50 + i}) for i in range(10)]),
        held({"type": "null"}, *[thing(kid=SELF, **{f"p{i}": {"type": "string"}}) for i in range(8)]),
        held({"type": "string"}, *[{"type": "array", "items": LIST | {"maxItems": 20 + i}} for i in range(40)]),
    ],
)
def test_alternatives_that_begin_alike_and_hold_themselves_are_refused(of: Any) -> None:
    times = []
    for _ in range(3):  # a busy machine may make one of them slow
        began = time.thread_time()
        with pytest.raises(GrammarError, match=r"too many readings of an answer at once.*anyOf"):
            grammar_of(schema(of))
        times.append(time.thread_time() - began)
    assert min(times) < 1.0


@pytest.mark.parametrize(
    "of",
    [
        held({"type": "null"}, *[LIST] * 10),
        held(*[thing("a", kids=LIST)] * 300),
        {"anyOf": [{"enum": [f"v{i}" for i in range(1000)]}] * 3},
        {"type": "string", "pattern": r"^(a+)+b$"},
    ],
)
def test_alternatives_that_are_the_same_are_one(of: Any) -> None:
    assert readings(grammar_of(schema(of))) <= 4


@pytest.mark.parametrize(
    "of",
    [
        {"anyOf": [thing(f"p{i}", "b") for i in range(10)]},
        {"anyOf": [thing("a", f"p{i}") for i in range(10)]},
        {"type": "array", "items": {"anyOf": [thing("a", f"p{i}", n={"type": "integer"}) for i in range(30)]}},
        held(*[thing(kind={"const": f"k{i}"}, kids=LIST) for i in range(20)]),
        held(*[thing(f"p{i}", kids=LIST) for i in range(20)]),
        held(thing("left", op={"const": "+"}, right=SELF), thing("left", test={"const": "<"}, right=SELF), LIST),
        held({"type": "string"}, {"type": "number"}, {"type": "boolean"}, LIST, {"type": "object"}),
        {"type": "object", "properties": {f"p{i}": {"type": ["string", "null"]} for i in range(100)}},
        {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(300)]} for i in range(10)}},
        {"type": "object"},
        {"type": "string", "pattern": r"^([a-z]+|[a-z0-9]+-)*\.(com|org|net|co\.uk)$"},
        {"type": "string", "pattern": r"^(\d{1,3}\.){3}\d{1,3}$"},
        {"type": "array", "items": thing("a", "b"), "maxItems": 50},
    ],
)
def test_what_people_ask_for_can_be_read(of: Any) -> None:
    assert grammar_of(schema(of))


def test_a_grammar_is_read_as_llama_cpp_reads_it() -> None:
    assert (
        readings('root ::= "\\x41" [^a-c\\]"] ("b" | "c")? name* name+ .\nname ::= "[" [0-9A-F]+ "]"') <= MAX_READINGS
    )
    doubled = 'root ::= a\na ::= "[" a "]" | "[" a "]" | "[" a "]" | "[" a "]" | "[" a "]" | "x"'
    assert readings(doubled) > MAX_READINGS
    assert readings(doubled.replace("a ::=", "a ::= b\nb ::=", 1).replace('"[" a "]"', '"[" a')) <= MAX_READINGS


@pytest.mark.parametrize(
    "strange", ["", "root", "root ::= (", "root ::= )*", "root ::= root", "a ::= b\nb ::= a | a", "*"]
)
def test_what_is_no_grammar_is_left_to_llama_cpp(strange: str) -> None:
    assert readings(strange) <= MAX_READINGS
