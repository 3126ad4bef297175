"""The format of Qwen3-Coder, and of Qwen3.5 and Nemotron 3 after it: calls as XML, a tag for each argument. Pure.

Source: the template of Qwen/Qwen3-Coder-30B-A3B-Instruct, and its qwen3coder_tool_parser.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import SPACE, Either, Grammar, InOrder, Literal, Node, Until, calls, in_order, optional
from .json_calls import CLOSE, OPEN, as_json, json_or_python
from .reading import MarkedReader, NoCall, Steps, quoted
from .schemas import TYPES, Property, properties, type_of

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_BEHIND = (PARAMETER, END_FUNCTION, CLOSE)  # tags, an argument's closing one
_WORDS = {"True": "true", "False": "false", "None": "null"}  # the template writes values of a history as Python does


class QwenCoder(ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, a line for each tag."""

    name = "qwen3-coder"
    marks = (OPEN, CLOSE)
    opening = (OPEN,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{OPEN}\n{FUNCTION}{tools[0].name}>\n" if len(tools) == 1 else f"{OPEN}\n{FUNCTION}"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Arguments stand in their schema's order; those that may be texts are any text."""
        named: list[Node] = []
        for tool in tools:
            parts = [
                part if each.is_required else optional(part)
                for each in properties(tool.parameters)
                for part in [in_order(f"{PARAMETER}{each.name}>\n", _value(each), "\n")]
            ]
            named.append(in_order(f"{tool.name}>\n", InOrder(tuple(parts)), f"{END_FUNCTION}\n"))
        call = in_order(OPEN, SPACE, FUNCTION, Either(tuple(named)), CLOSE)
        return calls(call, parallel=parallel, between=SPACE)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _QwenCoderReader(tools, (OPEN, FUNCTION))

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(map(_written, calls))


def _value(each: Property) -> Node:
    """Return what stands between the tags of an argument, and the closing one."""
    values = each.found.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) and "\0" not in value for value in values):
        return in_order(Either(tuple(Literal(value) for value in values)), f"\n{END_PARAMETER}")
    if "string" in each.types:
        return Until(f"\n{END_PARAMETER}")
    return in_order(json_or_python(each), f"\n{END_PARAMETER}")


def _written(call: WrittenCall) -> str:
    shown = "".join(
        f"{PARAMETER}{key}>\n{value if isinstance(value, str) else as_json(value)}\n{END_PARAMETER}\n"
        for key, value in call.arguments.items()
    )
    return f"{OPEN}\n{FUNCTION}{call.name}>\n{shown}{END_FUNCTION}\n{CLOSE}"


class _QwenCoderReader(MarkedReader):
    _collected = ""  # of an argument that is said when it is whole

    def _call(self) -> Steps[None]:
        """Read the functions of one pair of tags, whose opening one these models leave out now and then."""
        yield from self.try_take(OPEN)
        yield from self.space()
        while True:
            yield from self._function()
            if not (yield from self.follows(FUNCTION)):
                break
        yield from self.close(CLOSE)

    def _function(self) -> Steps[None]:
        yield from self.take(FUNCTION)
        name = yield from self.word("A-Za-z0-9_.-")
        if name not in self.tools:
            raise NoCall
        yield from self.take(">")
        kinds = {each.name: each.types for each in properties(self.tools[name].parameters)}
        self.begin(name)
        self.argue("{")
        said = ""
        while (yield from self.follows(PARAMETER)):
            yield from self.take(PARAMETER)
            key = yield from self.until(">")
            self.argue(f'{said}"{quoted(key)}": ')
            said = ", "
            yield from self._argument(kinds.get(key, TYPES))
        if not (yield from self.follows(END_FUNCTION, CLOSE)):
            raise NoCall
        yield from self.try_take(END_FUNCTION)
        self.argue("}")
        self.end()

    def _argument(self, kinds: frozenset[str]) -> Steps[None]:
        """Read an argument: a text as it arrives, all else when it is whole."""
        yield from self.try_take("\n")
        if kinds == {"string"}:
            self.argue('"')
            yield from self._text_of_argument(self._string_read)
            self.argue('"')
        else:
            self._collected = ""
            yield from self._text_of_argument(self._collect)
            self.argue(_as_json(self._collected, kinds))

    def _text_of_argument(self, passes: Callable[[int], None]) -> Steps[None]:
        """Read text up to the closing tag, which is one only if another tag follows, and over it. Raises NoCall."""
        while mark := (yield from self._until(passes, f"\n{END_PARAMETER}", END_PARAMETER)):
            if (yield from self._tag_follows()):
                return
            self._at -= len(mark)
            passes(self._at + len(mark))
        raise NoCall

    def _tag_follows(self) -> Steps[bool]:
        while True:
            rest = self._text[self._at :].lstrip()
            if any(rest.startswith(tag) for tag in _BEHIND):
                return True
            may_follow = any(tag.startswith(rest) for tag in _BEHIND)
            if self._has_ended or not may_follow:
                return may_follow
            yield

    def _collect(self, to: int) -> None:
        self._collected += self._text[self._at : to]
        self._at = to


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value that stands without quotes: a text if it is nothing else that the schema allows."""
    said = text.strip()
    said = _WORDS.get(said, said)
    try:
        kind = type_of(json.loads(said, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kind = "string"
    if kind == "string" or not ({kind, "number" if kind == "integer" else kind} & kinds or "string" not in kinds):
        return f'"{quoted(text)}"'
    return said


def _refuse(constant: str) -> None:
    raise ValueError(constant)
