"""Gemma 4's format: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`, and its thoughts. Pure.

FunctionGemma's is the same with other marks, and has no thoughts.

Source: Google's ai.google.dev/gemma/docs/core/prompt-formatting-gemma4; the template of google/gemma-4-31B-it; for
FunctionGemma ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import (
    Either,
    Grammar,
    JsonValue,
    Literal,
    Node,
    OneOf,
    Repeated,
    RuleOf,
    Until,
    calls,
    in_order,
    members,
)
from .reading import MarkedReader, NoCall, Steps, quoted
from .references import Document
from .schemas import resolved


@dataclass(frozen=True, slots=True)
class Spelling:
    """What marks the parts of calls."""

    opening: str
    closing: str
    response: str  # ends a turn with calls: the result is to come behind it
    quote: str  # around a text


GEMMA_4 = Spelling("<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>')
FUNCTION_GEMMA = Spelling("<start_function_call>", "<end_function_call>", "<start_function_response>", "<escape>")
CHANNEL, END_CHANNEL = "<|channel>", "<channel|>"
THOUGHT = "thought"
MAX_DEPTH = 64  # of lists and objects in an answer
MAX_SCHEMA_DEPTH = 64  # of a tool; from there on any value is let through
MAX_ITEMS = 2000  # of a list that a grammar counts, as llama.cpp's MAX_REPETITION_THRESHOLD
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class Gemma(ToolFormat):
    """Keys without quotes, texts between marks such as `<|"|>`, all else as in JSON."""

    def __init__(self, name: str = "gemma", spelling: Spelling = GEMMA_4) -> None:
        self.name, self._spelling = name, spelling
        self._channels = (CHANNEL, END_CHANNEL) if spelling is GEMMA_4 else ()
        self.marks = (spelling.opening, spelling.closing, spelling.response, spelling.quote, *self._channels)
        self.opening = (spelling.opening,)

    def begin(self, tools: Sequence[Tool]) -> str:
        head = f"{self._spelling.opening}call:"
        return f"{head}{tools[0].name}{{" if len(tools) == 1 else head

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Arguments stand in their schema's order. Of a text only `enum` and `const` are held, no pattern or length."""
        spelling = self._spelling
        rules = _any_value(spelling.quote)
        named = [
            in_order(tool.name, _Schemas(tool.parameters, rules, f"args-{n}", spelling.quote).arguments())
            for n, tool in enumerate(tools)
        ]
        one = calls(in_order(f"{spelling.opening}call:", Either(tuple(named)), spelling.closing), parallel=parallel)
        return Grammar(one.root, {**rules, **one.rules})

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _GemmaReader(tools, (self._spelling.opening, *self._channels), self._spelling)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        it = self._spelling
        return "".join(
            f"{it.opening}call:{call.name}{_written(call.arguments, it.quote)}{it.closing}" for call in calls
        )


def _written(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(inner, quote)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_written(inner, quote) for inner in value)}]"
    return json.dumps(value)


# --- the grammar of values ---------------------------------------------------------------------------------------

_KEY = in_order(OneOf('[^:},{<" \\n]'), Repeated(OneOf("[^:},{<\\n]"), 0, None))
_COMMA = Literal(",")


def _any_value(quote: str) -> dict[str, Node]:
    """Return the rules for values of which nothing is known."""
    value = RuleOf("any")
    entry = in_order(_KEY, ":", value)
    scalars = (JsonValue({"type": kind}) for kind in ("number", "boolean", "null"))
    return {
        "any": Either((in_order(quote, Until(quote)), RuleOf("any-object"), RuleOf("any-list"), *scalars)),
        "any-object": in_order("{", Repeated(entry, 0, None, _COMMA), "}"),
        "any-list": in_order("[", Repeated(value, 0, None, _COMMA), "]"),
    }


