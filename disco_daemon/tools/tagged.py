"""Formats in which each argument of a call stands in tags of its own; what the tags are, a template shows. Pure.

Qwen3-Coder's, which Qwen3.5 and Nemotron 3 have as well, is known by name. Those of GLM-4.x, Seed-OSS, MiniMax-M2,
DeepSeek V3.2 and others are read off what their template makes of two calls.

Source: the template of Qwen/Qwen3-Coder-30B-A3B-Instruct, and its qwen3coder_tool_parser.py; for the reading of tags
"differential analysis" of llama.cpp, ggml-org/llama.cpp#18675.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import NOTHING, SPACE, Either, Grammar, InOrder, Literal, Node, Until, calls, in_order, optional
from .json_calls import CLOSE, OPEN, as_json, json_or_python
from .reading import MarkedReader, NoCall, Steps, quoted
from .schemas import TYPES, Property, properties, type_of

_WORDS = {"True": "true", "False": "false", "None": "null"}  # templates write values of a history as Python does
MAX_PYTHON = 64 * 1024  # characters of a value that is read as Python writes it
_TAG = re.compile(r"<[^<>\s][^<>]{0,80}>")
CDATA, CDATA_END = "<![CDATA[", "]]>"
_BESIDE_CDATA = ("", "\n", " ")  # white space between a section and the tags around it, which is not the value's
_MARKUP = re.compile(r"[<&\n]")
_SPACE_BETWEEN = re.compile(r"(?<=>)\s+(?=<)")


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the parts of calls. White space may stand between any two, but for that next to a value."""

    opening: str  # of the calls, or of each of them; may be empty
    call: str  # in front of a tool's name
    named: str  # behind it; may be empty
    key: str  # in front of an argument's name
    keyed: str  # between that and a text
    keyed_value: str  # between that and a number; as `keyed`, or the two tell texts from other values
    value: str  # behind a value
    end: str  # behind the last argument
    closing: str  # as `opening`
    wraps_each: bool  # whether `opening` and `closing` stand around each call
    cdata: bool = False  # whether a text with <, & or more than a line stands in a CDATA section, as in MiniCPM5's


class Tagged(ToolFormat):
    """`OPENING CALL NAME NAMED KEY KEY-NAME KEYED VALUE-TEXT VALUE … END CLOSING`, a line for each tag or none."""

    def __init__(self, tags: Tags, name: str = "tagged") -> None:
        self.name, self.tags = name, tags
        self.opening = (tags.opening or tags.call,)
        parts = (tags.opening, tags.call, tags.named, tags.key, tags.keyed, tags.keyed_value, tags.value, tags.end)
        self.marks = tuple(dict.fromkeys(filter(None, (*parts, tags.closing))))

    def begin(self, tools: Sequence[Tool]) -> str:
        tags = self.tags
        head = f"{tags.opening}\n{tags.call}" if tags.opening else tags.call
        return f"{head}{tools[0].name}{tags.named}" if len(tools) == 1 else head

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Arguments stand in their schema's order; those that may be texts are any text."""
        tags = self.tags
        named: list[Node] = []
        for tool in tools:
            parts = [
                part if each.is_required else optional(part)
                for each in properties(tool.parameters)
                for part in [in_order(f"{tags.key}{each.name}", self._value(each), SPACE)]
            ]
            named.append(in_order(f"{tool.name}{tags.named}", SPACE, InOrder(tuple(parts)), tags.end))
        call = in_order(tags.call, Either(tuple(named)))
        if not tags.opening:
            return calls(call, parallel=parallel, between=SPACE)
        if tags.wraps_each:
            call = in_order(tags.opening, SPACE, call, SPACE, tags.closing)
            return calls(call, parallel=parallel, between=SPACE)
        one = calls(call, parallel=parallel, between=SPACE)
        return Grammar(in_order(tags.opening, SPACE, one.root, SPACE, tags.closing), one.rules)

    def _value(self, each: Property) -> Node:
        """Return what stands behind an argument's name."""
        tags, values = self.tags, each.found.get("enum")
        if isinstance(values, list) and values and all(isinstance(v, str) and "\0" not in v for v in values):
            return in_order(tags.keyed, Either(tuple(Literal(value) for value in values)), tags.value)
        text = in_order(tags.keyed, Until(tags.value)) if "string" in each.types else NOTHING
        if tags.keyed == tags.keyed_value and text is not NOTHING:
            return text
        other = in_order(tags.keyed_value, json_or_python(each), tags.value)
        return other if text is NOTHING else Either((text, other)) if each.types != {"string"} else text

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _TaggedReader(tools, self.tags)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        tags, written = self.tags, "\n".join(map(self._written, calls))
        return written if tags.wraps_each or not tags.opening else f"{tags.opening}\n{written}\n{tags.closing}"

    def _written(self, call: WrittenCall) -> str:
        tags = self.tags
        shown = "".join(
            f"{tags.key}{key}{tags.keyed}{self._in_cdata(value)}{tags.value}\n"
            if isinstance(value, str)
            else f"{tags.key}{key}{tags.keyed_value}{as_json(value)}{tags.value}\n"
            for key, value in call.arguments.items()
        )
        written = f"{tags.call}{call.name}{tags.named}\n{shown}{tags.end}"
        return f"{tags.opening}\n{written}\n{tags.closing}" if tags.wraps_each and tags.opening else written

    def _in_cdata(self, text: str) -> str:
        return f"{CDATA}{text}{CDATA_END}" if self.tags.cdata and _MARKUP.search(text) else text


