"""Which tools a model can be offered, by the format of its template; without llama.cpp, for both processes. Pure."""

from __future__ import annotations

from ..tools.format import Tool, ToolError, tools_of
from ..tools.formats import GENERIC
from ..types import ToolUse
from .schema import SchemaError, check_tools

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
    try:
        check_tools({tool.name: tool.parameters for tool in tools})
    except SchemaError as e:
        raise ToolError(str(e)) from e
    return tools
