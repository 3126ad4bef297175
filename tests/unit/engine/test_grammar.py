from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.constraints import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_LEAST,
    MAX_OPTIONAL,
    MAX_SCHEMA,
    SchemaError,
    check,
)
from disco_daemon.engine.json_schema.expressions import Texts
from disco_daemon.engine.json_schema.patterns import PatternError, pattern_of
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama.grammar import MAX_GRAMMAR, grammar_of
from tests.fixtures.gbnf import Language

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def schema(of: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": of, "strict": strict}}


def of_value(of: Any) -> Language:
    """The texts of a schema's answers."""
    return Language(grammar_of(schema(of, strict=True)), exact=True)


def check_all(of: Any, yes: list[Any], no: list[Any]) -> None:
    """Check which values a schema's grammar allows."""
    language = of_value({"type": "object", "properties": {"x": of}, "required": ["x"], "$defs": of.get("$defs", {})})
    for value in yes + no:
        text = json.dumps({"x": value}, ensure_ascii=False, separators=(",", ":"))
        assert language.allows(text) is any(value is known for known in yes), (of, value)


def test_any_object_and_a_schema_have_a_grammar() -> None:
    assert grammar_of({"type": "json_object"}).lstrip().startswith("root")
    assert '\\"x\\"' in grammar_of(schema(POINT))


@pytest.mark.parametrize("text", ["👩\u200d👦", "𓀀", "日本", "a\nb", 'say "a\\b"', "\u0085\x7f"])
def test_a_constant_and_a_name_are_spelled_by_their_characters(text: str) -> None:
    grammar = grammar_of(schema({"type": "object", "properties": {text: {"enum": [text]}}}))
    literals = [_ESCAPED.sub(_unescaped, literal) for literal in re.findall(r'"((?:\\.|[^"\\])*)"', grammar)]
    assert [json.loads(literal) for literal in literals if literal.startswith('"') and len(literal) > 1] == [text, text]


_ESCAPED = re.compile(r"\\U[0-9A-F]{8}|\\.")


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int.from_bytes(bytes.fromhex(escape[0][2:]))) if escape[0][1] == "U" else escape[0][1]


def test_a_string_has_no_control_characters_and_no_half_of_an_escaped_character() -> None:
    for grammar in (grammar_of(schema({"type": "string"})), grammar_of({"type": "json_object"})):
        (signs, escape) = re.findall(r'(\[\^"\\\\[^]]*\]) \|\s+"\\\\" .* \| "u" (\(.*?\))\)', grammar)[0]
        assert signs == r'[^"\\\x7F\x00-\x1F]'
        four = re.compile(escape.replace(" ", ""))
        assert [h for h in ("d83d", "DFFF", "d7ff", "e000", "00e9", "D8") if four.fullmatch(h)] == [
            "d7ff",
            "e000",
            "00e9",
        ]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"type": "xml"}, "must be text, json_object or json_schema, not 'xml'"),
        ({}, "not None"),
        ({"type": "json_schema"}, "schema is missing"),
        (schema("point"), "schema is missing"),
        (schema({"type": "nonsense"}), "'type' is \"nonsense\" in the JSON schema: it has to be one of JSON's types"),
        (
            schema({"$ref": "#/nowhere"}, strict=True),
            "'\\$ref' in the JSON schema is '#/nowhere', which is not in the schema",
        ),
        (schema({"description": "x" * MAX_SCHEMA}), "larger than"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_a_reason(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        grammar_of(wanted)


def nested(n: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        found = {"type": "array", "items": found}
    return found


def chain(n: int) -> dict[str, Any]:
    """Each definition names the next one twice, and all end in a name that is the converter's own."""
    named: dict[str, Any] = {f"d{n}": {"object": {"type": "integer"}}}
    for i in range(n):
        ref = {"$ref": f"#/properties/d{i + 1}/object"}
        named[f"d{i}"] = {"object": {"type": "object", "properties": {"a": ref, "b": dict(ref)}}}
    return {"type": "object", "properties": {"x": {"$ref": "#/properties/d0/object"}, **named}}


def spread(n: int) -> dict[str, Any]:
    """Each property has all those of one definition, and one more."""
    base = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_OPTIONAL)}}
    each = {f"d{i}": {"allOf": [{"$ref": "#/$defs/base"}, {"required": [f"q{i}"]}]} for i in range(n)}
    return {"type": "object", "properties": each, "required": list(each), "$defs": {"base": base}}


