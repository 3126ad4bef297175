"""How a model is told of tools, and how its calls are kept to their schemas and read: as its chat template has it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...tools.detect import TemplateTools
from ...tools.format import Tool, ToolError, WrittenCall, tools_of
from ...tools.gemma import Gemma
from ...tools.gpt_oss import GptOss
from ...tools.mistral import N_ID, Mistral, MistralList
from ...types import ToolUse
from ..json_schema.reading import GrammarError
from ..tool_rules import callable_tools, offered
from .calls import CallingText, OpeningMark
from .grammar import grammar_of_calls, strange_schemas
from .refusals import ToolsError
from .text import TextStream

Message = Mapping[str, Any]
MAX_KNOWN = 8  # grammars; one of twenty tools takes 50 ms to make, and an agent asks with the same ones again and again


class Calling:
    """The tools of requests, by the format of one model's chat template; knows the latest grammars."""

    def __init__(self, template: TemplateTools) -> None:
        self._template, self._form = template, template.format
        self._grammars: dict[bytes, str] = {}

    @property
    def name(self) -> str:
        """The name of the format."""
        return self._form.name

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that have to be seen even where they are control tokens."""
        return self._form.marks

    # --- the prompt ----------------------------------------------------------------------------------------------

    def shown(self, use: ToolUse | None) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template, None if it knows none."""
        return list(use.tools) if use is not None and self._template.shows_tools else None

    def messages(self, messages: Sequence[Message], use: ToolUse | None) -> list[Message]:
        """Return the messages as the template can show them.

        Tools that cannot be offered are left out: the prompt is then a server's, and only its length is asked for.
        """
        found = list(self._written(messages))
        if isinstance(self._form, Mistral | MistralList):
            found = [_with_short_ids(message) for message in found]
        tools = self._told(use) if use is not None else ()
        told = self._form.instructions(tools) if tools else ""
        return _with_instructions(found, told) if told else found

    def _told(self, use: ToolUse) -> tuple[Tool, ...]:
        try:
            return self._offered(use)
        except ToolsError:
            return ()

    def _written(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Write calls, and results of calls, as text where the template does not."""
        before: dict[str, Any] | None = None  # a message of results that may get more of them
        for message in messages:
            results, before = before, None
            if message.get("tool_calls") and not self._template.writes_calls:
                calls = [_written_call(call) for call in message["tool_calls"]]
                text = "\n".join(filter(None, [message.get("content"), self._form.write(calls)]))
                yield {"role": message["role"], "content": text}
            elif message.get("role") == "tool" and not self._template.writes_results:
                if results is None:
                    results = {"role": "user", "content": ""}
                    yield results
                results["content"] = "\n".join(filter(None, [results["content"], _result(message)]))
                before = results
            else:
                yield message

    # --- the answer ----------------------------------------------------------------------------------------------

    def grammar(self, use: ToolUse) -> str:
        """Return the grammar of calls from an opening mark on. Raises ToolsError.

        Where the model may also say something, a schema that no grammar can say, or have, leaves the arguments free.
        """
        key = msgspec.json.encode(use)
        if (known := self._grammars.get(key)) is not None:
            return known
        offered_tools = self._offered(use)
        try:
            tools = callable_tools(offered_tools, use)
            with strange_schemas():
                calls = self._form.grammar(tools, parallel=use.parallel)
            made = grammar_of_calls(calls, lenient=not use.forced)
        except (GrammarError, ToolError) as e:
            raise ToolsError(str(e)) from e
        if len(self._grammars) >= MAX_KNOWN:
            del self._grammars[next(iter(self._grammars))]
        self._grammars[key] = made
        return made

    def reads(self, use: ToolUse | None) -> bool:
        """Whether an answer has to be read by the format: also without tools where that keeps thoughts apart."""
        return use is not None or isinstance(self._form, Gemma | GptOss)

    def text(self, use: ToolUse | None, inner: TextStream, stop: Sequence[str], given: str = "") -> CallingText:
        """Make a stream that keeps calls apart from other text; `inner` makes text of bytes.

        The tools are those of a request that has a grammar.
        """
        tools = _allowed(tools_of(use.tools), use) if use is not None else ()
        return CallingText(inner, self._form.parser(tools), stop, given)

    def mark(
        self, use: ToolUse, stream: TextStream, piece: Callable[[int], bytes], tokens: Callable[[str], list[int]]
    ) -> OpeningMark | None:
        """Return what looks for the begin of a call; None where an answer has to be one."""
        return None if use.forced else OpeningMark(self._form, stream, piece, tokens)

    def _offered(self, use: ToolUse) -> tuple[Tool, ...]:
        try:
            return offered(use, self.name)
        except ToolError as e:
            raise ToolsError(str(e)) from e


def _allowed(tools: Sequence[Tool], use: ToolUse) -> tuple[Tool, ...]:
    """Return the tools that may be called."""
    return tuple(tool for tool in tools if tool.name in use.allowed)


def _with_instructions(messages: list[Message], told: str) -> list[Message]:
    """Return the messages with instructions added to those of the system."""
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{told}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _with_short_ids(message: Message) -> Message:
    """Return a message with ids of calls as Mistral's templates demand them: the same id gives the same one."""
    made = dict(message)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    if "tool_call_id" in message:
        made["tool_call_id"] = _short(message["tool_call_id"])
    return made


def _short(id_: object) -> str:
    text = str(id_)
    fits = len(text) == N_ID and text.isascii() and text.isalnum()
    return text if fits else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:N_ID]


def _written_call(call: Message) -> WrittenCall:
    function = call["function"]
    arguments = function.get("arguments")
    return WrittenCall(function["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments})


def _result(message: Message) -> str:
    """Return a result as the user's text, as llama.cpp's server has it for such templates."""
    told = {"tool": message.get("name") or message.get("tool_call_id") or "", "content": message.get("content")}
    return json.dumps({"tool_response": told}, ensure_ascii=False)
