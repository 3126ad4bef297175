"""What a tool is, and what a format of calls has to give: its marks, its grammar and its parser. Pure.

A format is how a family of models writes a call, such as `<tool_call>{"name": …, "arguments": …}</tool_call>`. The
text that a parser is given has the model's control tokens in it as text, at least those of `ToolFormat.marks`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .grammar import Grammar

MAX_TOOLS = 128  # of one request, as OpenAI has it
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's, and dots: some models are trained with them


class ToolError(ValueError):
    """The tools of a request cannot be used; the message names the parameter, and is fit for a user."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call in a conversation's history; `arguments` is what its JSON text says."""

    name: str
    arguments: Mapping[str, Any]


# --- what a parser says ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks, where that is part of the format."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call has begun: it is one, whatever comes, and its tool is one of the request's."""

    index: int  # in the answer, from 0
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of a call are whole. A call without this was cut, or the model wrote no JSON."""

    index: int


Event = Text | Thought | CallBegun | Arguments | CallEnded


class ToolParser(Protocol):
    """Finds the calls in one answer as it arrives.

    What is no call comes out as it went in, to the character, and is held back only while it may still become one.
    White space between calls and behind the last one is left out.
    """

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the answer, of any length; return what is known by it, in order."""
        ...

    def finish(self) -> list[Event]:
        """Return what was held back: the answer has ended, or was cut."""
        ...


class ToolFormat(ABC):
    """How some models write calls: `name` is how users are told of it."""

    name: str
    marks: tuple[str, ...] = ()  # texts that the parser has to see even if they are control tokens of the model
    opening: tuple[str, ...] = ()  # marks at which a call, and the lazy grammar, begins, wherever they stand
    opening_at_start: tuple[str, ...] = ()  # those that are one only where an answer begins, but for white space

    @abstractmethod
    def begin(self, tools: Sequence[Tool]) -> str:
        """Return a text with which a forced call of these tools may be begun; with one tool its name is in it."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> Grammar:
        """Return what an answer may be from an opening mark on: one call, or with `parallel` one or more."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """Return a parser for one answer; only calls of these tools are calls."""

    @abstractmethod
    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Write calls of one turn, for a template that does not write those of the history itself."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return what the model has to be told of the tools; empty where the template does that."""
        del tools
        return ""


# --- a request's tools -------------------------------------------------------------------------------------------


def tools_of(request_tools: object) -> tuple[Tool, ...]:
    """Read OpenAI's `tools`; none if it is missing or null. Raises ToolError."""
    if request_tools is None:
        return ()
    if not isinstance(request_tools, list | tuple):
        raise ToolError("tools must be a list of functions.")
    if len(request_tools) > MAX_TOOLS:
        raise ToolError(f"tools has {len(request_tools)} functions; at most {MAX_TOOLS} are possible.")
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(request_tools))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ToolError(f"tools[{i}].function.name is {name!r}, as is that of another tool: each needs its own.")
    return tools


def _tool(item: object, where: str) -> Tool:
    if not isinstance(item, Mapping):
        raise ToolError(f"{where} must be an object with a type and a function.")
    if (kind := item.get("type")) != "function":
        raise ToolError(f"{where}.type is {kind!r:.60}; only 'function' can be called here.")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise ToolError(f"{where}.function must be an object with a name.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = f"{where}.function.name must be 1 to 64 letters, digits, dots, underscores or dashes, not {name!r:.80}."
        raise ToolError(msg)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ToolError(f"{where}.function.description must be a text.")
    return Tool(name, description or "", _parameters(function.get("parameters"), f"{where}.function.parameters"))


def _parameters(schema: object, where: str) -> Mapping[str, Any]:
    """Check the schema of an object; a tool without one takes no arguments."""
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise ToolError(f"{where} must be the JSON schema of an object.")
    if schema.get("type", "object") != "object":
        raise ToolError(f"{where}.type is {schema['type']!r:.60}; the arguments of a call are an 'object'.")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise ToolError(f"{where}.properties must be an object that has a schema for each name.")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise ToolError(f"{where}.required must be a list of names.")
    return schema if "type" in schema else {"type": "object", **schema}
