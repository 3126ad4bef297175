"""An answer as Anthropic's Messages API has it: a stream of events with blocks, or one message. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import DiscoError
from ..types import Outcome, Side, Token
from .events import named_event
from .shapes import AnswerShape, Ids

Event = dict[str, Any]
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}  # of a chat's reasons
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(error: DiscoError) -> dict[str, Any]:
    """Return an error in Anthropic's shape, with our own code beside it: it tells what this API has no type for."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": str(error)} | ({} if error.code is None else {"code": error.code})
    return {"type": "error", "error": told}


_TEXT: Event = {"type": "text", "text": ""}
_THOUGHT: Event = {"type": "thinking", "thinking": "", "signature": ""}
_JSON = "json"  # of a call that is not whole yet, its arguments as they came


class _Blocks:
    """The blocks of one answer, as events and as they are at its end."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._key = ""  # of the text of the block that is open, "" if none is
        self._pieces: list[str] = []  # of that text
        self._call: int | None = None  # the number of the call that is open, as the chat counts calls

    def events(self, token: Token) -> Iterator[Event]:
        """Yield the events of one token: what was thought, then what was said, then what is called."""
        delta = token.delta or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield from self._grow(_THOUGHT, "thinking", thought)
        if token.text:
            yield from self._grow(_TEXT, "text", token.text)
        for call in delta.get("tool_calls") or ():
            yield from self._called(call)

    def close(self) -> Iterator[Event]:
        """Yield the end of the block that is open, if one is."""
        if self._key:
            self.done[-1][self._key] = "".join(self._pieces)
            yield {"type": "content_block_stop", "index": len(self.done) - 1}
        self._key, self._call = "", None

    def whole(self) -> list[dict[str, Any]]:
        """Close the last block, and return all; the arguments of a call are an object, empty where they are no JSON."""
        for _ in self.close():
            pass
        return [_whole(block) for block in self.done]

    def _grow(self, begin: Mapping[str, Any], key: str, more: str) -> Iterator[Event]:
        if self._key != key:
            yield from self._open(begin, key)
        self._pieces.append(more)
        delta = {"type": f"{key}_delta", key: more}
        yield {"type": "content_block_delta", "index": len(self.done) - 1, "delta": delta}

    def _open(self, begin: Mapping[str, Any], key: str) -> Iterator[Event]:
        yield from self.close()
        self.done.append(dict(begin))
        self._key, self._pieces = key, []
        yield {"type": "content_block_start", "index": len(self.done) - 1, "content_block": dict(begin)}

    def _called(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function, number = call.get("function") or {}, call.get("index") or 0
        if self._call != number:
            begin: Event = {
                "type": "tool_use",
                "id": call.get("id") or "",
                "name": function.get("name") or "",
                "input": {},
            }
            yield from self._open(begin, _JSON)
            self._call = number
        more = function.get("arguments") or ""
        if more:
            self._pieces.append(more)
            delta = {"type": "input_json_delta", "partial_json": more}
            yield {"type": "content_block_delta", "index": len(self.done) - 1, "delta": delta}


class MessagesShape(AnswerShape):
    """One message. It has the state of its stream: whether it has begun, and which block is open."""

    def __init__(self, request_id: str, created: int, model: str) -> None:
        del created
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks, self._has_begun = _Blocks(), False

    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token as events; where the client wants them, each delta has the `side` that made it."""
        del first
        more: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if side is not None:
            more["disco"] = {"side": side}
        sent = self._begun()
        for event in self._blocks.events(token):
            sent += named_event(event | more if more and event["type"] == "content_block_delta" else event)
        return sent

    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the end of the last block, why the message ends, its usage and the `disco` object."""
        del include_usage  # a message always has it
        delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": None}
        ends = [
            *self._blocks.close(),
            {"type": "message_delta", "delta": delta, "usage": _usage(outcome), "disco": outcome.to_json()},
            {"type": "message_stop"},
        ]
        return self._begun() + b"".join(map(named_event, ends))

    def failed(self, error: DiscoError) -> bytes:
        """Return a failure as an event."""
        return self._begun() + named_event(error_body(error))

    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole message; there is one choice."""
        blocks = _Blocks()
        for token in tokens:
            for _ in blocks.events(token):
                pass
        ends = {"stop_reason": _stop_reason(outcome), "stop_sequence": None, "usage": _usage(outcome)}
        found = self._head | {"content": blocks.whole()} | ends | {"disco": outcome.to_json()}
        return found | {"token_ids": ids[0]} if 0 in ids else found

    def sign_of_life(self) -> bytes:
        """Return a ping, which this API's clients know; a message begins before it."""
        return self._begun() + named_event({"type": "ping"})

    def _begun(self) -> bytes:
        """Return the begin of the message, if it has not been sent."""
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = {"input_tokens": 0, "output_tokens": 0}  # nobody has counted yet: the end tells
        message: Event = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event({"type": "message_start", "message": message})


def _stop_reason(outcome: Outcome) -> str:
    return _STOP_REASONS.get(outcome.finish_reason or "stop", "end_turn")


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return Anthropic's usage, in which tokens that came from a cache are not among the input's."""
    prompt, completion = outcome.billed
    cached, written = outcome.cached_tokens, outcome.cache_write_tokens
    return {
        "input_tokens": max(0, prompt - cached - written),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": completion,
    }


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block
    try:
        given = msgspec.json.decode(block[_JSON] or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        given = None
    found = {key: value for key, value in block.items() if key != _JSON}
    return found | {"input": given if isinstance(given, dict) else {}}
