"""Which tools a model can be offered, by the format of its template; without llama.cpp, for both processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..tools.format import Tool, ToolError, tools_of
from ..tools.formats import GENERIC
from ..types import ToolUse
from .constraints import MAX_OPTIONAL, SchemaError, check_tools

NOT_BY_ITSELF = (
    "the model's chat template knows no tools, so that the device cannot leave it to the model whether to call one: "
    "ask for a call (tool_choice required, or one function), or for an answer of a model that knows tools"
)


def offered(use: ToolUse, tool_format: str) -> tuple[Tool, ...]:
    """Return the tools to tell the model of. Raises ToolError with a reason that is fit for a user.

    `tool_format` is the name of the format; empty while it is not known.
    """
    if tool_format == GENERIC.name and not use.forced:
        raise ToolError(NOT_BY_ITSELF)
    tools = tools_of(use.tools)
    _costly(tools, use)
    return tools


def callable_tools(tools: tuple[Tool, ...], use: ToolUse) -> tuple[Tool, ...]:
    """Return those of the tools that may be called, as their calls are to be written. Raises ToolError.

    Where the model may also say something, a tool whose schema no grammar can have keeps the names and types of its
    arguments only.
    """
    costly = _costly(tools, use)
    return tuple(
        replace(tool, parameters=_loose(tool.parameters)) if tool.name in costly else tool
        for tool in tools
        if tool.name in use.allowed
    )


def _loose(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of the same arguments, with their types; of any, where there are too many."""
    listed, required = schema.get("properties"), schema.get("required")
    if not isinstance(listed, Mapping) or len(listed) > MAX_OPTIONAL:
        return {"type": "object"}
    kinds = {name: part.get("type") if isinstance(part, Mapping) else None for name, part in listed.items()}
    return {
        "type": "object",
        "properties": {name: {"type": kind} if isinstance(kind, str) else {} for name, kind in kinds.items()},
        "required": [name for name in required if name in listed] if isinstance(required, list) else [],
    }


def _costly(tools: tuple[Tool, ...], use: ToolUse) -> frozenset[str]:
    try:
        return check_tools({tool.name: tool.parameters for tool in tools}, lenient=not use.forced)
    except SchemaError as e:
        raise ToolError(str(e)) from e
