"""A schema that contains itself is bounded: every answer ends, and is one by the schema."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine.tool_schemas import TOOLS, problems
from disco_daemon.engine import wire
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.json_schema.rules import rules_of
from disco_daemon.engine.llama.ambiguity import noted, readings
from disco_daemon.engine.llama.grammar import grammar_of, grammar_of_calls
from disco_daemon.engine.llama.recursion import LEAST_LEVELS, LEVELS, MAX_WRITTEN, bounded
from disco_daemon.engine.llama.sampler import Sampler
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.tools.format import tools_of
from disco_daemon.tools.formats import BY_NAME
from tests.fixtures.gbnf import Language
from tests.unit.engine.test_grammar import schema
from tests.unit.engine.test_readings import FULL, LIST, held

NODE = {"$ref": "#/$defs/node"}
FILTER = next(tool for tool in TOOLS if tool["function"]["name"] == "filter_records")


def strict(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def of(node: Any, **more: Any) -> dict[str, Any]:
    """A schema of an object with one node."""
    return strict(n=NODE) | {"$defs": {"node": node} | more}


def plain(of_what: Any) -> str:
    """The grammar of a schema as it is written, without a bound."""
    return "\n".join(f"{name} ::= {body}" for name, body in rules_of(of_what)[0].items())


def opened(text: str) -> int:
    """How many brackets are open at once in a JSON text whose strings have none."""
    depth = most = 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        most = max(most, depth)
    return most


LINKED = of(strict(value={"type": "integer"}, next={"anyOf": [NODE, {"type": "null"}]}))
TREE = of(strict(name={"const": "x"}, children={"type": "array", "items": NODE}))


def chained(n: int) -> str:
    """A linked list of `n` nodes."""
    return '{"n": ' + '{"value": 1, "next": ' * n + "null" + "}" * (n + 1)


def tree(n: int) -> str:
    """A tree of `n` nodes, one within the other."""
    return '{"n": ' + '{"name": "x", "children": [' * n + "]}" * n + "}"


# --- schemas at random --------------------------------------------------------------------------------------------

REFS = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in "abc"] + [{"$ref": "#"}])
SCALARS = st.sampled_from([
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}, {"type": "null"}, {"const": "k"},
    {"enum": ["u", "v", 1]}, {"type": "string", "maxLength": 2},
])  # fmt: skip


def opening(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects and lists of others."""
    named = st.dictionaries(st.sampled_from("pqrs"), inner, max_size=3)
    objects = st.builds(
        lambda properties, required, rest: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": rest,
        },
        named, st.sets(st.sampled_from("pqrs")), st.just(False) | st.just(False) | inner,
    )  # fmt: skip
    lists = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.sampled_from([0, 0, 1]), st.integers(1, 2),
    )  # fmt: skip
    return objects | objects | lists | st.builds(lambda items: {"type": "array", "items": items}, inner)


def either(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3))


