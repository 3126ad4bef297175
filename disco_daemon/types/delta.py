"""What a piece of an answer has beside its text, typed: a thought, a refusal, pieces of calls. Pure.

Whoever reads an endpoint makes these, and whoever writes an answer in an API's shape sees nothing else: what servers
send in twenty forms has one here.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from .fields import Json

_MARK = re.compile(r"""["\\{}\[\]]|[^"\\{}\[\]\s]+""")  # what can end a JSON object, and anything between


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words. An end that is none of these is no end: the answer was cut."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    FUNCTION_CALL = "function_call"
    CONTENT_FILTER = "content_filter"


class CallForm(StrEnum):
    """How a chat's API writes a call: of a function with JSON, of a tool with a text, or as it did before tools."""

    FUNCTION = "function"
    CUSTOM = "custom"
    OLD = "function_call"


class CallPart(msgspec.Struct, frozen=True):
    """A piece of the call `number`, from 0. The first one of each, and no other, has its id and its whole name.

    `arguments` are text, as much as came; all of a function's together are to be a JSON object. `others` are a
    server's own fields, such as a signature that it wants back.
    """

    number: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    form: CallForm = CallForm.FUNCTION
    others: Json | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a token has beside its text. `others` are fields that only a chat has: JSON, checked to be writable."""

    thought: str = ""
    refusal: str = ""
    calls: tuple[CallPart, ...] = ()
    others: Json | None = None

    def __bool__(self) -> bool:
        return bool(self.thought or self.refusal or self.calls or self.others)


class ObjectScan:
    """Whether text that comes in pieces is a whole JSON object by now. Each character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_whole = False

    def feed(self, text: str) -> None:
        """Take the next piece. What follows a whole object makes it none."""
        for found in _MARK.finditer(text):
            self._take(found[0])

    def _take(self, mark: str) -> None:
        begun = self._depth > 0
        self.is_whole = False
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = mark == "\\", mark != '"'
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.is_whole = begun and self._depth == 0