class _Schemas:
    """Turns the schemas of one tool into what Gemma writes for their values.

    What holds other values gets a rule, once for each place in the tool's schema: one that refers to itself has an end.
    """

    def __init__(self, root: Mapping[str, Any], rules: dict[str, Node], name: str, quote: str) -> None:
        self._root, self._rules, self._name, self._quote = Document(root), rules, name, quote
        self._known: dict[int, RuleOf] = {}  # by the id of a part of `root`
        self._n_members = 0

    def arguments(self) -> Node:
        """Return what may stand for the arguments of a call."""
        root = self._root.root
        schema = resolved(root, self._root) if isinstance(root, Mapping) else {}
        if not schema.get("properties") and not schema.get("additionalProperties"):
            return Literal("{}")
        return self._object(schema, 0)

    def _value(self, schema: object, depth: int) -> Node:
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            return _ANY
        schema = resolved(schema, self._root)
        if not _PARTS & schema.keys():
            return self._of_kinds(schema, depth)
        if (known := self._known.get(id(schema))) is None:
            known = self._known[id(schema)] = RuleOf(f"{self._name}-{len(self._known)}")
            self._rules[known.name] = self._of_kinds(schema, depth)
        return known

    def _of_kinds(self, schema: Mapping[str, Any], depth: int) -> Node:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = [_written(value, self._quote) for value in values]
            if "\0" not in "".join(texts):
                return Either(tuple(map(Literal, texts)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            options = schema.get(keyword)
            if isinstance(options, list) and options and (keyword != "allOf" or len(options) == 1):
                return Either(tuple(self._value(option, depth + 1) for option in options))
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list) and kind:
            return Either(tuple(self._of_kind(schema, one, depth) for one in kind))
        return self._of_kind(schema, kind, depth)

    def _of_kind(self, schema: Mapping[str, Any], kind: object, depth: int) -> Node:
        match kind:
            case "string":
                return in_order(self._quote, Until(self._quote))
            case "integer" | "number" | "boolean" | "null":
                return JsonValue({"type": kind, **{key: schema[key] for key in _BOUNDS if key in schema}})
            case "array":
                return self._list(schema, depth)
            case "object":
                return self._object(schema, depth)
        return _ANY

    def _list(self, schema: Mapping[str, Any], depth: int) -> Node:
        least = _count(schema.get("minItems")) or 0
        most = _count(schema.get("maxItems"))
        if most == 0:
            return Literal("[]")
        item = self._value(schema.get("items"), depth + 1)
        return in_order("[", Repeated(item, least, most if most is None or most >= least else least, _COMMA), "]")

    def _object(self, schema: Mapping[str, Any], depth: int) -> Node:
        listed, required = schema.get("properties"), schema.get("required", ())
        if not isinstance(listed, Mapping) or not listed:
            return RuleOf("any-object")
        parts: list[tuple[Node, bool]] = [
            (in_order(f"{key}:", self._value(inner, depth + 1)), key not in required)
            for key, inner in listed.items()
            if "\0" not in key
        ]
        self._n_members += 1
        return in_order("{", members(parts, self._rules, f"{self._name}-members-{self._n_members}", ","), "}")


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_ITEMS else None


_ANY = RuleOf("any")
_PARTS = frozenset({"properties", "items", "anyOf", "oneOf", "allOf"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


# --- the parser --------------------------------------------------------------------------------------------------


class _GemmaReader(MarkedReader):
    def __init__(self, tools: Sequence[Tool], marks: Sequence[str], spelling: Spelling) -> None:
        super().__init__(tools, marks)
        self._spelling = spelling

    def _call(self) -> Steps[None]:
        """Read a call, a thought, or the end of one that has none, as Gemma writes it now and then."""
        if (yield from self.try_take(END_CHANNEL)):
            self.keep()
        elif (yield from self.try_take(CHANNEL)):
            yield from self._thought()
        else:
            yield from self.take(f"{self._spelling.opening}call:")
            yield from self._named_call()

    def _thought(self) -> Steps[None]:
        while (yield from self.try_take(CHANNEL)):
            pass
        yield from self.take(THOUGHT)
        yield from self.try_take("\n")
        self._kept = None
        yield from self._until(self._thought_read, END_CHANNEL)
        self.keep()

    def _named_call(self) -> Steps[None]:
        name = yield from self.word("A-Za-z0-9_.-")
        if name not in self.tools or (yield from self.peek()) != "{":
            raise NoCall
        self.begin(name)
        yield from self._items(0)
        self.end()
        if (yield from self.close(self._spelling.closing)):
            yield from self.close(self._spelling.response)

    def _value(self, depth: int) -> Steps[None]:
        """Read a value, and say it as JSON. Raises NoCall."""
        c = yield from self.peek()
        if depth > MAX_DEPTH:
            raise NoCall
        if c in "{[":
            yield from self._items(depth)
        elif (yield from self.try_take(self._spelling.quote)):
            yield from self._string()
        else:
            word = (yield from self.word(r"^,\]}")).strip()
            if not word:
                raise NoCall
            self.argue(word if _SCALAR.fullmatch(word) else f'"{quoted(word)}"')

    def _string(self) -> Steps[None]:
        self.argue('"')
        if not (yield from self._until(self._string_read, self._spelling.quote)):
            raise NoCall
        self.argue('"')

    def _items(self, depth: int) -> Steps[None]:
        """Read an object or a list."""
        is_object = (yield from self.peek()) == "{"
        close = "}" if is_object else "]"
        self._at += 1
        self.argue("{" if is_object else "[")
        said = ""
        while True:
            yield from self.space()
            if (yield from self.try_take(close)):
                break
            self.argue(said)
            said = ", "
            if is_object:
                yield from self._key()
            yield from self._value(depth + 1)
            yield from self.space()
            if (yield from self.peek()) != close:
                yield from self.take(",")
        self.argue(close)

    def _key(self) -> Steps[None]:
        if (yield from self.try_take(self._spelling.quote)):
            yield from self._string()
            yield from self.space()
        else:
            key = (yield from self.word("^:},")).strip()
            if not key:
                raise NoCall
            self.argue(f'"{quoted(key)}"')
        yield from self.take(":")
        self.argue(": ")
        yield from self.space()
