"""Formats whose calls are JSON objects: those of Hermes and Qwen, Llama 3 and Mistral, and a generic one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import NOTHING, SPACE, Either, Grammar, JsonValue, Literal, Node, calls, in_order, optional
from .reading import MarkedReader, NoCall, Steps
from .schemas import Property

_OTHERS = ("id", "type")
_ARGUMENTS = ("arguments", "parameters")  # Llama 3 says the latter


class ObjectReader(MarkedReader):
    """Reads `{"name": …, "arguments": {…}}`."""

    def call_object(self, *, may_lack_arguments: bool) -> Steps[None]:
        """Read an object that is a call, which begins as soon as the name and a brace behind it are there.

        Where the arguments come first, they are held back up to the name. Members that say no more are skipped.
        Raises NoCall.
        """
        name, held = "", ""
        yield from self.take("{")
        yield from self.space()
        begun = False
        while True:
            key = yield from self.json_string()
            yield from self.space()
            yield from self.take(":")
            yield from self.space()
            first = yield from self.peek()
            if key == "name" and not name:
                name = yield from self.json_string()
                if name not in self.tools:
                    raise NoCall
                if held:
                    self._whole(name, held)
                    begun = True
            elif key in _ARGUMENTS and first == "{" and not begun and not held:
                if name:
                    self.begin(name)
                    begun = True
                    yield from self.json_value(is_argument=True)
                    self.end()
                else:
                    held = yield from self.json_value(is_argument=False)
            elif begun or key in _OTHERS:
                yield from self.json_value(is_argument=False)
            else:
                raise NoCall
            yield from self.space()
            if (yield from self.try_take("}")):
                break
            yield from self.take(",")
            yield from self.space()
        if not begun:
            if not name or not may_lack_arguments:
                raise NoCall
            self._whole(name, "{}")
        self.keep()

    def _whole(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.argue(arguments)
        self.end()


def call_object(tools: Sequence[Tool], arguments: str = "arguments", tail: Node = NOTHING) -> Node:
    """Return what the object of a call may be; `tail` stands behind the arguments."""
    named = tuple(in_order(f'{tool.name}", "{arguments}": ', JsonValue(tool.parameters)) for tool in tools)
    return in_order('{"name": "', Either(named), tail, "}")  # what all have in common is read once, not once a tool


def json_or_python(each: Property) -> Node:
    """Return what the value of an argument may be where a model may as well write `True`."""
    words = [Literal(word) for word in each.python_words]
    return Either((JsonValue(each.schema), *words)) if words else JsonValue(each.schema)


def written(call: WrittenCall, arguments: str = "arguments") -> str:
    """Write a call as an object."""
    return f'{{"name": "{call.name}", "{arguments}": {as_json(call.arguments)}}}'


def as_json(value: Mapping[str, Any]) -> str:
    """Write JSON as templates do."""
    return json.dumps(value, ensure_ascii=False)


def listed(tools: Sequence[Tool]) -> str:
    """Tell a model of tools whose template does not."""
    shown = "\n".join(
        as_json({"name": tool.name, "description": tool.description, "parameters": tool.parameters}) for tool in tools
    )
    return f"You can call these functions, each with arguments by its JSON schema:\n{shown}"


def header(tools: Sequence[Tool]) -> str:
    """Return how the object of each call of these tools begins."""
    return f'{{"name": "{tools[0].name}", ' if len(tools) == 1 else '{"name": "'


# --- Hermes, Qwen 2.5 and 3 --------------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, each call in a pair of its own.

    Source: NousResearch/Hermes-Function-Calling, README.md.
    """

    name = "hermes"
    marks = (OPEN, CLOSE)
    opening = (OPEN,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{OPEN}\n{header(tools)}"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        call = in_order(OPEN, SPACE, call_object(tools), SPACE, CLOSE)
        return calls(call, parallel=parallel, between=SPACE)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _HermesReader(tools, self.opening)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(f"{OPEN}\n{written(call)}\n{CLOSE}" for call in calls)


class _HermesReader(ObjectReader):
    def _call(self) -> Steps[None]:
        yield from self.take(OPEN)
        yield from self.space()
        yield from self.call_object(may_lack_arguments=True)
        yield from self.close(CLOSE)


# --- Llama 3 -----------------------------------------------------------------------------------------------------

PYTHON_TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """`{"name": …, "parameters": {…}}` as the whole answer, perhaps behind `<|python_tag|>`.

    Source: the templates of meta-llama/Llama-3.1-8B-Instruct and Llama-3.2-3B-Instruct, which ask for this object.
    """

    name = "llama-3"
    marks = (PYTHON_TAG,)
    opening = (PYTHON_TAG,)
    opening_at_start = ('{"name": "',)

    def begin(self, tools: Sequence[Tool]) -> str:
        return header(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Its templates know one call a turn only."""
        return Grammar(in_order(optional(Literal(PYTHON_TAG)), call_object(tools, "parameters")))

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _Llama3Reader(tools, self.opening, ("{",))

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "; ".join(written(call, "parameters") for call in calls)


class _Llama3Reader(ObjectReader):
    def _call(self) -> Steps[None]:
        """Read one object, or several with semicolons between them, as Llama 3 writes them all the same."""
        while True:
            yield from self.try_take(PYTHON_TAG)
            yield from self.space()
            yield from self.call_object(may_lack_arguments=False)
            if not (yield from self.follows(";", "{", PYTHON_TAG)):
                return
            yield from self.try_take(";")
            yield from self.space()


# --- models whose template knows no tools -------------------------------------------------------------------------


class Generic(ToolFormat):
    """A JSON object for each call, and nothing else in the answer: for calls that are forced."""

    name = "generic"
    opening_at_start = ('{"name": "',)

    def begin(self, tools: Sequence[Tool]) -> str:
        return header(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        return calls(call_object(tools), parallel=parallel, between=in_order("\n"))

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _GenericReader(tools, (), ("{",))

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(map(written, calls))

    def instructions(self, tools: Sequence[Tool]) -> str:
        how = 'To call one, answer with nothing but {"name": <its name>, "arguments": <an object>}.'
        return f"{listed(tools)}\n\n{how}"


class _GenericReader(ObjectReader):
    def _call(self) -> Steps[None]:
        """Read objects, one on a line."""
        while True:
            yield from self.call_object(may_lack_arguments=False)
            if not (yield from self.follows("{")):
                return
