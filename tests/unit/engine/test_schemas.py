"""Schemas as users of OpenAI's and zod's libraries write them: what a grammar allows, validation does not reject."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.json_schema.unenforced import left_out, narrowed
from disco_daemon.engine.llama.grammar import grammar_of
from disco_daemon.engine.llama.vocabulary import Vocabulary
from tests.fixtures.gbnf import Language
from tests.fixtures.token_draws import TokenDraws

ZOD_DATETIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):"
    r"[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ITEM = {"type": "object", "properties": {"kind": {"const": "a b/c~"}}, "required": ["kind"]}


def strict(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": of}}


def language(of: Any) -> Language:
    return Language(grammar_of(strict(of)), exact=True)


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("of", "yes", "no"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.75, 0.1], [0, 1, -0.5]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.75], [1, 1.5]),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10}, [9.99, 0.5, 10], [9.999, 11]),
        ({"type": "string", "pattern": "^https"}, ["https://x", "https"], ["http", " https"]),
        ({"type": "string", "pattern": "-dev"}, ["a-dev", "-dev", "x-dev y\n"], ["dev", "-de v"]),
        ({"type": "string", "pattern": "a$|^b"}, ["xa", "bx"], ["ax", "xb"]),
        ({"type": "string", "pattern": ZOD_DATETIME, "format": "date-time"}, ["2026-11-28T01:02:03Z"], ["2026-11-28"]),
        ({"type": "string", "pattern": ZOD_EMAIL, "format": "email"}, ["a.b@c.org"], ["a..b@c.org", ".a@c.org", "a@c"]),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4}, ["ab", "abcd"], ["a", "abcde"]),
        ({"enum": ["a", 1, None, [1], {"b": 2}]}, ["a", 1, None, [1], {"b": 2}], ["b", 2, [2], {"b": 1}]),
        ({"enum": [1, 2, 3, "x"], "minimum": 2}, [2, 3, "x"], [1]),
        ({"type": "integer", "not": {"const": 5}, "minimum": 4, "maximum": 6}, [4, 6], [5]),
        ({"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab"]),
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
         [["a", 1], []], [[1]]),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "integer"}},
         [["a", 1]], [["a", "b"]]),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, [[1, 7], [7]], [[], [1]]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["b", "a"], []], [["a", "a"]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"n": {"type": "string"}}},
         [{"n": "x", "m": 1}], [{"n": 1}, {"m": "x"}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
        ({"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
         [{"x-a": 1}, {}], [{"x-a": "b"}, {"y": 1}]),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
          "dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}}, "required": ["a"],
          "if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}},
         [{"a": False}, {"a": True, "b": 1}], [{"a": True}]),
        ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]}, [-1, 6], [3]),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "string"}}}], "unevaluatedProperties": False},
         [{"a": 1}, {"a": 1, "b": "c"}], [{"b": "c"}, {"a": 1, "c": 2}]),
        ({"oneOf": [{"oneOf": [{"required": ["c"], "properties": {"c": True}}, {"required": ["d"]}]},
                    {"required": ["a"], "properties": {"a": True}}], "unevaluatedProperties": False},
         [{"a": 1}, {"c": 1}], [{"a": 1, "c": 1, "d": 1}, {"a": 1, "c": 1}]),
    ],
)  # fmt: skip
def test_what_is_written_is_what_is_meant(of: Any, yes: list[Any], no: list[Any]) -> None:
    found = language(of)
    for value in yes + no:
        assert found.allows(text(value)) is any(value is known for known in yes), value


ROOTS: list[Any] = [
    {"type": "object"}, {"type": "array"}, {"type": "string"}, {"type": "number"}, {"type": "integer"},
    {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"enum": ["a", 1, None, True, [1], {"b": 2}]},
    {"const": {"a": [1, 2]}}, {"type": "string", "pattern": "^a+$"}, {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "format": "date"}, {"type": "number", "minimum": -1.5}, {"type": "integer", "multipleOf": 5},
    {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, {"type": "array", "contains": {"const": 1}},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]}, {"$ref": "#/$defs/a"}, {},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"anyOf": [{"type": "array", "items": {"type": "integer"}, "minItems": 2}, {"type": "object", "required": ["a"]}]},
]  # fmt: skip


@pytest.mark.parametrize("of", ROOTS)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_answer_begins_and_ends_with_its_json(of: Any, is_strict: bool) -> None:
    form = strict(of | {"$defs": {"a": {"type": "array", "items": {"type": "string"}}}})
    form["json_schema"]["strict"] = is_strict
    found = Language(grammar_of(form), exact=True)
    for seed in range(8):
        answer = found.draw(seed)
        assert answer == answer.strip()
        assert found.allows(answer)
        assert not any(found.allows(padded) for padded in (f"{answer} ", f" {answer}", f"{answer}\n")), answer


@pytest.mark.parametrize(
    ("pointer", "more"),
    [
        ("#/$defs/of/anyOf/0", {"of": {"anyOf": [ITEM]}}),
        ("#/$defs/of/prefixItems/1", {"of": {"prefixItems": [{}, ITEM]}}),
        ("#/$defs/with%20space", {"with space": ITEM}),
        ("#/$defs/List%3Cstring%3E", {"List<string>": ITEM}),
        ("#/$defs/a~1b", {"a/b": ITEM}),
        ("#/$defs/a~0b", {"a~b": ITEM}),
        ("https://example.org/s.json#/$defs/x", {"x": ITEM}),
        ("other.json", {"x": ITEM | {"$id": "other.json"}}),
        ("#anchor", {"x": ITEM | {"$anchor": "anchor"}}),
    ],
)
def test_a_reference_leads_to_whatever_it_names_in_the_schema(pointer: str, more: Any) -> None:
    of = {
        "$id": "https://example.org/s.json", "type": "object", "properties": {"x": {"$ref": pointer}},
        "required": ["x"],
        "$defs": more,
    }  # fmt: skip
    found = language(of)
    assert found.allows('{"x":{"kind":"a b/c~"}}')
    assert not found.allows('{"x":{"kind":"a"}}')


@pytest.mark.parametrize("n", [1001, 2000])
@pytest.mark.parametrize("least", [0, 700])
def test_lengths_are_exact_however_large(n: int, least: int) -> None:
    found = language({"type": "string", "minLength": least, "maxLength": n})
    if n <= 2001:
        assert found.allows(f'"{"a" * n}"')
        assert not found.allows(f'"{"a" * (n + 1)}"')
    assert found.allows(f'"{"a" * least}"')
    assert not least or not found.allows(f'"{"a" * (least - 1)}"')


def test_what_is_left_out_of_a_schema_is_named() -> None:
    unique = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    }
    form = {"type": "json_schema", "json_schema": {"schema": unique}}
    assert left_out(form, []) == ["response_format.uniqueItems"]
    assert left_out(strict(unique), []) == []  # which is refused
    tool = {"type": "function", "function": {"name": "look", "parameters": unique}}
    assert left_out(None, [tool]) == ["tools.look.uniqueItems"]
    assert left_out({"type": "json_object"}, [{"type": "function", "function": {"name": "none"}}]) == []


@pytest.mark.parametrize(
    ("of", "what", "only_whole"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ["additionalProperties"], {"b": 1}),
        ({"type": "object", "required": ["a"]}, ["additionalProperties"], {"a": 1, "b": 2}),
        ({"type": "array", "items": {"type": "object", "properties": {"a": {}}}}, ["additionalProperties"], [{"b": 1}]),
        ({"type": "object", "properties": {"a": {"minimum": 1}}, "additionalProperties": False}, ["type"], {"a": "x"}),
        ({"properties": {"a": {}}, "additionalProperties": False}, ["type"], "text"),
        ({"properties": {"a": {}}}, ["additionalProperties", "type"], {"b": []}),
        ({}, ["type"], 1),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "additionalProperties": False,
          "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
         ["additionalProperties"], {"a": {"n": {}, "m": 1}}),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, [], None),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "maxProperties": 1, "required": ["a"]},
         [], None),
        ({"type": "object"}, [], None),
        ({"type": "object", "additionalProperties": {"type": "string"}}, [], None),
        ({"enum": [1, "a"]}, [], None),
        ({"type": "array"}, [], None),
    ],
)  # fmt: skip
def test_what_a_schema_allows_and_an_answer_leaves_out_is_named_unless_all_of_it_is_wanted(
    of: Any, what: list[str], only_whole: Any
) -> None:
    meant, whole = strict(of), strict(of) | {"whole": True}
    assert narrowed(meant) == [f"response_format.{keyword}" for keyword in what]
    assert narrowed(whole) == []
    if what:
        assert not Language(grammar_of(meant)).allows(text(only_whole))
        assert Language(grammar_of(whole)).allows(text(only_whole))


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "#/properties/x/items", "https://own.example/s#/none"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_reference_to_nothing_is_the_callers_mistake_strict_or_not(reference: str, is_strict: bool) -> None:
    form = strict({"$id": "https://own.example/s", "properties": {"x": {"$ref": reference}}})
    form["json_schema"]["strict"] = is_strict
    with pytest.raises(GrammarError, match=r"'\$ref' in the JSON schema at #/properties/x is '.*', which is not in"):
        grammar_of(form)


@pytest.mark.parametrize("reference", ["https://example.invalid/x", "other.json#/a", "Pet", "urn:example:x"])
def test_a_reference_to_another_document_is_refused_if_strict_and_else_left_out_and_named(reference: str) -> None:
    form = strict({"type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"]})
    with pytest.raises(
        GrammarError, match=r"'\$ref' in the JSON schema at #/properties/x is '.*', which is in another"
    ):
        grammar_of(form)
    form["json_schema"]["strict"] = False
    assert Language(grammar_of(form)).allows('{"x":[1]}')
    assert left_out(form, []) == ["response_format.$ref"]


def test_a_tool_may_have_lost_what_it_refers_to() -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}, "n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    assert left_out(None, [tool]) == ["tools.look.$ref"]


def test_a_schema_beside_json_object_is_kept() -> None:
    grammar = grammar_of({"type": "json_object", "schema": {"properties": {"a": {"const": 1}}, "required": ["a"]}})
    assert Language(grammar).allows('{"a":1}')
    assert not Language(grammar).allows("{}")


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"properties": {"x": {"$ref": "https://example.invalid/x"}}}, r"'\$ref' in the JSON schema at #/properties/x"),
        ({"properties": {"x": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}, "'uniqueItems'"),
        ({"properties": {"x": {"pattern": r"a\b"}}}, r"'pattern' in the JSON schema at #/properties/x"),
        ({"properties": {"x": {"type": "thing"}}}, "'type' is \"thing\" in the JSON schema at #/properties/x"),
        ({"properties": {"x": {"multipleOf": 0}}}, "'multipleOf' is 0 in the JSON schema at #/properties/x"),
        ({"properties": []}, "'properties' is \\[\\] in the JSON schema"),
    ],
)
def test_a_refusal_names_the_keyword_and_the_place(of: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as refused:
        grammar_of(strict({"type": "object"} | of))
    assert "fetch" not in str(refused.value)
    assert "Error:" not in str(refused.value)


# --- schemas at random ------------------------------------------------------------

NUMBERS = st.sampled_from([-3, 0, 1, 2, 5, 0.5, 1.25, -0.75])
PATTERNS = st.sampled_from(["a", "^a", "b$", "^[a-c]+$", r"\d", "^(x|yy)*$", "^(?!a)", r"^\S+$", "a|^b", "[^a-z]"])
VALUES = st.sampled_from(["a", "b1", "", 0, 1, 2.5, True, False, None, [], [1], {}, {"a": 1}])
NAMES = st.sampled_from(["a", "b", "ab", "x y"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    count, several = st.integers(0, 3), st.lists(inner, min_size=1, max_size=2)
    kind = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
    options = {
        "type": kind | st.lists(kind, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES, "minimum": NUMBERS, "exclusiveMaximum": NUMBERS, "multipleOf": st.sampled_from([1, 2, 3]),
        "minLength": count, "maxLength": count, "pattern": PATTERNS, "minItems": count, "maxItems": count,
        "items": inner, "prefixItems": several, "contains": inner, "uniqueItems": st.just(True),
        "properties": st.dictionaries(NAMES, inner, max_size=2), "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner, "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
        "propertyNames": inner, "minProperties": count, "maxProperties": count, "anyOf": several, "oneOf": several,
        "allOf": several, "not": inner, "if": inner, "then": inner, "else": inner,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "unevaluatedProperties": st.booleans(), "unevaluatedItems": st.booleans(),
        "$ref": st.sampled_from(["#", "#/$defs/a"]),
    }  # fmt: skip
    names = st.lists(st.sampled_from(sorted(options)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen}))


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=5)


@given(SCHEMAS, st.booleans() | keywords(st.booleans()), st.integers(0, 10**6), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_answer_is_one_that_validation_rejects(of: Any, shared: Any, seed: int, is_whole: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    whole = {"allOf": [of], "$defs": {"a": shared}}
    try:
        grammar = grammar_of(strict(whole) | {"whole": is_whole})
    except GrammarError:
        return
    found = Language(grammar, exact=True)
    assert not found.missing()
    chance = random.Random(seed)
    validator = jsonschema.Draft202012Validator(whole)
    for _ in range(4):
        answer = found.draw(chance.randrange(10**6), n=chance.choice((5, 30)))
        assert answer == answer.strip()
        assert not found.allows(f"{answer} ")
        try:
            assert not list(validator.iter_errors(json.loads(answer))), answer
        except RecursionError:  # an `if` that refers to itself, of which nothing follows
            return


@given(SCHEMAS, st.booleans() | keywords(st.booleans()), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_answer_that_only_the_whole_schema_allows_is_told_of(of: Any, shared: Any, seed: int) -> None:
    form = strict({"allOf": [of], "$defs": {"a": shared}})
    try:
        meant, whole = (Language(grammar_of(form | {"whole": wanted}), exact=True) for wanted in (False, True))
    except GrammarError:
        return
    chance = random.Random(seed)
    draws = [found.draw(chance.randrange(10**6), n=chance.choice((5, 30))) for found in (meant, whole) for _ in "abc"]
    assert all(whole.allows(answer) for answer in draws[:3])
    if not narrowed(form):
        assert all(meant.allows(answer) for answer in draws[3:])


def test_answers_from_a_models_tokens_hold_to_their_schemas(vocabulary: Vocabulary) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    draws, n = TokenDraws(vocabulary), 0
    for seed, of in enumerate(ROOTS):
        of = of | {"$defs": {"a": {"type": "array", "items": {"type": "string"}}}}
        answer = draws.draw(grammar_of(strict(of) | {"whole": seed % 2 == 0}), seed)
        if answer is not None:
            n += 1
            assert answer == answer.strip()
            assert not list(jsonschema.Draft202012Validator(of).iter_errors(json.loads(answer))), answer
    assert n > len(ROOTS) // 2
