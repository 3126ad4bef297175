"""Formats whose calls have their arguments as JSON between marks; what the marks are, a template shows. Pure.

Such as `<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`, `functions.f:0<|tool_call_argument_begin|>{…}` or
`<|tools_prefix|>[{"f": {…}}]<|tools_suffix|>`: a call is a text, a name, a text, JSON and a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import SPACE, Either, Grammar, JsonValue, Literal, Node, OneOf, Repeated, calls, in_order, optional
from .json_calls import as_json, listed
from .reading import MarkedReader, NoCall, Steps

HOLE = "\0"  # in a frame: an id or a number that the model chooses
_TOKEN = re.compile(r'<[^<>\s]+>|\0|["{}\[\],:]|[^\s"{}\[\],:<\0]+|<[^<>\s"]*')
_DIGITS = re.compile(r"\d+")
FIRST_ID = "0"  # of a call that is begun for the model
MAX_ID = 64  # characters
_ONE = re.compile(r'(<[^<>\s]+>\s*)(\{\s*"\w+":\s*")')  # in front of the name of the one call that a turn may have


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the parts of calls; white space may stand between any two tokens of it."""

    opening: str  # of all calls of a turn; may be empty
    call: str  # in front of a tool's name
    named: str  # between that and the arguments
    end: str  # behind the arguments; may be empty
    between: str | None  # between two calls; None where a turn has one
    closing: str  # behind the last call


class Framed(ToolFormat):
    """`OPENING CALL NAME NAMED {…} END BETWEEN CALL … CLOSING`.

    Where it `tells`, the template writes calls and says nothing of the tools, so that the model is told of them.
    """

    name = "framed"

    def __init__(self, frame: Frame, *, tells: bool = False) -> None:
        self.frame, self._tells = frame, tells
        head = frame.opening or frame.call
        mark = re.match(r"<[^<>\s]+>", head)
        self.opening = (mark[0] if mark else head.partition(HOLE)[0],)
        parts = (frame.opening, frame.call, frame.named, frame.end, frame.between or "", frame.closing)
        self.marks = tuple(dict.fromkeys(tag for part in parts for tag in re.findall(r"<[^<>\s]+>", part)))

    def begin(self, tools: Sequence[Tool]) -> str:
        frame = self.frame
        head = _filled(frame.opening + frame.call, 0)
        return head + (tools[0].name + _filled(frame.named, 0) if len(tools) == 1 else "")

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        frame = self.frame
        named = [in_order(tool.name, _node(frame.named), JsonValue(tool.parameters)) for tool in tools]
        call = in_order(_node(frame.call), Either(tuple(named)), _node(frame.end))
        parallel = parallel and frame.between is not None
        one = calls(call, parallel=parallel, between=_node(frame.between or ""))
        kept, mark, ended = frame.closing.partition("<")  # what ends the turn as well is no text
        closing = in_order(kept.rstrip(), optional(in_order(SPACE, mark + ended))) if mark else Literal(kept)
        return Grammar(in_order(_node(frame.opening), one.root, SPACE, closing), one.rules)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _FramedReader(tools, self.opening, self.frame)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        frame = self.frame
        written = [
            f"{_filled(frame.call, n)}{call.name}{_filled(frame.named, n)}{as_json(call.arguments)}{frame.end}"
            for n, call in enumerate(calls)
        ]
        between = frame.opening if frame.between is None else frame.between
        return f"{frame.opening}{between.join(written)}{frame.closing}"

    def instructions(self, tools: Sequence[Tool]) -> str:
        if not self._tells:
            return ""
        example = self.write([WrittenCall("NAME", {"ARGUMENT": "VALUE"})])
        return f"{listed(tools)}\n\nTo call one, answer with nothing but its name and arguments, written so:\n{example}"


def _filled(part: str, n: int) -> str:
    return part.replace(HOLE, str(n))


def _node(part: str) -> Node:
    """Return a part of a frame, with any id in place of a hole."""
    texts = part.split(HOLE)
    hole: Node = Repeated(OneOf("[A-Za-z0-9_-]"), 1, MAX_ID)
    return in_order(texts[0], *(node for text in texts[1:] for node in (hole, Literal(text))))


# Of templates that write no calls, or only some, but tell the model how to.
GRANITE = Framed(Frame("<|tool_call|>[", '{"name": "', '", "arguments": ', "}", ", ", "]"))
NEMOTRON = Framed(Frame("<TOOLCALL>[", '{"name": "', '", "arguments": ', "}", ", ", "]</TOOLCALL>"))


