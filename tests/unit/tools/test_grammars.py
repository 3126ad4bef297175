"""What a grammar lets through is a call, and what a model writes as it was trained to is let through."""

from __future__ import annotations

import json
import random
from contextlib import closing
from typing import Any

import llama_cpp
import numpy as np
import pytest

from disco_daemon.engine.llama.grammar import grammar_of_calls
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.tools.format import Arguments, CallBegun, CallEnded, Tool, ToolFormat, WrittenCall
from disco_daemon.tools.formats import BY_NAME
from disco_daemon.tools.grammar import (
    Either,
    Grammar,
    InOrder,
    JsonValue,
    Literal,
    Node,
    OneOf,
    Repeated,
    RuleOf,
    Until,
    gbnf,
    in_order,
    members,
)
from disco_daemon.tools.references import Document
from tests.fixtures.tool_outputs import OUTPUTS, TOOLS, tool

FORMATS = [pytest.param(known, id=name) for name, known in BY_NAME.items()]
SEARCH = Tool(
    "search",
    "",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "kind": {"enum": ["web", "news"]},
            "limit": {"type": "integer"},
            "filters": {"type": "array", "items": {"$ref": "#/$defs/filter"}},
            "safe": {"type": ["boolean", "null"]},
            "place": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["query", "filters"],
        "$defs": {
            "filter": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
            "point": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
        },
    },
)


# --- the tree, drawn from at random -------------------------------------------------------------------------------

LETTERS = 'ab <>|"\\\n{}[](),:=1é🙂'


def referred(schema: Any, root: Any) -> Any:
    """What a reference in a document leads to."""
    document = Document(root)
    return document.find(schema["$ref"], document.base(schema))


class Drawing:
    """Draws a text that a grammar lets through."""

    def __init__(self, grammar: Grammar, seed: int) -> None:
        self.random, self.rules = random.Random(seed), grammar.rules
        self.text = self.of(grammar.root, 0)

    def of(self, node: Node, depth: int) -> str:
        match node:
            case Literal(text):
                return text
            case JsonValue(schema):
                return json.dumps(self.value(schema, schema), ensure_ascii=False)
            case Until(mark):
                drawn = "".join(self.random.choices([*LETTERS, *mark], k=self.random.randrange(12)))
                return (drawn + mark).split(mark)[0] + mark
            case OneOf(characters):
                return self.random.choice([c for c in " ab0" if self.is_in(c, characters)])
            case InOrder(parts):
                return "".join(self.of(part, depth + 1) for part in parts)
            case Either(parts):
                return self.of(parts[-1] if depth > 40 else self.random.choice(parts), depth + 1)
            case Repeated(part, least, most, between):
                more = 0 if depth > 40 else self.random.randrange(3)
                n = min(least + more, least + more if most is None else most)
                texts = [self.of(part, depth + 1) for _ in range(n)]
                return ("" if between is None else self.of(between, depth + 1)).join(texts)
            case RuleOf(name):
                return self.of(self.rules[name], depth + 1)

    @staticmethod
    def is_in(c: str, characters: str) -> bool:
        listed = characters[1:-1].replace("a-z", "ab").replace("0-9", "0").replace("A-Z", "")
        return (c in listed) is not listed.startswith("^")

    def value(self, schema: Any, root: Any) -> Any:
        """A value by the few keywords that this file's schemas have."""
        if "$ref" in schema:
            return self.value(referred(schema, root), root)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        if "anyOf" in schema:
            return self.value(self.random.choice(schema["anyOf"]), root)
        kind = schema.get("type", "object")
        match self.random.choice(kind) if isinstance(kind, list) else kind:
            case "string":
                return "".join(self.random.choices(LETTERS, k=self.random.randrange(6)))
            case "integer":
                return self.random.randrange(-9, 99)
            case "number":
                return self.random.choice([0, -1.5, 2e10])
            case "boolean":
                return self.random.random() < 0.5
            case "null":
                return None
            case "array":
                return [
                    self.value(schema.get("items", {"type": "integer"}), root) for _ in range(self.random.randrange(3))
                ]
        required = schema.get("required", ())
        return {
            key: self.value(inner, root)
            for key, inner in schema.get("properties", {}).items()
            if key in required or self.random.random() < 0.5
        }


def fits(value: Any, schema: Any, root: Any) -> bool:
    if "$ref" in schema:
        return fits(value, referred(schema, root), root)
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, option, root) for option in schema["anyOf"])
    kinds = schema.get("type")
    if kinds is None:
        return True
    if isinstance(kinds, list):
        return any(fits(value, {**schema, "type": kind}, root) for kind in kinds)
    match value:
        case bool():
            return bool(kinds == "boolean")
        case int() | float():
            return kinds == "number" or (kinds == "integer" and isinstance(value, int))
        case str() | None:
            return bool(kinds == ("null" if value is None else "string"))
        case list():
            return kinds == "array" and all(fits(item, schema.get("items", {}), root) for item in value)
    known = schema.get("properties", {})
    return (
        kinds == "object"
        and all(key in value for key in schema.get("required", ()))
        and all(fits(inner, known[key], root) for key, inner in value.items() if key in known)
    )


