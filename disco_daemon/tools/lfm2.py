"""LFM2's format: calls as Python writes them, `<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>`. Pure.

Source: the model cards of LiquidAI/LFM2-8B-A1B and LiquidAI/LFM2.5-1.2B-Instruct, "Tool use".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import SPACE, Either, Grammar, Literal, Node, calls, in_order, members
from .json_calls import json_or_python
from .reading import MarkedReader, NoCall, Steps, quoted
from .schemas import properties

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
MAX_DEPTH = 64  # of lists and dictionaries
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9_]+")
_CODES = {"x": 2, "u": 4, "U": 8}  # digits behind an escape
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}


class Lfm2(ToolFormat):
    """All calls of a turn as a list of Python's; `true`, `false` and `null` are known as well."""

    name = "lfm2"
    marks = (OPEN, CLOSE)
    opening = (OPEN,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{OPEN}[{tools[0].name}(" if len(tools) == 1 else f"{OPEN}["

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Values inside of others are written as JSON, which Python's are but for three words."""
        rules: dict[str, Node] = {}
        named: list[Node] = []
        for n, tool in enumerate(tools):
            args: list[tuple[Node, bool]] = [
                (in_order(f"{each.name}=", json_or_python(each)), not each.is_required)
                for each in properties(tool.parameters)
            ]
            named.append(in_order(f"{tool.name}(", members(args, rules, f"args-{n}", ", "), ")"))
        one = calls(Either(tuple(named)), parallel=parallel, between=Literal(", "))
        return Grammar(in_order(OPEN, SPACE, "[", one.root, "]", CLOSE), {**rules, **one.rules})

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _Lfm2Reader(tools, self.opening)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        listed = [
            f"{call.name}({', '.join(f'{key}={_written(value)}' for key, value in call.arguments.items())})"
            for call in calls
        ]
        return f"{OPEN}[{', '.join(listed)}]{CLOSE}"


def _written(value: object) -> str:
    """Write a value of Python, its texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(key)}: {_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return repr(value)


class _Lfm2Reader(MarkedReader):
    def _call(self) -> Steps[None]:
        yield from self.take(OPEN)
        yield from self.space()
        yield from self.take("[")
        while True:
            yield from self.space()
            yield from self._one()
            if not (yield from self.follows(",")):
                break
            yield from self.take(",")
        if (yield from self.close("]")):
            yield from self.close(CLOSE)

    def _one(self) -> Steps[None]:
        """Read a call, which begins as soon as its first argument has a name, or it has none."""
        name = yield from self.word("A-Za-z0-9_.-")
        if name not in self.tools:
            raise NoCall
        yield from self.space()
        yield from self.take("(")
        yield from self.space()
        said = "{"
        while not (yield from self.try_take(")")):
            key = yield from self.word(r"^\s=(),'\"\[\]{}")
            yield from self.space()
            yield from self.take("=")
            yield from self.space()
            if not key:
                raise NoCall
            if self._open is None:
                self.begin(name)
            self.argue(f'{said}"{quoted(key)}": ')
            yield from self._value(0)
            said = ", "
            yield from self.space()
            if (yield from self.peek()) != ")":
                yield from self.take(",")
                yield from self.space()
        if self._open is None:
            self.begin(name)
            self.argue("{")
        self.argue("}")
        self.end()

    # --- Python's values as JSON ---------------------------------------------------------------------------------

    def _value(self, depth: int) -> Steps[None]:
        """Read a value, and say it as JSON. Raises NoCall."""
        c = yield from self.peek()
        if depth > MAX_DEPTH:
            raise NoCall
        if c in "'\"":
            yield from self._string()
        elif c in "[(":
            yield from self._items("]" if c == "[" else ")", depth)
        elif c == "{":
            yield from self._items("}", depth)
        else:
            word = yield from self.word(r"\w.+-")
            self.argue(_WORDS.get(word) or _number(word))

    def _items(self, close: str, depth: int) -> Steps[None]:
        """Read a list, a tuple or a dictionary."""
        self._at += 1
        is_object = close == "}"
        self.argue("{" if is_object else "[")
        said = ""
        while True:
            yield from self.space()
            if (yield from self.try_take(close)):
                break
            self.argue(said)
            said = ", "
            if is_object:
                if (yield from self.peek()) not in "'\"":
                    raise NoCall
                yield from self._string()
                yield from self.space()
                yield from self.take(":")
                self.argue(": ")
                yield from self.space()
            yield from self._value(depth + 1)
            yield from self.space()
            if (yield from self.peek()) != close:
                yield from self.take(",")
        self.argue("}" if is_object else "]")

    def _string(self) -> Steps[None]:
        """Read a string in either quotes, or three of them."""
        quote = yield from self.peek()
        quote = yield from self.try_take(quote * 3, quote)
        self.argue('"')
        while (mark := (yield from self._until(self._string_read, quote, "\\"))) == "\\":
            yield from self._escape()
        if not mark:
            raise NoCall
        self.argue('"')

    def _escape(self) -> Steps[None]:
        c = yield from self.peek()
        self._at += 1
        if c not in _CODES:
            known = c if c in "\\'\"/" else _PLAIN.get(c)
            self.argue(quoted(f"\\{c}" if known is None else known))
            return
        digits = ""
        for _ in range(_CODES[c]):
            digits += yield from self.peek()
            self._at += 1
        if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
            raise NoCall
        # JSON has the same escape for 16 bits, also for halves of a character.
        self.argue(f"\\u{digits.zfill(4)}" if len(digits) <= 4 else quoted(chr(int(digits, 16))))


def _number(word: str) -> str:
    """Return a Python number as JSON. Raises NoCall."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        return json.dumps(int(word) if _INTEGER.fullmatch(word) else float(word), allow_nan=False)
    except ValueError as e:
        raise NoCall from e
