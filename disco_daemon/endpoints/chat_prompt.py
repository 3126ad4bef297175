"""The messages of a chat as the device's chat template reads them. Pure.

Templates expect what Hugging Face Transformers gives them: the arguments of a call as an object, and the name of the
function beside its result, which OpenAI's clients do not repeat. What the model has thought before is there by every
name that templates have for it: each shows of it what its model was trained with, most only behind the last question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..types import Json, text_of

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the names of a thought, by clients and by templates
_NO_OBJECT = (msgspec.MsgspecError, ValueError, RecursionError)  # a ValueError is one of UTF-8


def for_template(messages: Sequence[Json]) -> tuple[Json, ...]:
    """Return the messages with each content as one string, and with the roles that templates know.

    OpenAI's newer name for the system role is unknown to most.
    """
    return tuple(_readable(messages))


def _readable(messages: Sequence[Json]) -> Iterator[dict[str, Any]]:
    called: dict[str, str] = {}  # names of functions by the ids of their calls
    for message in messages:
        role = message["role"]
        made: dict[str, Any] = {
            "role": "system" if role == "developer" else role, "content": text_of(message.get("content"))
        }  # fmt: skip
        if role == "assistant" and (calls := message.get("tool_calls")):
            made["tool_calls"] = [_call(call) for call in calls]
            called |= {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        if role == "assistant" and (thought := _thought(message)):
            made |= dict.fromkeys(THOUGHTS, thought)
            if made["content"] and "tool_calls" in made:  # gpt-oss' template refuses both, and shows the content so
                del made["thinking"]
        if role == "tool":
            made["tool_call_id"] = id_ = message.get("tool_call_id") or ""
            made["name"] = message.get("name") or called.get(id_, "")
        yield made


def _thought(message: Json) -> str:
    """Return what the assistant thought before it said this, as a client gives it back."""
    return next((told for name in THOUGHTS if isinstance(told := message.get(name), str) and told.strip()), "")


def _call(call: Json) -> dict[str, Any]:
    function = call["function"]
    made = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    return {"id": call.get("id") or "", "type": "function", "function": made}


def _arguments(given: object) -> object:
    """Return arguments as an object; as they are, where they are none: a model may have been cut off in its call."""
    if isinstance(given, str) and given.strip():
        try:
            found = msgspec.json.decode(given)
        except _NO_OBJECT:
            return given
        return found if isinstance(found, Mapping) else given
    return given if isinstance(given, Mapping) else {}
