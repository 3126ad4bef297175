"""A request of Anthropic's Messages API as a chat: blocks become messages, what no chat has is left out by name. Pure.

docs/reference/api.md#messages says what becomes of each field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import RequestError
from ...types.needs import LOW, MEDIUM
from ..http.bodies import convert
from ..openai.openai_request import MAX_INT

# The first line that Claude Code sends changes with each request, and no cached prompt would ever fit again.
BILLING = "x-anthropic-billing-header:"
ERROR = "Error: "  # before what a tool says that has failed, since a chat has no other mark for it
_ROLES = ("user", "assistant", "system")
_PASSED = ("model", "stream", "temperature", "top_p", "top_k", "disco")  # a chat has them by the same names
_HARMLESS = frozenset({"metadata", "service_tier", "inference_geo", "cache_control", "diagnostics"})
_CACHED = "cache_control"


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The fields that a chat has by other names, or in another form."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MessagesAsked:
    """A request as a chat; `left_out` names what the chat lacks."""

    chat: dict[str, Any]
    left_out: tuple[str, ...] = ()


def to_chat(raw: dict[str, Any], *, counts: bool = False) -> MessagesAsked:
    """Return a request as a chat. Raises RequestError; one that only `counts` its tokens needs no `max_tokens`."""
    asked = convert(raw, MessagesRequest)
    if asked.max_tokens is None and not counts:
        raise RequestError("'max_tokens' is missing: say how long the answer may be.", param="max_tokens")
    translation = _Translation()
    chat: dict[str, Any] = {name: raw[name] for name in _PASSED if raw.get(name) is not None}
    chat["messages"] = translation.messages(asked)
    if asked.max_tokens is not None:
        chat["max_tokens"] = asked.max_tokens
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    chat |= translation.tools(asked.tools or [], asked.tool_choice or {})
    chat |= translation.thinking(asked.thinking or {}, asked.output_config or {})
    if (budget := _budget(asked.thinking or {})) is not None and isinstance(own := chat.get("disco", {}), dict):
        chat["disco"] = {"thinking_tokens": budget} | own  # no server gets it, but the effort in its place
    chat |= translation.form((asked.output_config or {}).get("format") or asked.output_format)
    known = {*MessagesRequest.__struct_fields__, *_PASSED} | _HARMLESS
    translation.left_out += [name for name, value in raw.items() if name not in known and value is not None]
    return MessagesAsked(chat, tuple(dict.fromkeys(translation.left_out)))


def _budget(thinking: Mapping[str, Any]) -> int | None:
    """Return how many tokens a thought may have, None if it is not said."""
    budget = thinking.get("budget_tokens") if thinking.get("type") == "enabled" else None
    return min(budget, MAX_INT) if type(budget) is int and budget >= 0 else None


class _Translation:
    """Translates the parts of one request; `left_out` grows by what no chat has."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    # --- messages ------------------------------------------------------------------------------------------------

    def messages(self, asked: MessagesRequest) -> list[dict[str, Any]]:
        """Return the conversation; an answer that the client has begun is its last message, to be continued."""
        made = [*self._system(asked.system)]
        for i, message in enumerate(asked.messages):
            role, where = message.get("role"), f"messages[{i}]"
            if role not in _ROLES:
                msg = f"Invalid value for '{where}.role': {role!r}; expected user or assistant."
                raise RequestError(msg, param=f"{where}.role", code="invalid_value")
            blocks = _blocks(message.get("content"), f"{where}.content")
            made += self._said(blocks, where) if role == "assistant" else self._asked(role, blocks, where)
        if made and made[-1]["role"] == "assistant" and not made[-1].get("tool_calls"):
            made[-1]["prefix"] = True
        return made

    def _system(self, system: str | list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
        parts = []
        for block in _blocks(system or [], "system"):
            text = without_billing(_text(block, "system"))
            if text:
                parts.append(_part(block, text))
        if parts:
            yield {"role": "system", "content": _content(parts)}

    def _asked(self, role: str, blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
        """Yield what tools have given, each a message of its own, and what the user says after it."""
        parts: list[dict[str, Any]] = []
        for j, block in enumerate(blocks):
            at = f"{where}.content[{j}]"
            match block["type"]:
                case "tool_result":
                    result, seen = self._result(block, at)
                    yield result
                    parts += seen
                case kind if (part := self._part(kind, block, at)) is not None:
                    parts.append(part)
        if parts:
            yield {"role": role, "content": _content(parts)}

    def _result(self, block: Mapping[str, Any], at: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what a tool has given as text, and its images, which a chat has in a user's message."""
        parts = []
        for k, inner in enumerate(_blocks(block.get("content") or [], f"{at}.content")):
            part = self._part(inner["type"], inner, f"{at}.content[{k}]")
            parts += [] if part is None else [part]
        text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
        if block.get("is_error"):
            text = ERROR + text
        message = {"role": "tool", "tool_call_id": _name(block, "tool_use_id", at), "content": text}
        return message, [part for part in parts if part["type"] != "text"]

    def _part(self, kind: str, block: Mapping[str, Any], at: str) -> dict[str, Any] | None:
        """Return a block as a part of a chat's message; None for one that no chat has."""
        match kind, block.get("source"):
            case "text", _:
                return _part(block, _text(block, at))
            case "image", {"type": "base64", "media_type": str(media), "data": str(data)}:
                return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
            case "image", {"type": "url", "url": str(url)}:
                return {"type": "image_url", "image_url": {"url": url}}
            case "document", {"type": "text", "data": str(data)}:
                return _part(block, data)
            case "document", {"type": "base64", "media_type": str(media), "data": str(data)}:
                name = str(block.get("title") or "document.pdf")
                return {"type": "file", "file": {"filename": name, "file_data": f"data:{media};base64,{data}"}}
            case "image" | "document", _:
                msg = f"Invalid value for '{at}.source': it has to be base64, text or a url; files are not stored here."
                raise RequestError(msg, param=f"{at}.source", code="invalid_value")
            case "tool_use", _:
                msg = f"Invalid '{at}': a call stands in a message of the assistant."
                raise RequestError(msg, param=at, code="invalid_value")
        self.left_out.append(f"messages.{kind}")
        return None

    def _said(self, blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
        """Yield what the assistant has said, thought and called, as one message."""
        texts, thoughts, calls = [], [], []
        for j, block in enumerate(blocks):
            at = f"{where}.content[{j}]"
            match block["type"]:
                case "text":
                    texts.append(_text(block, at))
                case "thinking":
                    thoughts.append(str(block.get("thinking") or ""))
                case "tool_use":
                    arguments = msgspec.json.encode(block.get("input") or {}).decode()
                    function = {"name": _name(block, "name", at), "arguments": arguments}
                    calls.append({"id": _name(block, "id", at), "type": "function", "function": function})
                case kind:
                    self.left_out.append(f"messages.{kind}")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        if texts or calls:
            yield message

    # --- the rest ------------------------------------------------------------------------------------------------

    def tools(self, tools: Iterable[dict[str, Any]], choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return tools and the choice among them; those that Anthropic runs itself are left out."""
        made = []
        for i, tool in enumerate(tools):
            if (kind := tool.get("type") or "custom") != "custom":
                self.left_out.append(f"tools.{kind}")
                continue
            function = {"name": _name(tool, "name", f"tools[{i}]"), "parameters": tool.get("input_schema") or {}}
            function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
            made.append({"type": "function", "function": function})
        if not made:
            return {}
        found: dict[str, Any] = {"tools": made}
        match choice.get("type"):
            case None:
                pass
            case "auto" | "none" as kind:
                found["tool_choice"] = kind
            case "any":
                found["tool_choice"] = "required"
            case "tool":
                named = {"name": _name(choice, "name", "tool_choice")}
                found["tool_choice"] = {"type": "function", "function": named}
            case kind:
                msg = f"Invalid value for 'tool_choice.type': {kind!r}; expected auto, any, tool or none."
                raise RequestError(msg, param="tool_choice.type", code="invalid_value")
        if choice.get("disable_parallel_tool_use"):
            found["parallel_tool_calls"] = False
        return found

    def thinking(self, thinking: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether to think, and how much; a budget is told as an effort, which is what servers know."""
        effort, budget = config.get("effort"), thinking.get("budget_tokens")
        match thinking.get("type"):
            case "disabled":
                return {"thinking": {"type": "disabled"}}
            case "enabled" if effort is None and isinstance(budget, int):
                effort = "low" if budget <= LOW else "medium" if budget <= MEDIUM else "high"
            case None | "enabled" | "adaptive":
                pass
            case kind:
                msg = f"Invalid value for 'thinking.type': {kind!r}; expected enabled, adaptive or disabled."
                raise RequestError(msg, param="thinking.type", code="invalid_value")
        return {} if effort is None else {"reasoning_effort": effort}

    def form(self, form: object) -> dict[str, Any]:
        """Return the form that the answer is to have."""
        match form:
            case None:
                return {}
            case {"type": "json_schema", "schema": dict() as schema}:
                named = {"name": "answer", "schema": schema, "strict": True}
                return {"response_format": {"type": "json_schema", "json_schema": named}}
        msg = "Invalid value for 'output_config.format': expected a type of json_schema, and its schema."
        raise RequestError(msg, param="output_config.format", code="invalid_value")


def without_billing(text: str) -> str:
    """Return a text without the billing line that it begins with, if it does."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    """Return a content as its blocks. Raises RequestError for what is neither a text nor blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(
        isinstance(b, dict) and isinstance(b.get("type"), str) for b in content
    ):
        msg = f"Invalid '{where}': expected a text, or blocks that each have a 'type'."
        raise RequestError(msg, param=where, code="invalid_type")
    return content


def _text(block: Mapping[str, Any], at: str) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        msg = f"Invalid '{at}': expected a block of type text, with its text."
        raise RequestError(msg, param=at, code="invalid_type")
    return text


def _part(block: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a text as a part of a message. Where the cache is to be written, a server may be paid by."""
    part: dict[str, Any] = {"type": "text", "text": text}
    return part | {_CACHED: block[_CACHED]} if block.get(_CACHED) is not None else part


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as the content of a message: one text, where they are no more than texts."""
    if all(part.keys() == {"type", "text"} for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _name(of: Mapping[str, Any], key: str, where: str) -> str:
    name = of.get(key)
    if not isinstance(name, str) or not name:
        msg = f"Invalid '{where}': it needs a text as its '{key}'."
        raise RequestError(msg, param=f"{where}.{key}", code="invalid_type")
    return name
