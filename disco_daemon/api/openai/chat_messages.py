"""The messages of a chat request: checked, and as endpoints get them. Pure."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import RequestError
from ...types import is_text, text_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_message(index: int, message: dict[str, Any]) -> None:
    """Raise RequestError for a message, the one of this number, that no endpoint can read."""
    role = message.get("role")
    if role not in ROLES:
        msg = f"Invalid value for 'messages[{index}].role': {role!r}; expected one of {', '.join(ROLES)}."
        raise RequestError(msg, param=f"messages[{index}].role", code="invalid_value")
    _check_calls(index, message)
    content = message.get("content")
    if content is None and role == "assistant":
        return
    if not isinstance(content, str | list):
        msg = f"Invalid type for 'messages[{index}].content': expected a string or an array of content parts."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_type")
    if content == []:
        msg = f"Invalid 'messages[{index}].content': it has no content parts. Give some, or a string."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_value")
    if isinstance(content, list) and not all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in content):
        msg = f"Invalid 'messages[{index}].content': each part must be an object with a 'type'."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_type")
    if isinstance(content, list) and any(p["type"] == "text" and not isinstance(p.get("text"), str) for p in content):
        msg = f"Invalid 'messages[{index}].content': a part of the type 'text' must have a string 'text'."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_type")


def _check_calls(index: int, message: dict[str, Any]) -> None:
    """Raise RequestError for calls of tools that nobody can read, and for a result of no call."""
    calls, called = message.get("tool_calls"), message.get("tool_call_id")
    if not isinstance(called, str | None):
        _refuse(f"messages[{index}].tool_call_id", "the id of a call")
    if not isinstance(calls, list | None):
        _refuse(f"messages[{index}].tool_calls", "an array of calls")
    for number, call in enumerate(calls or []):
        where = f"messages[{index}].tool_calls[{number}]"
        if not isinstance(call, dict) or not isinstance(call.get("id"), str | None):
            _refuse(where, "an object with an id and a function")
        if call.get("type", "function") != "function":
            continue  # of another kind: a server may know it
        function = call.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            _refuse(f"{where}.function", "an object with a name and arguments")
        if not isinstance(function.get("arguments"), str | dict | None):
            _refuse(f"{where}.function.arguments", "the text of a JSON object")


def _refuse(where: str, expected: str) -> NoReturn:
    raise RequestError(f"Invalid value for '{where}': expected {expected}.", param=where, code="invalid_type")


def flattened(message: dict[str, Any]) -> dict[str, Any]:
    """Join text parts into one string, which every server's chat template understands.

    Parts that say more than their text stay: a `cache_control` is worth money, and the device joins them by itself.
    """
    content = message.get("content")
    if isinstance(content, list) and all(p.keys() == {"type", "text"} for p in content) and is_text(content):
        return {**message, "content": text_of(content)}
    return message


def has_text_only(message: dict[str, Any]) -> bool:
    """Whether a message is text alone, calls of functions and their results too: no image, and no older `function`."""
    calls = message.get("tool_calls") or []
    functions_only = all(call.get("type", "function") == "function" for call in calls)
    old = message["role"] == "function" or message.get("function_call")
    return is_text(message.get("content")) and functions_only and not old


def begun_text(message: dict[str, Any]) -> str:
    """Return the text of a message that is to be continued. Raises RequestError."""
    content = message.get("content")
    if not is_text(content) or message.get("tool_calls"):
        raise RequestError("Only a message of plain text can be continued.", param="messages")
    return text_of(content)