OUT_OF_BOUNDS: list[tuple[Any, str]] = [
    ({"type": "string", "minLength": 10**9}, "'minLength' is 1000000000"),
    ({"type": "array", "items": {}, "minItems": 10**7}, "'minItems' is 10000000"),
    ({"type": "string", "pattern": "^[a]{1000000}$"}, "'pattern' repeats something 1000000 times"),
    (
        {"type": "string", "pattern": "^(a{2000}|b{1,2000}){9}$" + "c{2000}" * 5},
        "'pattern' .* takes too large a grammar",
    ),
    ({"type": "string", "minLength": -1}, "'minLength' is -1"),
    ({"type": "string", "minLength": "many"}, "'minLength' is many"),
    ({"type": "string", "minLength": 9, "maxLength": 3}, "'minLength' is 9 .* 'maxLength' only 3"),
    ({"type": "integer", "maximum": 2**64}, "'maximum' is 18446744073709551616"),
    ({"type": "integer", "minimum": -(10**30)}, "'minimum' is -1000"),
    ({"const": 10**9000}, "'const' is an integer of 29898 bits"),
    ({"enum": [[[{"a": 2**63}]]]}, "'enum' is 9223372036854775808"),
    ({"enum": ["x"] * (MAX_CHOICES + 1)}, "'enum' has 1001 entries"),
    ({"type": "object", "properties": {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}}, "'properties' has 101 names"),
    (nested(MAX_DEPTH + 1), "more than 64 levels deep, at 'items'"),
    (spread(100), "too large a grammar"),
    ({"const": "\udfff" * MAX_SCHEMA}, "larger than"),
]


@pytest.mark.parametrize(("of", "why"), OUT_OF_BOUNDS, ids=[why for _, why in OUT_OF_BOUNDS])
def test_a_schema_that_would_cost_too_much_is_refused_by_the_keyword_at_fault(of: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        grammar_of(schema(of, strict=True))


def test_references_that_lead_to_the_same_ones_again_and_again_cost_nothing() -> None:
    assert len(grammar_of(schema(chain(40)))) < MAX_GRAMMAR / 10


def test_an_integer_beyond_64_bits_is_refused_wherever_it_stands() -> None:
    for wanted in ({"type": "json_object", "x": {"y": [2**64]}}, {"type": "json_schema", "json_schema": [2**64]}):
        with pytest.raises(SchemaError, match="64 bits"):
            check(wanted)


@pytest.mark.parametrize(
    "of",
    [
        {"type": "string", "minLength": MAX_LEAST, "maxLength": 2**31},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**7},
        {"type": "string", "pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"},
        {"enum": [f"v{i}" for i in range(MAX_CHOICES)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(MAX_OPTIONAL)}},
        {"type": "object", "properties": {"minLength": {"type": "integer"}, "pattern": {"type": "string"}}},
        {"type": "string", "pattern": r"^\{1000000\}[{9999}]$"},
        nested(MAX_DEPTH - 4),
    ],
)
def test_what_people_ask_for_is_within_the_bounds(of: Any) -> None:
    assert len(grammar_of(schema(of))) < MAX_GRAMMAR


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d{4}-\d\d$", ["2026-11"], ["2026-1", "d-dd"]),
        (r"^[\w.-]+@[a-z]+\.(?:com|org)$", ["a.b-c@d.org"], ["a@bxcom", "@b.com"]),
        (r"^ab\.+c$", ["ab.c", "ab..c"], ["abab.c", "abxc"]),
        (r"^\S+\s\D$", ["x y"], ["x  y", "x 1"]),
        (r"^[^\d\]]\x41\u00e9$", ["xAé"], ["1Aé", "]Aé"]),
        (r"^\$\^\-\/.$", ["$^-/x"], ["$^-/"]),
        (r"^(?!a)", ["", "ba"], ["a", "ab"]),
        (r"x(?!y)", ["x", "xz", "xyx"], ["xy", "y"]),
        (r"^(?!a$)", ["", "ab"], ["a"]),
        (r"(?=.*a)b", ["ba", "cba"], ["b", "ab"]),
    ],
)
def test_a_pattern_means_in_the_grammar_what_it_means(pattern: str, good: list[str], bad: list[str]) -> None:
    language = of_value({"type": "string", "pattern": pattern})
    for text in good + bad:
        assert bool(re.search(pattern, text)) is language.allows(json.dumps(text, ensure_ascii=False)) is (text in good)


PARTS = ["a", "b", ".", "[ab]", "a*", "(?:ab|b)", "b{1,2}", "(?!a)", "(?=b)", "(?!a$)", "(?=.*b)", "^", "$", "|"]
SHORT = ["".join(signs) for n in range(5) for signs in itertools.product("abc", repeat=n)]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join))
@settings(max_examples=150, deadline=None)
def test_a_pattern_is_found_where_python_finds_it(pattern: str) -> None:
    texts = Texts()
    try:
        automaton = texts.automaton(pattern_of(texts, pattern))
    except PatternError:  # such as a ^ behind something
        return
    accepted = [text for text in SHORT if automaton.accepts(text)]
    found = [text for text in SHORT if re.search(pattern, text)]
    assert accepted == found or (pattern.count("$") > 1 and set(accepted) < set(found))