QWEN_CODER = Tagged(
    Tags(OPEN, "<function=", ">", "<parameter=", ">\n", ">\n", "\n</parameter>", "</function>", CLOSE, wraps_each=True),
    "qwen3-coder",
)


# --- reading tags off a template ---------------------------------------------------------------------------------

# In a template that marks or escapes some texts the tags of this one are not those of a plain one: no format is found.
PROBE = {"probed_key": 'probed <b> & "c"', "probed_number": 70707}


def derived(text: str, name: str) -> Tagged | None:
    """Return the format of two calls of the tool `name` with the arguments of `PROBE`; None where it is another one."""
    words = [name, *(str(word) for item in PROBE.items() for word in item)]
    probed = re.compile("|".join(map(re.escape, words)))
    if probed.findall(text) != words * 2:
        return None
    head, before_key, keyed, between, keyed_value, middle, *again, tail = probed.split(text)
    if cdata := keyed.endswith(CDATA) and between.startswith(CDATA_END):
        again[1:3] = again[1].removesuffix(CDATA), again[2].removeprefix(CDATA_END)
        keyed, between = keyed.removesuffix(CDATA), between.removeprefix(CDATA_END)
    if again != [before_key, keyed, between, keyed_value] or "<" not in before_key or "<" not in head:
        return None
    key_tag = before_key[before_key.rindex("<") :]
    if not between.endswith(key_tag):
        return None
    named, closes = before_key.removesuffix(key_tag).strip(), between.removesuffix(key_tag).rstrip()
    head = head.strip()
    call_tag = head[head.rindex("<") :]
    opening = head.removesuffix(call_tag).strip()
    if not (closes and middle.startswith(closes) and tail.startswith(closes) and middle.endswith(call_tag)):
        return None
    ends = middle.removeprefix(closes).removesuffix(call_tag).strip()
    last = tail.removeprefix(closes).strip()
    wraps_each = bool(opening) and ends.endswith(opening)
    if wraps_each:
        last = ends.removesuffix(opening).strip()
        if not last or ">" not in last:
            return None
        ends = last[: last.rindex("<")].strip()
    if not ends or not last.startswith(ends):
        return None
    behind = _TAG.findall(last.removeprefix(ends))  # after the closing tags perhaps the turn's end, which is no text
    closing = "".join(behind[: len(_TAG.findall(opening))])
    if bool(opening) is not bool(closing):
        return None
    keyed, keyed_value = (_SPACE_BETWEEN.sub("\n", each) for each in (keyed, keyed_value))
    return Tagged(Tags(opening, call_tag, named, key_tag, keyed, keyed_value, closes, ends, closing, wraps_each, cdata))


# --- the parser --------------------------------------------------------------------------------------------------