def holders(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return opening(inner) | opening(inner) | either(inner)


# A definition that is itself without a bracket between, llama.cpp refuses.
INNER = st.recursive(REFS | REFS | SCALARS, holders, max_leaves=3)
DEFINITIONS = opening(INNER) | either(opening(INNER) | SCALARS)
SCHEMAS = st.builds(
    lambda node, defs: strict(n=node) | {"$defs": defs},
    REFS | DEFINITIONS, st.fixed_dictionaries(dict.fromkeys("abc", DEFINITIONS)),
)  # fmt: skip


@given(SCHEMAS, st.integers(2, 5), st.integers(0, 1000))
@settings(max_examples=200)
def test_whatever_a_bounded_grammar_allows_is_valid_and_whatever_nests_less_is_allowed(
    made: dict[str, Any], levels: int, seed: int
) -> None:
    try:
        grammar = plain(made)
    except GrammarError:
        return  # endless
    whole, bound = Language(grammar), Language(bounded(grammar, levels))
    assert not bound.missing()
    if not whole.can_end():
        return
    assert bound.can_end()
    for draw in range(seed, seed + 3):
        text = bound.draw(draw)
        assert not list(problems(json.loads(text), made, made)), text
        assert whole.allows(text)
        free = whole.draw(draw)
        assert opened(free) > levels or bound.allows(free), free


@given(SCHEMAS, st.integers(2, 5), st.integers(0, 1000))
@settings(max_examples=100)
def test_a_bounded_grammar_has_no_more_readings_than_the_one_it_is_made_of(
    made: dict[str, Any], levels: int, seed: int
) -> None:
    try:
        grammar = plain(made)
    except GrammarError:
        return  # endless
    whole, bound = Language(grammar), Language(bounded(grammar, levels))
    if not whole.can_end():
        return
    text = bound.draw(seed)
    pairs = zip(bound.open_readings(text), whole.open_readings(text), strict=True)
    assert all(n <= most for n, most in pairs)


# --- schemas of people --------------------------------------------------------------------------------------------

WHOLE = {"type": "object", "properties": {"name": {"type": "null"}, "of": {"type": "array", "items": {"$ref": "#"}}}}
MUTUAL = of(
    strict(kids={"type": "array", "items": {"$ref": "#/$defs/kid"}}),
    kid={"anyOf": [strict(deep=NODE), strict(leaf={"type": "boolean"})]},
)
ENDING = [
    LINKED, TREE, WHOLE, MUTUAL, FILTER["function"]["parameters"], {"type": "object"}, held(*[LIST] * 3),
    {"$ref": "#/$defs/node", "$defs": TREE["$defs"]}, {"type": "array", "items": {"$ref": "#"}},
    of({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": NODE}),
    of({"anyOf": [{"type": "string"}, {"type": "array", "items": NODE, "minItems": 1}]}),
    of({"type": "object", "properties": {f"p{i}": NODE for i in range(12)}}),
    {"type": "object", "properties": {"a--1": {"type": "array", "items": {"$ref": "#"}}, "a": {"$ref": "#"}}},
]  # fmt: skip


@pytest.mark.parametrize("made", ENDING, ids=range(len(ENDING)))
def test_an_answer_by_a_schema_that_contains_itself_ends(made: dict[str, Any]) -> None:
    assert Language(plain(made)).nesting()
    assert not Language(grammar_of(schema(made))).nesting()


def test_any_json_ends() -> None:
    assert not Language(grammar_of({"type": "json_object"})).nesting()


def test_lists_and_trees_have_as_many_levels_as_is_said() -> None:
    for made, written in ((LINKED, chained), (TREE, tree)):
        bound = Language(grammar_of(schema(made)))
        assert bound.allows(written(LEVELS))
        assert not bound.allows(written(LEVELS + 1))
        assert Language(plain(made)).allows(written(LEVELS + 1))
    lists = Language(grammar_of(schema(of({"type": "array", "items": NODE}))))
    assert lists.allows('{"n": ' + "[" * LEVELS + "]" * LEVELS + "}")
    assert not lists.allows('{"n": ' + "[" * (LEVELS + 1) + "]" * (LEVELS + 1) + "}")


def test_at_the_last_level_what_may_be_left_out_is_left_out() -> None:
    bound = Language(bounded(plain(WHOLE), 3))
    assert bound.allows('{"of": [{"name": null, "of": [{"name": null, "of": []}, {"name": null}, {}]}]}')
    assert not bound.allows('{"of": [{"of": [{"of": [{}]}]}]}')
    tuples = of({"anyOf": [{"type": "array", "items": NODE, "minItems": 2, "maxItems": 3}, {"const": 1}]})
    bound = Language(bounded(plain(tuples), 2))
    assert bound.allows('{"n": [1, [1, 1], 1]}')
    assert not bound.allows('{"n": [1, [[1, 1], 1]]}')


ENDLESS = [
    held(FULL),
    of(strict(n=NODE)),
    of({"anyOf": [strict(a=NODE), {"type": "array", "items": NODE, "minItems": 1}]}),
]


@pytest.mark.parametrize("made", ENDLESS, ids=range(len(ENDLESS)))
def test_a_schema_that_asks_for_endless_nesting_is_refused(made: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="nested without an end"):
        grammar_of(schema(made))


def test_what_nests_for_ever_is_left_out_where_it_may_be() -> None:
    made = of(
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}, "c": NODE}}, b=strict(b={"$ref": "#/$defs/b"})
    )
    made["$defs"]["b"]["properties"]["back"] = NODE
    bound = Language(grammar_of(schema(made)))
    assert bound.allows('{"n": {"c": {}}}')
    assert not bound.nesting()


# --- what it costs ------------------------------------------------------------------------------------------------


