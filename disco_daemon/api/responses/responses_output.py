"""The output of a response as it comes: items, and the events that tell of them. Pure.

At most one item of text is open at a time, a thought or a message; calls stay open until the answer ends, since a
server may give several at once. Events are without their numbers: the stream counts them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgspec

from ...types import CallPart
from .responses_items import CUSTOM_INPUT, carried

Event = dict[str, Any]

_DONE = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}  # of each part, the key of its text


class OutputItem(ABC):
    """One item of the output, at `index`."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.is_open = True
        self.status = "in_progress"

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return it as it is now."""

    @abstractmethod
    def finish(self) -> Iterator[Event]:
        """Yield what tells that its content is whole."""

    def begin(self) -> Event:
        """Return the event that it is there."""
        return self.event("response.output_item.added", item=self.as_json())

    def close(self, status: str) -> Iterator[Event]:
        """Yield its last events."""
        yield from self.finish()
        self.is_open, self.status = False, status
        yield self.event("response.output_item.done", item=self.as_json())

    def event(self, kind: str, **more: Any) -> Event:
        """Return an event of this item."""
        return {"type": kind, "item_id": self.name, "output_index": self.index, **more}


class TextItem(OutputItem):
    """What is said or thought: parts, of which the last may be open."""

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, name)
        self._parts: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, kind: str, text: str, more: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of more text in a part of this kind."""
        if not self._parts or self._parts[-1]["type"] != kind:
            yield from self.finish()
            self._parts.append(self._empty(kind))
            yield self._of_part("response.content_part.added", part=dict(self._parts[-1]))
        self._pieces.append(text)
        if logprobs := more.get("logprobs"):
            self._logprobs += logprobs
        yield self._of_part(f"response.{kind}.delta", delta=text, **more)

    def finish(self) -> Iterator[Event]:
        if not self._parts or not self._pieces:
            return
        part = self._parts[-1]
        kind, key = part["type"], _DONE[part["type"]]
        part[key], self._pieces = "".join(self._pieces), []
        more = {}
        if kind == "output_text":
            part["logprobs"], self._logprobs = self._logprobs, []
            more = {"logprobs": part["logprobs"]}
        yield self._of_part(f"response.{kind}.done", **{key: part[key]}, **more)
        yield self._of_part("response.content_part.done", part=dict(part))

    def _of_part(self, event: str, **more: Any) -> Event:
        index = len(self._parts) - 1
        return {"type": event, "item_id": self.name, "output_index": self.index, "content_index": index, **more}

    @staticmethod
    def _empty(kind: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": kind, _DONE[kind]: ""}
        return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


class MessageItem(TextItem):
    """What the model says: text, or why it does not want to say any."""

    def as_json(self) -> dict[str, Any]:
        content = [dict(part) for part in self._parts]
        return {"id": self.name, "type": "message", "status": self.status, "role": "assistant", "content": content}


class ThoughtItem(TextItem):
    """What the model thinks; where it `carries`, with the thought as the client can give it back."""

    def __init__(self, index: int, name: str, *, carries: bool) -> None:
        super().__init__(index, name)
        self._carries = carries

    def as_json(self) -> dict[str, Any]:
        content = [dict(part) for part in self._parts]
        found = {"id": self.name, "type": "reasoning", "status": self.status, "summary": [], "content": content}
        if self._carries and not self.is_open:
            found["encrypted_content"] = carried("".join(part["text"] for part in content))
        return found


class CallItem(OutputItem):
    """A function that the model calls, with JSON."""

    def __init__(self, index: int, name: str, call_id: str, function: str) -> None:
        super().__init__(index, name)
        self._call = {"call_id": call_id, "name": function}
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """The JSON so far."""
        return "".join(self._pieces)

    def as_json(self) -> dict[str, Any]:
        given = {"arguments": "" if self.is_open else self.arguments}
        return {"id": self.name, "type": "function_call", "status": self.status} | self._call | given

    def add(self, arguments: str) -> Iterator[Event]:
        """Yield the events of more of its JSON."""
        self._pieces.append(arguments)
        yield self.event("response.function_call_arguments.delta", delta=arguments)

    def finish(self) -> Iterator[Event]:
        yield self.event("response.function_call_arguments.done", name=self._call["name"], arguments=self.arguments)


class CustomCallItem(CallItem):
    """A tool that the model calls with a text, which it gave as JSON: only its end says what the text is."""

    @property
    def input(self) -> str:
        """The text; what is no such JSON is taken for the text itself."""
        try:
            found = msgspec.json.decode(self.arguments)
        except (msgspec.MsgspecError, RecursionError):
            return self.arguments
        text = found.get(CUSTOM_INPUT, None if found else "") if isinstance(found, dict) else None
        return text if isinstance(text, str) else self.arguments

    def as_json(self) -> dict[str, Any]:
        given = {"input": "" if self.is_open else self.input}
        return {"id": self.name, "type": "custom_tool_call", "status": self.status} | self._call | given

    def add(self, arguments: str) -> Iterator[Event]:
        """Keep more of its JSON, which no client is to see."""
        self._pieces.append(arguments)
        yield from ()

    def finish(self) -> Iterator[Event]:
        yield self.event("response.custom_tool_call_input.delta", delta=self.input)
        yield self.event("response.custom_tool_call_input.done", input=self.input)


class Output:
    """All items of one response; `custom` are the names of tools that take a text."""

    def __init__(self, name: str, custom: frozenset[str] = frozenset(), *, carries_thoughts: bool = False) -> None:
        self._name, self._custom, self._carries = name, custom, carries_thoughts
        self._items: list[OutputItem] = []
        self._open: TextItem | None = None
        self._calls: dict[int, CallItem] = {}

    def said(self, text: str, more: Mapping[str, Any]) -> Iterator[Event]:
        """Return the events of more text of the answer."""
        return self._add(MessageItem, "output_text", text, more)

    def refused(self, text: str) -> Iterator[Event]:
        """Return the events of more words of a refusal."""
        return self._add(MessageItem, "refusal", text, {})

    def thought(self, text: str) -> Iterator[Event]:
        """Return the events of more of a thought."""
        return self._add(ThoughtItem, "reasoning_text", text, {})

    def called(self, piece: CallPart) -> Iterator[Event]:
        """Yield the events of a piece of a call."""
        item = self._calls.get(piece.number)
        if item is None:
            item = yield from self._begin(piece)
        if piece.arguments:
            yield from item.add(piece.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the ends of all that is open, which then is `completed` or `incomplete`."""
        for item in self._items:
            if item.is_open:
                yield from item.close(status)
        self._open = None

    def done(self) -> list[dict[str, Any]]:
        """Return the items that are whole."""
        return [item.as_json() for item in self._items if not item.is_open]

    def _add(self, kind: type[TextItem], part: str, text: str, more: Mapping[str, Any]) -> Iterator[Event]:
        """Return the events of more text in an item of this kind: nearly always of the one that is open."""
        if isinstance(self._open, kind):
            return self._open.add(part, text, more)
        return self._add_item(kind, part, text, more)

    def _add_item(self, kind: type[TextItem], part: str, text: str, more: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a new item with its first text."""
        yield from self._close_text()
        index = len(self._items)
        if kind is ThoughtItem:
            self._open = ThoughtItem(index, f"rs_{self._name}_{index}", carries=self._carries)
        else:
            self._open = MessageItem(index, f"msg_{self._name}_{index}")
        self._items.append(self._open)
        yield self._open.begin()
        yield from self._open.add(part, text, more)

    def _begin(self, piece: CallPart) -> Generator[Event, None, CallItem]:
        """Yield the event that a call is there, and return it."""
        yield from self._close_text()
        index = len(self._items)
        kind, prefix = (CustomCallItem, "ctc") if piece.name in self._custom else (CallItem, "fc")
        item = self._calls[piece.number] = kind(index, f"{prefix}_{self._name}_{index}", piece.id, piece.name)
        self._items.append(item)
        yield item.begin()
        return item

    def _close_text(self) -> Iterator[Event]:
        """Yield the end of the thought or message that is open."""
        text, self._open = self._open, None
        if text is not None:
            yield from text.close("completed")


def logprobs_of(told: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a chat's log-probabilities as this API has them."""
    found = told.get("content") if told else None
    if not found:
        return []
    return [_logprob(one) | {"top_logprobs": [_logprob(top) for top in one["top_logprobs"]]} for one in found]


def _logprob(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": one["token"], "logprob": one["logprob"], "bytes": one["bytes"] or []}
