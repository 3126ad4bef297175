"""Orders of turns for templates that take only some: turns are joined, filled in or told as text. Pure.

OpenAI takes any order, and so do llama-server and Ollama; templates such as Mistral's and Gemma's raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]

INSTRUCTIONS = frozenset({"system", "developer"})  # roles
FILLERS = "", "..."  # what a turn says that nobody said; some templates take no empty one
SHORT_ID = 9  # characters of a call's id, which Mistral's templates insist on


def orders(messages: Messages) -> Iterator[list[Message]]:
    """Yield the messages as one template or another takes them, those first that change the least."""
    if (merged := with_one_system(messages)) is not None:
        yield merged
    one_system = merged or list(messages)
    called = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    ways = [_same, _with_short_ids, _with_single_calls, _told] if called else [_same]
    for way in ways:
        for folded in (False, True):
            for filler in FILLERS:
                told = way(one_system)
                yield alternating(_folded(told) if folded else told, filler)


def may_be_refused(messages: Messages) -> bool:
    """Whether a template that wants strict turns would refuse the order of these."""
    return with_one_system(messages) is not None or alternating(messages, "") != list(messages)


def has_all(text: str, messages: Messages) -> bool:
    """Whether a prompt has what every message says; a template may strip it, and leave out texts beside calls."""
    said = (message.get("content") for message in messages)
    return all(content.strip() in text for content in said if isinstance(content, str))


def with_one_system(messages: Messages) -> list[Message] | None:
    """Return the messages with all instructions in one system message at the begin; None if they are so already.

    Clients put several there, and `developer` ones between the turns.
    """
    said = [m for m in messages if m.get("role") in INSTRUCTIONS]
    if not said or (len(said) == 1 and messages[0].get("role") == "system"):
        return None
    texts = [content for m in said if isinstance(content := m.get("content"), str)]
    rest = [m for m in messages if m.get("role") not in INSTRUCTIONS]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def alternating(messages: Messages, filler: str) -> list[Message]:
    """Join turns of one role; begin with a user's, and answer a tool's result before the user speaks again."""
    found: list[Message] = []
    for message in messages:
        role, before = message.get("role"), found[-1].get("role") if found else "system"
        if role == "assistant" and before == "system":
            found.append({"role": "user", "content": filler})
        elif role == "user" and before == "tool":
            found.append({"role": "assistant", "content": filler})
        elif role == before and role in ("user", "assistant") and not _is_between(found[-1], message):
            found[-1] = _joined(found[-1], message)
            continue
        found.append(message)
    if not found or found[-1].get("role") == "system":
        found.append({"role": "user", "content": filler})
    return found


def _is_between(one: Message, other: Message) -> bool:
    """Whether one has calls and the other goes on behind them."""
    return bool(one.get("tool_calls")) and not other.get("tool_calls") and not other.get("content")


def _joined(one: Message, other: Message) -> dict[str, Any]:
    texts = [text for message in (one, other) if (text := message.get("content"))]
    calls = [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    content = "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else texts
    joined = {**one, **{key: value for key, value in other.items() if value}, "content": content}
    return joined | {"tool_calls": calls} if calls else joined


def _same(messages: Messages) -> list[Message]:
    return list(messages)


def _folded(messages: Messages) -> list[Message]:
    """Put the system message into a user's turn in front of all others."""
    if not messages or messages[0].get("role") != "system":
        return list(messages)
    return [{"role": "user", "content": messages[0].get("content")}, *messages[1:]]


def _with_short_ids(messages: Messages) -> list[Message]:
    """Give calls and their results ids of nine letters and digits."""

    def short(name: object) -> str:
        return hashlib.sha256(str(name).encode("utf-8", "replace")).hexdigest()[:SHORT_ID]

    found: list[Message] = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            changed["tool_call_id"] = short(message["tool_call_id"])
        found.append(changed)
    return found


def _with_single_calls(messages: Messages) -> list[Message]:
    """Give each call a turn of its own, with the result of it behind."""
    results = {m.get("tool_call_id"): m for m in messages if m.get("role") == "tool"}
    found: list[Message] = []
    taken: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in taken:
                found.append(message)
            continue
        for n, call in enumerate(calls):
            found.append({**message, "content": message.get("content") if n == 0 else "", "tool_calls": [call]})
            if (result := results.get(call.get("id"))) is not None and id(result) not in taken:
                found.append(result)
                taken.add(id(result))
    return found


def _told(messages: Messages) -> list[Message]:
    """Tell calls and results as text, for a template that knows of none, or not of these."""
    found: list[Message] = []
    for message in messages:
        changed = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message.get("role") == "tool":
            changed["role"] = "user"
        if calls := message.get("tool_calls"):
            texts = [message.get("content") or "", *(json.dumps(_call(call), ensure_ascii=False) for call in calls)]
            changed["content"] = "\n\n".join(text for text in texts if text)
        found.append(changed)
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {"name": function.get("name"), "arguments": function.get("arguments")}