@pytest.mark.parametrize("known", FORMATS)
def test_whatever_a_grammar_lets_through_is_calls_by_their_schemas(known: ToolFormat) -> None:
    tools = (SEARCH, *TOOLS)
    schemas = {each.name: each.parameters for each in tools}
    for seed in range(150):
        parallel = seed % 2 == 0
        drawing = Drawing(known.grammar(tools, parallel=parallel), seed)
        parser = known.parser(tools)
        events = [*parser.push(drawing.text), *parser.finish()]
        names = [e.name for e in events if isinstance(e, CallBegun)]
        assert names, drawing.text
        assert parallel or len(names) == 1
        for index, name in enumerate(names):
            said = "".join(e.text for e in events if isinstance(e, Arguments) and e.index == index)
            assert CallEnded(index) in events, drawing.text
            assert fits(json.loads(said), schemas[name], schemas[name]), (drawing.text, said)
        assert all(isinstance(e, CallBegun | Arguments | CallEnded) for e in events), drawing.text


# --- in llama.cpp ------------------------------------------------------------------------------------------------


def written(grammar: Grammar) -> str:
    """The text of a grammar with the rules of its schemas."""
    return grammar_of_calls(grammar)


class Matcher:
    """Asks llama.cpp whether its grammar goes on with a text."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocabulary.handle, grammar.encode(), b"root")
        assert self._sampler, grammar

    def matches(self, text: str) -> bool:
        """Whether the grammar lets a whole text through, and an end behind it."""
        llama_cpp.llama_sampler_reset(self._sampler)
        for token in self._vocabulary.tokenize(text, parse_special=False):
            if not self._allows(token):
                return False
            llama_cpp.llama_sampler_accept(self._sampler, token)
        return self._allows(llama_cpp.llama_vocab_eos(self._vocabulary.handle))

    def _allows(self, token: int) -> bool:
        data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
        array = llama_cpp.llama_token_data_array(data, 1, -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, llama_cpp.ctypes.byref(array))
        return bool(np.isfinite(data[0].logit))

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)


@pytest.mark.parametrize("known", FORMATS)
def test_llama_cpp_lets_through_what_models_write(known: ToolFormat, vocabulary: Vocabulary) -> None:
    outputs = [o for o in OUTPUTS if o.format == known.name and o.calls and not o.text and not o.thought]
    with closing(Matcher(vocabulary, written(known.grammar(TOOLS, parallel=True)))) as matcher:
        assert [o.written for o in outputs if matcher.matches(o.written) is o.is_odd] == []
        assert not any(matcher.matches(f"{o.written}!") for o in outputs)
        launched = known.write([WrittenCall("launch", {})])
        assert not matcher.matches(launched), "a tool that was not given"


@pytest.mark.parametrize("known", FORMATS)
def test_one_call_is_one_call(known: ToolFormat, vocabulary: Vocabulary) -> None:
    one, two = (WrittenCall("get_time", {"city": "Zürich"}), WrittenCall("get_weather", {"city": "Bern"}))
    with closing(Matcher(vocabulary, written(known.grammar(TOOLS, parallel=False)))) as matcher:
        assert matcher.matches(known.write([one]))
        assert not matcher.matches(known.write([one, two]))
        assert not matcher.matches(known.write([WrittenCall("get_time", {})])), "an argument that is required"


@pytest.mark.parametrize("known", FORMATS)
def test_a_forced_call_may_be_begun_for_the_model(known: ToolFormat) -> None:
    called = known.write([WrittenCall("get_time", {"city": "Bern"})])
    assert called.startswith(known.begin(TOOLS))
    named = known.begin([each for each in TOOLS if each.name == "get_time"])
    assert called.startswith(named)
    assert "get_time" in named


def test_a_text_up_to_a_mark_has_the_mark_at_its_end_only(vocabulary: Vocabulary) -> None:
    with closing(Matcher(vocabulary, written(Grammar(in_order("<", Until("\n</p>"), "!"))))) as matcher:
        for text in ("", "\n", "\n\n<", "</p>", "\n</\n</p", "a\n<b>\n</q>", "é🙂"):
            assert matcher.matches(f"<{text}\n</p>!"), text
        for text in ("", "\n</p>!", "\n</p>\n</p>", "\n</p"):
            assert not matcher.matches(f"<{text}!"), text


def test_members_keep_their_order_and_may_be_left_out(vocabulary: Vocabulary) -> None:
    rules: dict[str, Node] = {}
    parts: list[tuple[Node, bool]] = [(Literal("a"), True), (Literal("b"), False), (Literal("c"), True)]
    root = in_order("(", members(parts, rules, "m", ","), ")")
    with closing(Matcher(vocabulary, written(Grammar(root, rules)))) as matcher:
        good = {"(a,b,c)", "(b,c)", "(a,b)", "(b)"}
        bad = {"()", "(a)", "(a,c)", "(b,a)", "(a,b,)", "(,b)", "(ab)", "(c)"}
        assert {text for text in good | bad if matcher.matches(text)} == good


def test_a_tool_with_every_kind_of_argument_has_a_grammar_in_each_format(vocabulary: Vocabulary) -> None:
    odd = tool("odd", (), **{"with-dash": "string", "none": {}, "é": "integer", "const": {"const": 1}})
    twice = [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": "x", "maxItems": 10**9}]
    many = {f"p{i}": {"anyOf": twice} for i in range(12)} | {
        "none": {"$ref": "#/nowhere"},
        "nul\0": {},
        "e": {"enum": ["\0"]},
    }
    looped = Tool("looped", "", {"type": "object", "properties": many})
    for known in BY_NAME.values():
        tools = (odd,) if known.name not in ("gemma", "function-gemma", "qwen3-coder") else (odd, looped)
        Matcher(vocabulary, grammar_of_calls(known.grammar(tools, parallel=True), lenient=len(tools) > 1)).close()


def test_no_tools_have_no_grammar() -> None:
    for known in BY_NAME.values():
        with pytest.raises(ValueError, match="nothing to choose from"):
            gbnf(known.grammar((), parallel=True), lambda schema, name: name)