# --- reading a frame off a template ------------------------------------------------------------------------------


def derived(text: str, name: str, arguments: Mapping[str, Any], ids: Sequence[str]) -> Framed | None:
    """Return the format of two calls of the tool `name` with these arguments and ids; None where it is another one."""
    for each in ids:
        text = text.replace(each, HOLE)
    parts = text.split(name)
    if len(parts) == 2 and (only := _ONE.fullmatch(parts[0])) and (one := _divided(parts[1], arguments)):
        return Framed(Frame(only[1], only[2], one[0], "}", None, "")) if one[1].strip() == "}" else None
    if len(parts) != 3:
        return None
    head, first, second = parts
    if (one := _divided(first, arguments)) is None or (two := _divided(second, arguments)) is None:
        return None
    (named, middle), (named_again, tail) = one, two
    if named != named_again:
        named, named_again = (_DIGITS.sub(HOLE, each) for each in (named, named_again))
    numbered = _DIGITS.sub(HOLE, head), _DIGITS.sub(HOLE, middle)
    if len(_end_in_common(*numbered)) > len(_end_in_common(head, middle)):
        head, middle = numbered
    call = _end_in_common(head, middle)
    if _is_in_tag(head, len(head) - len(call)):
        call = call[call.find(">") + 1 :]
    call = call.lstrip()
    end = _begin_in_common(middle[: len(middle) - len(call)], tail)
    end = (end[: end.rindex("<")] if _is_in_tag(tail, len(end)) else end).rstrip()
    between = middle[len(end) : len(middle) - len(call)]
    opening, closing = head[: len(head) - len(call)].lstrip(), tail[len(end) :].strip()
    if "<" in opening:  # what stands before the last mark is no part of calls
        opening = opening[opening.rindex("<") :]
    if named != named_again or not (call and named) or not (opening or call).startswith("<"):
        return None  # a bracket alone opens no calls: it stands in any text
    if not opening:
        closing = ""  # what stands there ends the turn
    tags = re.findall(r"[^<]*<[^<>\s]+>", closing)  # behind the first one perhaps the turn's end
    return Framed(Frame(opening, call, named, end, between, tags[0] if tags else closing))


def _divided(text: str, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what stands in front of and behind the JSON of these arguments."""
    at = text.find("{")
    try:
        found, end = json.JSONDecoder().raw_decode(text, at) if at >= 0 else (None, 0)
    except ValueError:
        return None
    return (text[:at], text[end:]) if found == arguments else None


def _is_in_tag(text: str, at: int) -> bool:
    """Whether a place in a text is within a tag."""
    return text.rfind("<", 0, at) > text.rfind(">", 0, at)


def _begin_in_common(text: str, other: str) -> str:
    n = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[:n]


def _end_in_common(text: str, other: str) -> str:
    return _begin_in_common(text[::-1], other[::-1])[::-1]


# --- the parser --------------------------------------------------------------------------------------------------


class _FramedReader(MarkedReader):
    def __init__(self, tools: Sequence[Tool], opening: Sequence[str], frame: Frame) -> None:
        super().__init__(tools, opening)
        self._frame = frame
        self._first_of_next = _TOKEN.findall((frame.between or "") + frame.call)[0]

    def _call(self) -> Steps[None]:
        frame = self._frame
        yield from self._tokens(frame.opening)
        while True:
            yield from self._tokens(frame.call)
            name = yield from self.word("A-Za-z0-9_.-")
            if name not in self.tools:
                raise NoCall
            yield from self._tokens(frame.named)
            if (yield from self.peek()) != "{":
                raise NoCall
            self.begin(name)
            yield from self.json_value(is_argument=True)
            self.end()
            for token in _TOKEN.findall(frame.end):
                yield from self.close(token)
            if frame.between is None or not (yield from self.follows(self._first_of_next)):
                break
            yield from self._tokens(frame.between)
        for token in _TOKEN.findall(frame.closing):
            yield from self.close(token)

    def _tokens(self, part: str) -> Steps[None]:
        """Read a part of the frame, and white space between its tokens and behind it. Raises NoCall."""
        for token in _TOKEN.findall(part):
            yield from self.space()
            if token == HOLE:
                if not (yield from self.word("A-Za-z0-9_-")):
                    raise NoCall
            else:
                yield from self.take(token)
        yield from self.space()