class _TaggedReader(MarkedReader):
    def __init__(self, tools: Sequence[Tool], tags: Tags) -> None:
        super().__init__(tools, [mark for mark in (tags.opening, tags.call) if mark])
        self._tags = tags
        self._behind = tuple(tag for tag in (tags.key, tags.end, tags.closing) if tag)  # an argument's last tag
        self._value_tags = tuple(dict.fromkeys((tags.value, tags.value.lstrip())))
        n = next((n for n, (a, b) in enumerate(zip(tags.keyed, tags.keyed_value, strict=False)) if a != b), None)
        self._keyed, self._texts, self._others = tags.keyed[:n], tags.keyed[n:], tags.keyed_value[n:]
        if n is None:
            self._texts = self._others = ""
        self._collected = ""  # of an argument that is said when it is whole

    def _call(self) -> Steps[None]:
        """Read the calls of one pair of tags, whose opening one these models leave out now and then."""
        tags = self._tags
        if tags.opening:
            yield from self.try_take(tags.opening)
            yield from self.space()
        while True:
            yield from self._one()
            if not (yield from self.follows(tags.call)):
                break
        if tags.closing:
            yield from self.close(tags.closing)

    def _one(self) -> Steps[None]:
        tags = self._tags
        yield from self.take(tags.call)
        name = yield from self.word("A-Za-z0-9_.-")
        if name not in self.tools:
            raise NoCall
        if tags.named:
            yield from self.take(tags.named)
        else:
            yield from self.space()
            if not ((yield from self._has(tags.key)) or (yield from self._has(tags.end))):
                raise NoCall
        kinds = {each.name: each.types for each in properties(self.tools[name].parameters)}
        self.begin(name)
        self.argue("{")
        said = ""
        while (yield from self.follows(tags.key)):
            yield from self.take(tags.key)
            yield from self._argument(kinds, said)
            said = ", "
        if not (yield from self.follows(tags.end, *filter(None, [tags.closing]))):
            raise NoCall
        yield from self.try_take(tags.end)
        self.argue("}")
        self.end()

    def _argument(self, kinds: dict[str, frozenset[str]], said: str) -> Steps[None]:
        """Read an argument: a text as it arrives, all else when it is whole."""
        tags = self._tags
        first, *more = _SPACE_BETWEEN.split(self._keyed.rstrip())
        key = yield from self.until(first)
        self.argue(f'{said}"{quoted(key)}": ')
        types = kinds.get(key, TYPES)
        for tag in more:
            yield from self.space()
            yield from self.take(tag)
        if self._texts:
            if not (taken := (yield from self.try_take(self._texts, self._others))):
                raise NoCall
            types = frozenset({"string"}) if taken == self._texts else TYPES - {"string"}
        if tags.keyed.endswith("\n"):
            yield from self.try_take("\n")
        ends = self._value_tags
        if tags.cdata and (yield from self.try_take(*(space + CDATA for space in _BESIDE_CDATA))):
            ends = tuple(CDATA_END + space + tag for tag in ends for space in _BESIDE_CDATA)
        if types == {"string"}:
            self.argue('"')
            yield from self._text_of_argument(self._string_read, ends)
            self.argue('"')
        else:
            self._collected = ""
            yield from self._text_of_argument(self._collect, ends)
            self.argue(_as_json(self._collected, types))

    def _text_of_argument(self, passes: Callable[[int], None], ends: Sequence[str]) -> Steps[None]:
        """Read text up to the closing tag, which is one only if another tag follows, and over it. Raises NoCall."""
        while mark := (yield from self._until(passes, *ends)):
            if (yield from self._tag_follows()):
                return
            self._at -= len(mark)
            passes(self._at + len(mark))
        raise NoCall

    def _tag_follows(self) -> Steps[bool]:
        while True:
            rest = self._text[self._at :].lstrip()
            if any(rest.startswith(tag) for tag in self._behind):
                return True
            may_follow = any(tag.startswith(rest) for tag in self._behind)
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
        said = _of_python(said)
        kind = {"{": "object", "[": "array"}.get(said[:1], "string")
    if kind == "string" or not ({kind, "number" if kind == "integer" else kind} & kinds or "string" not in kinds):
        return f'"{quoted(text)}"'
    return said


def _of_python(text: str) -> str:
    """Return the JSON of an object or list as Python writes it, as some templates do; empty for anything else."""
    if text[:1] not in ("{", "[") or len(text) > MAX_PYTHON:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def _refuse(constant: str) -> None:
    raise ValueError(constant)
