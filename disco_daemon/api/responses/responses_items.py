"""Items of the Responses API as a chat's messages. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from ...errors import RequestError
from ..http.bodies import invalid

CUSTOM_INPUT = "input"  # the one parameter of a function that stands for a tool that takes a text
_OF_THE_MODEL = ("reasoning", "function_call", "custom_tool_call")
_CARRIED = "disco:"  # before a thought that a client carries from one request to the next


class GivenMessage(msgspec.Struct):
    """What somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class GivenCall(msgspec.Struct):
    """A function that the model called, with JSON."""

    call_id: str
    name: str
    arguments: str


class GivenCustomCall(msgspec.Struct):
    """A tool that the model called, with a text."""

    call_id: str
    name: str
    input: str


class GivenOutput(msgspec.Struct):
    """What came of a call."""

    call_id: str
    output: str | list[dict[str, Any]]


class GivenThought(msgspec.Struct):
    """What the model thought: as text, or as this API carries it."""

    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    @property
    def thought(self) -> str:
        """Its text; "" where it cannot be read, since another provider wrote it."""
        parts = [part.get("text") for part in self.content or () if part.get("type") == "reasoning_text"]
        return "".join(text for text in parts if isinstance(text, str)) or uncarried(self.encrypted_content or "")


_S = TypeVar("_S", bound=msgspec.Struct)


def carried(thought: str) -> str:
    """Return a thought as a client carries it to its next request, where that keeps no text of thoughts."""
    return _CARRIED + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def uncarried(text: str) -> str:
    """Return the thought that `carried` made this of; "" for anything else."""
    if not text.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class Messages:
    """A chat's messages, made of items one after the other; `left_out` names what no chat has."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._thought = ""

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add one item. Raises RequestError, which names the parameter below `where`."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind not in _OF_THE_MODEL and item.get("role") != "assistant":
            self.forget()
        match kind:
            case "message":
                self._say(item_of(item, GivenMessage, where), where)
            case "reasoning":
                self._think(item_of(item, GivenThought, where).thought)
            case "function_call":
                call = item_of(item, GivenCall, where)
                self._call(call.call_id, call.name, call.arguments)
            case "custom_tool_call":
                custom = item_of(item, GivenCustomCall, where)
                told = msgspec.json.encode({CUSTOM_INPUT: custom.input}).decode()
                self._call(custom.call_id, custom.name, told)
            case "function_call_output" | "custom_tool_call_output":
                output = item_of(item, GivenOutput, where)
                content = content_of(output.output, f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})
            case "item_reference":
                msg = f"'{where}' refers to an item, and no item is stored here: send the item itself."
                raise RequestError(msg, param=where, code="unsupported_value")
            case str():
                self.left_out.append(f"input.{kind}")
            case _:
                msg = f"Invalid '{where}.type': expected the type of an item, such as 'message'."
                raise RequestError(msg, param=f"{where}.type", code="invalid_type")

    def forget(self) -> None:
        """Leave out a thought that leads to nothing that was said or called."""
        if self._thought:
            self._thought = ""
            self.left_out.append("input.reasoning")

    def instruct(self, text: str) -> None:
        """Add an instruction. Those before all else are one message: many templates know no more than one."""
        if not text:
            return
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def _say(self, said: GivenMessage, where: str) -> None:
        content = content_of(said.content, f"{where}.content")
        if said.role in ("system", "developer"):
            if not isinstance(content, str):
                msg = f"Invalid '{where}.content': an instruction is text only."
                raise RequestError(msg, param=f"{where}.content", code="invalid_value")
            self.instruct(content)
        elif said.role == "user":
            self.messages.append({"role": "user", "content": content})
        elif isinstance(content, str):
            self._answer()["content"] = content
        else:
            msg = f"Invalid '{where}.content': the assistant's is text only."
            raise RequestError(msg, param=f"{where}.content", code="invalid_value")

    def _think(self, thought: str) -> None:
        if thought:
            self._thought = f"{self._thought}\n\n{thought}" if self._thought else thought
        else:
            self.left_out.append("input.reasoning")

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call: to the assistant's message right before it, which said something or called, or alone."""
        last = self.messages[-1] if self.messages else None
        message = last if last is not None and last["role"] == "assistant" and not self._thought else self._answer()
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _answer(self) -> dict[str, Any]:
        """Begin a message of the assistant, with the thought before it."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if self._thought:
            message["reasoning_content"], self._thought = self._thought, ""
        self.messages.append(message)
        return message


def messages_of(instructions: str | None, items: str | list[dict[str, Any]] | None) -> Messages:
    """Return the messages of a request. Raises RequestError, which names the parameter."""
    found = Messages()
    if instructions:
        found.instruct(instructions)
    if isinstance(items, str):
        found.messages.append({"role": "user", "content": items})
    for index, item in enumerate(items if isinstance(items, list) else ()):
        found.add(item, f"input[{index}]")
    found.forget()
    if not found.messages:
        raise RequestError("'input' is missing: a text, or an array of items.", param="input", code="missing_parameter")
    return found


def content_of(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    """Return content as a chat has it: one text, or parts where there is more than text. Raises RequestError."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return one part of a content as a chat has it. Raises RequestError."""
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)} | {
            "type": "refusal",
            "refusal": str(text),
        }:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            detail = part.get("detail")
            return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {})}
        case {"type": "input_file", "file_data": str(data)}:
            return {"type": "file", "file": {"filename": part.get("filename") or "file", "file_data": data}}
        case {"type": "input_audio", "input_audio": dict(audio)}:
            return {"type": "input_audio", "input_audio": audio}
        case {"type": "input_image" | "input_file"}:
            msg = f"Invalid '{where}': its content must be in it (image_url, file_data), since no file is stored here."
            raise RequestError(msg, param=where, code="unsupported_value")
    known = "input_text, output_text, refusal, input_image, input_file or input_audio, with its content"
    raise RequestError(f"Invalid '{where}': expected {known}.", param=where, code="invalid_value")


def item_of(raw: Mapping[str, Any], kind: type[_S], where: str) -> _S:
    """Convert a part of the body. Raises RequestError, which names the parameter below `where`."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise invalid(e, kind, where) from e
