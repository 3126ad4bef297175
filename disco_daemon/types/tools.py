"""The tools that an answer may call, as the parameters of a request say it. Pure.

The parameters are OpenAI's. What no endpoint can mean is a WishError; what only the device cannot do, a Refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from .fields import Json
from .needs import Refusal, WishError, form_parameter

_FUNCTION = "function"


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tools that the model is told of, as OpenAI writes them, and which of them it may call, by name.

    `forced`: the answer has to be a call. `parallel`: it may be several.
    """

    tools: tuple[dict[str, Any], ...]
    allowed: tuple[str, ...]
    forced: bool = False
    parallel: bool = True


def tool_use(parameters: Json) -> ToolUse | None:
    """Return the tools that may be called; None where none may. The parameters are as `refused_tools` takes them."""
    tools = parameters.get("tools")
    if not isinstance(tools, list) or not tools:
        return None
    mode, names = _choice(parameters.get("tool_choice"))
    if mode == "none":
        return None
    known = tuple(_name_of(tool) for tool in tools)
    return ToolUse(
        tools=tuple(tools),
        allowed=known if names is None else tuple(name for name in known if name in names),
        forced=mode == "required",
        parallel=parameters.get("parallel_tool_calls") is not False and not _is_named(parameters.get("tool_choice")),
    )


def check_tools(parameters: Json) -> None:
    """Raise WishError for tools that have no name, and for a choice of one that is not there."""
    tools = parameters.get("tools") or []
    for index, tool in enumerate(tools):
        if tool.get("type", _FUNCTION) == _FUNCTION:
            _check_function(tool.get(_FUNCTION), f"tools[{index}].{_FUNCTION}")
        elif not isinstance(tool["type"], str):
            _refuse(f"tools[{index}].type", "the name of a kind of tool, such as 'function'")
    mode, names = _choice(parameters.get("tool_choice"))
    if mode == "required" and not tools:
        raise WishError("'tool_choice' asks for a call, and there are no 'tools' to be called.", "tool_choice")
    missing = sorted(set(names or ()) - {_name_of(tool) for tool in tools})
    if missing:
        msg = f"'tool_choice' names {missing[0]!r:.80}, and 'tools' has no function of that name."
        raise WishError(msg, "tool_choice")


def refused_tools(parameters: Json) -> Refusal | None:
    """Return why the device cannot be asked so for calls, whatever its model is."""
    tools = parameters.get("tools") or []
    mode, names = _choice(parameters.get("tool_choice"))
    if not tools or mode == "none":
        return None
    if not mode or names == ():
        return Refusal(
            "tool_choice must be none, auto, required, one function or allowed_tools for the device", "tool_choice"
        )
    if form := form_parameter(parameters):
        return Refusal(f"an answer of the device has a form or tools to call: leave out {form} or tools", form)
    return None


def _check_function(function: object, where: str) -> None:
    if not isinstance(function, Mapping):
        _refuse(where, "an object with a name")
    name, parameters = function.get("name"), function.get("parameters")
    if not (isinstance(name, str) and name):
        _refuse(f"{where}.name", "the name of a function")
    if not isinstance(parameters, Mapping | None):
        _refuse(f"{where}.parameters", "a JSON schema, an object")
    if not isinstance(function.get("description"), str | None):
        _refuse(f"{where}.description", "a text")


def _refuse(where: str, expected: str) -> NoReturn:
    raise WishError(f"Invalid value for '{where}': expected {expected}.", where)


def _choice(given: object) -> tuple[str, tuple[str, ...] | None]:
    """Return none, auto or required, and the names to choose from, if there are any; what nobody knows is empty."""
    match given:
        case None:
            return "auto", None
        case "none" | "auto" | "required":
            return str(given), None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", (name,)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return str(mode), tuple(_name_of(tool) for tool in tools)
        case _:
            return "", None


def _is_named(choice: object) -> bool:
    """Whether a choice is of one function, which is then called once."""
    return isinstance(choice, Mapping) and choice.get("type") == _FUNCTION


def _name_of(tool: object) -> str:
    """Return the name of a function; empty for another kind of tool."""
    match tool:
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case _:
            return ""
