"""The format of gpt-oss: messages in channels; thoughts in `analysis`, calls to `functions.NAME`. Pure.

Source: openai/harmony, its page "Harmony response format".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import regex

from .format import Tool, ToolFormat, ToolParser, WrittenCall
from .grammar import Either, Grammar, JsonValue, Literal, Node, RuleOf, in_order, optional
from .json_calls import as_json
from .reading import CallReader, NoCall, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TO = " to=functions."

_HEADER = regex.compile(
    r"(?=<\|(?:start|channel|message)\|>| to=)(?:<\|start\|>assistant)?(?: to=(?P<role_to>[A-Za-z0-9_.-]{1,80}))?"
    r"(?:<\|channel\|>commentary(?: to=assistant)?(?=<\|channel\|>))?"  # stray, as gpt-oss-20b has it now and then
    r"(?:<\|channel\|>(?P<channel>analysis|commentary|final)(?: to=(?P<to>[A-Za-z0-9_.-]{1,80}))?)?"
    r"(?: ?(?:<\|constrain\|>)?[a-z0-9_-]{1,40})?<\|message\|>"
)


class GptOss(ToolFormat):
    """Behind `<|start|>assistant`: ` to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>`."""

    name = "gpt-oss"
    marks = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    opening = (f"{START}assistant{TO}", f"{CHANNEL}commentary{TO}", f"{CHANNEL}analysis{TO}")
    opening_at_start = (TO,)

    def begin(self, tools: Sequence[Tool]) -> str:
        return f"{TO}{tools[0].name}{CHANNEL}commentary json{MESSAGE}" if len(tools) == 1 else TO

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """A turn has one call: `<|call|>` ends it."""
        rules: dict[str, Node] = {
            "channel": Either((Literal("commentary"), Literal("analysis"))),
            "says": in_order(optional(Either((Literal(" json"), Literal(f" {CONSTRAIN}json")))), MESSAGE),
        }
        in_role: list[Node] = []
        in_channel: list[Node] = []
        for tool in tools:
            says = in_order(RuleOf("says"), JsonValue(tool.parameters))
            in_role.append(in_order(tool.name, CHANNEL, RuleOf("channel"), says))
            in_channel.append(in_order(tool.name, says))
        return Grammar(
            Either((
                in_order(optional(Literal(f"{START}assistant")), TO, Either(tuple(in_role))),
                in_order(CHANNEL, RuleOf("channel"), TO, Either(tuple(in_channel))),
            )),
            rules,
        )  # fmt: skip

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return _GptOssReader(tools, ())

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return f"{CALL}{START}assistant".join(
            f"{TO}{call.name}{CHANNEL}commentary json{MESSAGE}{as_json(call.arguments)}" for call in calls
        )


class _GptOssReader(CallReader):
    """Reads message after message; the answer begins behind the prompt's `<|start|>assistant`."""

    def _answer(self) -> Steps[None]:
        while not (self._has_ended and self._at == len(self._text)):
            self._kept = self._at
            n_before = self._n_calls
            try:
                yield from self._message()
            except NoCall:
                self._give_back(has_begun=self._n_calls > n_before)
                yield from self._plain_text()
            self._kept = self._open = None
            if self._at == len(self._text) and not self._has_ended:
                yield

    def _plain_text(self) -> Steps[None]:
        """Let text pass that is in no channel, up to where a message may begin."""
        self._kept = None
        if mark := (yield from self._until(self._text_read, CHANNEL, START, MESSAGE)):
            self._at -= len(mark)

    def _message(self) -> Steps[None]:
        """Read a header and what it is of. Raises NoCall."""
        while not (found := _HEADER.match(self._text, self._at, partial=True)) or found.partial:
            if not found:
                raise NoCall
            yield from self._wait()
        n = found.end() - self._at
        self._at = found.end()
        to = found["role_to"] or found["to"]
        if to and to != "assistant":
            yield from self._call_of(to, n)
        else:
            self._kept = None
            yield from self._body(self._thought_read if found["channel"] == "analysis" else self._text_read)

    def _body(self, passes: Callable[[int], None]) -> Steps[None]:
        if (mark := (yield from self._until(passes, END, CALL, RETURN, START, CHANNEL))) in (START, CHANNEL):
            self._at -= len(mark)

    def _call_of(self, to: str, n_header: int) -> Steps[None]:
        """Read the arguments of a call; one of a tool that was not given, such as a built-in one, is text."""
        place, _, name = to.partition(".")
        if place != "functions" or name not in self.tools or not (yield from self._has("{")):
            self._at -= n_header
            self._kept = None
            self._text_read(self._at + n_header)
            if mark := (yield from self._until(self._text_read, END, CALL, RETURN, START, CHANNEL)):
                self._at -= len(mark)
                self._text_read(self._at + len(mark) * (mark not in (START, CHANNEL)))
            return
        self.begin(name)
        yield from self.json_value(is_argument=True)
        self.end()
        for mark in (CALL, END, RETURN):
            if (yield from self.close(mark)):
                return