def crowd(n: int, *, n_circles: int = 1) -> dict[str, Any]:
    """Definitions that have `n` properties each, all of which may be the same again."""
    refs = [{"$ref": f"#/$defs/node{i}"} for i in range(n_circles)]
    nodes = [{"type": "object", "properties": {f"p{j}": ref for j in range(n)}} for ref in refs]
    return strict(**{f"n{i}": ref for i, ref in enumerate(refs)}) | {
        "$defs": {f"node{i}": node for i, node in enumerate(nodes)}
    }


def levels_of(made: dict[str, Any]) -> int:
    """How many levels a grammar allows of the first property's node."""
    bound = Language(bounded(plain(made)))
    first = next(iter(made["$defs"].values()))
    key = next(iter(first["properties"]))
    rest = "".join(f', "n{i}": {{}}' for i in range(1, len(made["properties"])))
    n = 0
    while n <= LEVELS and bound.allows('{"n0": ' + f'{{"{key}": ' * n + "{}" + "}" * n + rest + "}"):
        n += 1
    return n


def test_a_large_schema_has_fewer_levels_and_too_large_a_one_no_bound() -> None:
    assert levels_of(crowd(3)) == LEVELS
    assert LEAST_LEVELS <= levels_of(crowd(80)) < LEVELS
    some = Language(bounded(plain(crowd(60, n_circles=8)))).nesting()
    assert 0 < len(some) < 8, "as many as there is room for"


@pytest.mark.parametrize("made", [crowd(100), crowd(2, n_circles=300), crowd(40, n_circles=40)], ids=["1", "300", "40"])
def test_a_bounded_grammar_is_not_much_larger(made: dict[str, Any]) -> None:
    grammar = plain(made)
    bound = bounded(grammar)
    assert len(bound) <= len(grammar) + MAX_WRITTEN
    assert len(bound) > len(grammar)


def test_a_bound_takes_milliseconds() -> None:
    for made, bound_s in ((FILTER["function"]["parameters"], 0.01), (crowd(100), 0.1)):
        grammar, times = plain(made), []
        for _ in range(3):  # a busy machine may make one of them slow
            began = time.thread_time()
            bounded.__wrapped__(grammar)
            times.append(time.thread_time() - began)
        assert min(times) < bound_s


def test_the_readings_of_a_bounded_grammar_are_those_of_the_one_it_is_made_of() -> None:
    several = held({"type": "null"}, *[LIST | {"maxItems": 50 + i} for i in range(3)])
    grammar = grammar_of(schema(several))
    assert readings(grammar) == readings(plain(several)) > 1
    feigned = grammar_of({"type": "choice", "choice": ["a # readings: 7", "b # readings: 7"]})
    assert readings(feigned) < 7
    assert readings(noted(feigned, 7)) == 7


# --- in all formats, and in llama.cpp -----------------------------------------------------------------------------


def understood(vocabulary: Vocabulary, grammar: str) -> None:
    """Have llama.cpp read a grammar, once it is known to have all its rules."""
    assert not Language(grammar).missing()
    Sampler(wire.Generate(id="r", messages=[]), vocabulary.n_tokens, vocab=vocabulary.handle, grammar=grammar).close()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_calls_end_in_each_format_and_llama_cpp_understands_them(vocabulary: Vocabulary, name: str) -> None:
    free = {"type": "function", "function": {"name": "free", "parameters": {"type": "object", "properties": {"x": {}}}}}
    linked = {"type": "function", "function": {"name": "linked", "parameters": LINKED}}
    grammar = grammar_of_calls(BY_NAME[name].grammar(tools_of([FILTER, free, linked]), parallel=True), lenient=True)
    understood(vocabulary, grammar)
    assert not Language(grammar).nesting()


@pytest.mark.parametrize("made", ENDING, ids=range(len(ENDING)))
def test_llama_cpp_understands_a_bounded_grammar(vocabulary: Vocabulary, made: dict[str, Any]) -> None:
    understood(vocabulary, grammar_of(schema(made)))


@given(SCHEMAS, st.integers(1, 8))
@settings(max_examples=100)
def test_llama_cpp_understands_whatever_schemas_hold_each_other(
    vocabulary: Vocabulary, made: dict[str, Any], levels: int
) -> None:
    try:
        grammar = plain(made)
    except GrammarError:
        return  # endless
    understood(vocabulary, grammar)
    understood(vocabulary, bounded(grammar, levels))
