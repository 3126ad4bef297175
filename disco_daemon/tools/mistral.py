"""Mistral's formats: a JSON list behind `[TOOL_CALLS]`, or since 2025 a name and its arguments for each call. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import (
    SPACE,
    Either,
    Grammar,
    JsonValue,
    Literal,
    Node,
    OneOf,
    Repeated,
    RuleOf,
    calls,
    in_order,
    optional,
)
from .json_calls import ObjectReader, as_json, call_object, header, written
from .reading import NoCall, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTER = OneOf("[a-zA-Z0-9]")
N_ID = 9  # characters of an id, which Mistral's templates check


class MistralList(ToolFormat):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`.

    Source: mistralai/mistral-common, the tokenizers v2 to v7; the template of Mistral-Nemo-Instruct-2407.
    """

    name = "mistral-list"
    marks = (OPEN,)
    opening = (OPEN,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{OPEN}[{header(tools)}"

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        one = calls(call_object(tools, tail=optional(RuleOf("id"))), parallel=parallel, between=Literal(", "))
        call_id = in_order(', "id": "', Repeated(_ID_CHARACTER, N_ID, N_ID), '"')
        return Grammar(in_order(OPEN, SPACE, "[", one.root, "]"), {**one.rules, "id": call_id})

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _MistralReader(tools, self.opening)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return f"{OPEN}[{', '.join(map(written, calls))}]"


class Mistral(ToolFormat):
    """`[TOOL_CALLS]NAME[ARGS]{…}` for each call, with `[CALL_ID]` and an id behind the name where `has_id`.

    Source: mistralai/mistral-common, the tokenizers v11 (with an id) and v13; the templates of
    Mistral-Small-3.2-24B-Instruct-2506 (with an id), Devstral-Small-2507 and Ministral-3-14B-Reasoning-2512.
    """

    name = "mistral"
    has_id = False
    marks = (OPEN, ID, ARGS)
    opening = (OPEN,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{OPEN}{tools[0].name}{ID if self.has_id else ARGS}" if len(tools) == 1 else OPEN

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        call_id = in_order(ID, Repeated(_ID_CHARACTER, N_ID, N_ID)) if self.has_id else Literal("")
        named: list[Node] = [in_order(tool.name, RuleOf("args"), JsonValue(tool.parameters)) for tool in tools]
        one = calls(in_order(OPEN, Either(tuple(named))), parallel=parallel)
        return Grammar(one.root, {**one.rules, "args": in_order(call_id, ARGS)})

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _MistralReader(tools, self.opening)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        ids = [f"{ID}{n:0{N_ID}}" if self.has_id else "" for n, _ in enumerate(calls, 1)]
        return "".join(
            f"{OPEN}{call.name}{call_id}{ARGS}{as_json(call.arguments)}"
            for call, call_id in zip(calls, ids, strict=True)
        )


class MistralWithIds(Mistral):
    """As `Mistral`, with an id for each call."""

    name = "mistral-id"
    has_id = True


class _MistralReader(ObjectReader):
    """Reads all of them: which one a model writes is not for its template alone to say."""

    def _call(self) -> Steps[None]:
        yield from self.take(OPEN)
        yield from self.space()
        if (yield from self.try_take("[")):
            yield from self._list()
            return
        name = yield from self.word("A-Za-z0-9_.-")
        if name not in self.tools:
            raise NoCall
        if (yield from self.try_take(ID)):
            yield from self.word("A-Za-z0-9_-")
        yield from self.try_take(ARGS)
        yield from self.space()
        if (yield from self.peek()) != "{":
            raise NoCall
        self.begin(name)
        yield from self.json_value(is_argument=True)
        self.end()

    def _list(self) -> Steps[None]:
        while True:
            yield from self.space()
            yield from self.call_object(may_lack_arguments=True)
            if not (yield from self.follows(",")):
                break
            yield from self.take(",")
        yield from self.close("]")