def test_no_class_of_a_pattern_ends_the_string_of_the_answer() -> None:
    for pattern in ("^.$", "^[^a]$", r"^\D$", r"^\W$", r"^\S$"):
        language = of_value({"type": "string", "pattern": pattern})
        for sign in '"\\\n\x00':
            assert not language.allows(f'"{sign}"')
    assert of_value({"type": "string", "pattern": r'^a"\\\n$'}).allows(json.dumps('a"\\\n'))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a\b$",
        r"^(a)\1$",
        r"^\p{L}$",
        "^a(?<=b)$",
        r"^\ud800$",
        "^(a(?=b))$",
        "a{2,1}",
        "(",
        "[a",
        "a)",
        "*",
        "a**",
        "[z-a]",
    ],
)
def test_what_no_grammar_can_say_of_a_pattern_is_refused_with_a_reason(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"'pattern' (has|names|repeats) "):
        grammar_of(schema({"type": "string", "pattern": pattern}, strict=True))


def test_a_schema_that_is_a_reference_finds_what_its_definitions_refer_to() -> None:
    node = {"type": "object", "properties": {"of": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#/$defs/node"}}}
    language = of_value({"$ref": "#/$defs/node", "$defs": {"node": node, "leaf": {"const": "x"}}})
    assert language.allows('{"of":"x","next":{"next":{"of":"x"}}}')
    assert not language.allows('{"next":{"of":"y"}}')


# --- what schemas of tools have -----------------------------------------------------------------------------------


def test_a_list_of_types_is_one_of_them_each_with_what_stands_beside_it() -> None:
    check_all({"type": ["string", "null"], "maxLength": 3}, ["abc", None, ""], ["abcd", 1])
    check_all({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b"])


def test_what_stands_beside_alternatives_holds_for_each() -> None:
    one = {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    check_all({"type": "object"} | one, [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{}, {"a": 2}, {"b": 1}])


def test_a_value_without_a_type_is_any_value() -> None:
    check_all({"description": "Whatever."}, [1, "a", None, [True], {"a": {"b": []}}], [])
    check_all({"type": "object", "required": ["y"]}, [{"y": 1}], [{}, {"x": 1}])


@pytest.mark.parametrize("required", [[], ["a"], ["a", "b"]])
def test_commas_stand_between_properties_with_a_name_and_without_one(required: list[str]) -> None:
    one = {"type": "integer"}
    of = {"type": "object", "properties": {"a": one, "b": one}, "required": required, "additionalProperties": one}
    allowed = Language(grammar_of(schema(of)))
    pairs = ['"a":1', '"b":1', '"x":1', '"y":1']
    for n in range(1 << len(pairs)):
        there = [pair for i, pair in enumerate(pairs) if n >> i & 1]
        assert allowed.allows("{" + ",".join(there) + "}") is all(f'"{name}":1' in there for name in required), there
        for i in range(1, len(there)):
            assert not allowed.allows("{" + "".join(there[:i]) + ",".join(there[i:]) + "}")


def test_a_reference_is_what_it_names_wherever_that_is() -> None:
    defs = {"a": {"string": {"const": 1}}, "b": {"string": {"const": 2}}}
    refs = {"p": {"$ref": "#/$defs/a/string"}, "q": {"allOf": [{"$ref": "#/$defs/b/string"}], "description": "Two."}}
    of = {"type": "object", "properties": refs, "required": ["p", "q"], "$defs": defs}
    check_all(of, [{"p": 1, "q": 2}], [{"p": 2, "q": 2}, {"p": 1, "q": 1}])


def test_a_text_in_json_has_no_line_feed_as_it_is() -> None:
    language = of_value({"type": "string"})
    assert not language.allows('"a\nb"')
    assert language.allows(r'"a\nb"')


@pytest.mark.parametrize("of", [{"enum": []}, {"anyOf": []}, {"type": ["string"], "enum": [1]}])
def test_a_schema_to_which_nothing_holds_is_refused(of: Any) -> None:
    with pytest.raises(GrammarError, match=r"[Nn]o answer could hold to"):
        grammar_of(schema(of))


def test_words_are_as_json_has_them_whatever_signs_they_have() -> None:
    check_all({"enum": ['a"b\\c', "日本\n", "a | b", '" "']}, ['a"b\\c', "日本\n", "a | b", '" "'], ["a", '"', "日本"])
