"""Tools of the Responses API as a chat's. Pure.

Functions are functions. A custom tool takes a text, which few servers know: it becomes a function with one parameter.
All others (web search, images, computers, …) are what OpenAI itself does; they are left out by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import RequestError
from .responses_items import CUSTOM_INPUT, item_of

_CHOICES = ("none", "auto", "required")
Name = Annotated[str, Meta(min_length=1)]


class FunctionToolItem(msgspec.Struct):
    """A function with a JSON schema for its parameters."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return it as a chat's tool."""
        every = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        function = {"name": self.name} | {key: value for key, value in every.items() if value is not None}
        return {"type": "function", "function": function}


class CustomToolItem(msgspec.Struct):
    """A tool that takes a text, perhaps by a grammar."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def grammar(self) -> str:
        """The grammar of its input; "" if any text will do."""
        definition = (self.format or {}).get("definition")
        return definition if isinstance(definition, str) else ""

    def as_chat(self) -> dict[str, Any]:
        """Return it as a chat's function: its grammar is told to the model, and nobody enforces it."""
        said = f"The text, by this {(self.format or {}).get('syntax', '')} grammar:\n{self.grammar}"
        text = {"type": "string"} | ({"description": said} if self.grammar else {})
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name} | about | {"parameters": parameters}}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """Tools as a chat has them, and as they were asked; `choice` is which may be called, None for the usual."""

    tools: list[dict[str, Any]]
    choice: str | dict[str, Any] | None
    asked: list[dict[str, Any]]
    choice_asked: str | dict[str, Any]
    custom: frozenset[str]
    left_out: list[str]

    def as_chat(self, *, parallel: bool | None) -> dict[str, Any]:
        """Return the fields of a chat about tools; none where there is no tool."""
        if not self.tools:
            return {}
        every = {"tools": self.tools, "tool_choice": self.choice, "parallel_tool_calls": parallel}
        return {name: value for name, value in every.items() if value is not None}


def tools_of(given: list[dict[str, Any]], choice: str | dict[str, Any] | None) -> ChatTools:
    """Return tools, and which of them may be called, as a chat has them. Raises RequestError."""
    tools: dict[str, dict[str, Any]] = {}
    asked: list[dict[str, Any]] = []
    left_out, custom = [], set()
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        match tool.get("type"):
            case "function":
                function = item_of(tool, FunctionToolItem, where)
                tools[function.name] = function.as_chat()
                asked.append(tool)
            case "custom":
                taking_text = item_of(tool, CustomToolItem, where)
                tools[taking_text.name] = taking_text.as_chat()
                custom.add(taking_text.name)
                asked.append(tool)
                left_out += [f"tools.{taking_text.name}.format"] if taking_text.grammar else []
            case str(kind):
                left_out.append(f"tools.{kind}")
            case _:
                msg = f"Invalid '{where}.type': expected the type of a tool, such as 'function'."
                raise RequestError(msg, param=f"{where}.type", code="invalid_type")
    allowed, chosen = _allowed(choice, tools)
    if chosen not in (None, "auto", "none") and not allowed:
        chosen, left_out = None, [*left_out, "tool_choice"]  # nothing is left that could be called
    elif isinstance(choice, dict) and chosen is None:
        left_out.append("tool_choice")
    told = choice if chosen is not None and choice is not None else "auto"
    return ChatTools(list(allowed.values()), chosen, asked, told, frozenset(custom), left_out)


def _allowed(
    choice: str | dict[str, Any] | None, tools: dict[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], str | dict[str, Any] | None]:
    """Return the tools that may be called, and the choice as a chat has it; None if a choice means no tool here.

    Raises RequestError.
    """
    match choice:
        case None:
            return tools, None
        case str() if choice in _CHOICES:
            return tools, choice
        case {"type": "function" | "custom", "name": str(name)} if name in tools:
            return tools, {"type": "function", "function": {"name": name}}
        case {"type": "function" | "custom", **named}:
            msg = f"Invalid 'tool_choice.name': {named.get('name')!r} is none of 'tools'."
            raise RequestError(msg, param="tool_choice.name", code="invalid_value")
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(some)}:
            names = [tool.get("name") for tool in some if isinstance(tool, Mapping)]
            return {name: tool for name, tool in tools.items() if name in names}, mode
        case {"type": str(kind)} if kind != "allowed_tools":
            return tools, None
    msg = f"Invalid 'tool_choice': expected {', '.join(_CHOICES)}, or an object that names a tool."
    raise RequestError(msg, param="tool_choice", code="invalid_value")
