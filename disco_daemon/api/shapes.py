"""The shapes of answers on the wire: what any of them gives, and OpenAI's chunks and bodies. Pure."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import DiscoError
from ..types import Outcome, Side, Token
from .events import DONE, KEEP_ALIVE, comment, event

Ids = Sequence[int]


def error_body(error: DiscoError) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}


class AnswerShape(ABC):
    """One answer as a client's API has it, in the pieces of a stream, each as it is on the wire, or as one body."""

    content_type = "text/event-stream"

    @abstractmethod
    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token, with its `ids` and the `side` that made it where the client wants them."""

    @abstractmethod
    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the end of a whole answer."""

    @abstractmethod
    def failed(self, error: DiscoError) -> bytes:
        """Return a failure in mid-answer; nothing follows it, so that nobody takes the answer for whole."""

    @abstractmethod
    def body(self, tokens: Sequence[Token], ids: Ids | None, outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer."""

    def note(self, text: str) -> bytes:
        """Return a remark between two tokens: a comment, where the shape has such."""
        return comment(text)

    def sign_of_life(self) -> bytes:
        """Return what a stream sends while there is nothing else to send: a comment.

        It may be the first that leaves. A shape whose clients do not count comments overrides it.
        """
        return KEEP_ALIVE


class OpenAIShape(AnswerShape):
    """OpenAI's; `piece` and `whole` are the `object` of a stream's chunks and of a body."""

    prefix = piece = whole = ""

    def __init__(self, request_id: str, created: int, model: str) -> None:
        self._head = {"id": self.prefix + request_id, "created": created, "model": model}
        self._piece = self._head | {"object": self.piece}

    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token as the event of a chunk."""
        return event(self.chunk(token, ids, first=first, side=side))

    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the last chunk, the usage block if it is asked for, and the end. The last has the `disco` object."""
        ends = [self.end(outcome.finish_reason or "stop")]
        if include_usage:
            ends.append(self.bill(outcome))
        ends[-1]["disco"] = outcome.to_json()
        return b"".join(map(event, ends)) + DONE

    def failed(self, error: DiscoError) -> bytes:
        """Return a failure as an event: clients read errors only as data. No [DONE] may follow."""
        return event(error_body(error))

    def chunk(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> dict[str, Any]:
        """Return one token of a stream, with its `ids` and the `side` that made it where the client wants them.

        `ids` are None where they are not known. With the side goes whether it was made by a part of a model alone.
        """
        choice = self._choice(token, first=first)
        if ids is not None:
            choice["token_ids"] = ids
        made = self._piece | {"choices": [choice]}
        if side is None:
            return made
        return made | {"disco": {"side": side, "alone": True} if token.alone else {"side": side}}

    def end(self, finish_reason: str) -> dict[str, Any]:
        """Return the last chunk with a choice."""
        return self._piece | {"choices": [self._choice(Token("", 0), first=False) | {"finish_reason": finish_reason}]}

    def bill(self, outcome: Outcome) -> dict[str, Any]:
        """Return the chunk after the last, with the usage block."""
        return self._piece | {"choices": [], "usage": _usage(outcome)}

    def body(self, tokens: Sequence[Token], ids: Ids | None, outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer."""
        choice = self._join(tokens) | {"finish_reason": outcome.finish_reason or "stop"}
        if ids is not None:
            choice["token_ids"] = ids
        found = self._head | {"object": self.whole, "choices": [choice]}
        return found | {"usage": _usage(outcome), "disco": outcome.to_json()}

    @abstractmethod
    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        """Return a token, or an empty one, as the choice of a chunk."""

    @abstractmethod
    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return all tokens as the choice of a body."""


class TextShape(OpenAIShape):
    """`text_completion`, in chunks and whole. Only plain text comes this way."""

    prefix, piece, whole = "cmpl-", "text_completion", "text_completion"

    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        del first
        return {"index": 0, "text": token.text, "logprobs": None, "finish_reason": None}

    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"index": 0, "text": "".join(t.text for t in tokens), "logprobs": None}


class ChatShape(OpenAIShape):
    """`chat.completion.chunk` and `chat.completion`."""

    prefix, piece, whole = "chatcmpl-", "chat.completion.chunk", "chat.completion"

    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if token.text or first:
            delta["content"] = token.text
        if token.delta:
            delta |= token.delta
        return {"index": 0, "delta": delta, "logprobs": token.logprobs, "finish_reason": None}

    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(t.text for t in tokens)}
        logprobs: list[Any] = []
        for token in tokens:
            if token.delta:
                _merge(message, copy.deepcopy(dict(token.delta)))  # tokens are frozen, and merging writes
            if token.logprobs:
                logprobs += token.logprobs.get("content") or []
        if message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in message["tool_calls"]]
            message["content"] = message["content"] or None
        return {"index": 0, "message": message, "logprobs": {"content": logprobs} if logprobs else None}


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return OpenAI's usage block."""
    prompt, completion = outcome.billed
    written, cost = outcome.cache_write_tokens, outcome.told_cost
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens}
        | ({"cache_write_tokens": written} if written else {}),
        "completion_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
    } | ({} if cost is None else {"cost": cost})


def _merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message: strings grow, lists are joined by `index`, the rest is set."""
    for key, value in delta.items():
        old = into.get(key)
        if isinstance(value, str) and isinstance(old, str) and key not in ("id", "type", "role"):
            into[key] = old + value
        elif isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, list):
            items = into.setdefault(key, [])
            for item in value:
                index = item.get("index") if isinstance(item, dict) else None
                slot = None if index is None else next((i for i in items if i.get("index") == index), None)
                if slot is None:
                    items.append(item)
                else:
                    _merge(slot, item)
        else:
            into[key] = value
