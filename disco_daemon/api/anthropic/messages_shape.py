"""An answer as Anthropic's Messages API has it: a stream of events with blocks, or one message. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import DiscoError
from ...types import CallPart, FinishReason, ObjectScan, Outcome, Side, Token
from ..http.events import KEEP_ALIVE, named_event
from ..openai.shapes import AnswerShape, Ids, arguments_of

Event = dict[str, Any]
_STOP_REASONS: dict[str | None, str] = {
    FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.FUNCTION_CALL: "tool_use", FinishReason.CONTENT_FILTER: "refusal",
}  # fmt: skip
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


_TOO_LONG = "context_length_exceeded"
# As the daemon, its engine and OpenAI say it. Agents make a conversation shorter at Anthropic's words only.
_LENGTHS = re.compile(
    r"maximum context length is (\d+) tokens.*?(?:has|have|resulted in|requested) (?:about )?(\d+)", re.DOTALL
)


def error_body(error: DiscoError) -> dict[str, Any]:
    """Return an error in Anthropic's shape, with our own code beside it: it tells what this API has no type for."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = str(error)
    if error.code == _TOO_LONG and (lengths := _LENGTHS.search(text)):
        kind, text = "invalid_request_error", f"prompt is too long: {lengths[2]} tokens > {lengths[1]} maximum. {text}"
    told = {"type": kind, "message": text} | ({} if error.code is None else {"code": error.code})
    return {"type": "error", "error": told}


_TEXT: Event = {"type": "text", "text": ""}
_THOUGHT: Event = {"type": "thinking", "thinking": "", "signature": ""}


class _Block:
    """One block of an answer: text, a thought or a call. `waiting` are the pieces that have not been sent."""

    def __init__(self, head: Event, key: str, call: CallPart | None = None) -> None:
        self.head, self.key, self.call = head, key, call
        self.pieces: list[str] = []
        self.waiting: list[str] = []
        self.is_blank = call is None  # as long as it has nothing but white space
        self._scan = ObjectScan()

    def add(self, text: str) -> None:
        """Take the next piece."""
        self.pieces.append(text)
        self.waiting.append(text)
        self.is_blank = self.is_blank and text.isspace()
        if self.call is not None:
            self._scan.feed(text)

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it can come, once another block has begun."""
        return self.call is None or self._scan.is_whole

    def delta(self, text: str) -> Event:
        """Return a piece as an event has it."""
        if self.call is not None:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.key}_delta", self.key: text}

    def whole(self) -> Event:
        """Return it as a body has it; the arguments of a call are an object, empty where they are no JSON."""
        text = "".join(self.pieces)
        return self.head | ({self.key: text} if self.call is None else {"input": arguments_of(text)})


class _Blocks:
    """The blocks of one answer, as events and as they are at its end.

    One block is open at a time, and none can be opened again. So what comes of another one waits until the call that
    is open is whole, as a server may tell of several calls by turns, with white space between their pieces.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # those that were begun, in order
        self._at = 0  # of the one that is sent
        self._calls: dict[int, _Block] = {}
        self._n_opened, self._is_open = 0, False

    def events(self, token: Token) -> Iterator[Event]:
        """Yield the events of one token: what was thought, then what was said, then what is called."""
        if token.delta is None:
            self._grow(_TEXT, "text", token.text)
            return self._sent()
        if token.delta.thought:
            self._grow(_THOUGHT, "thinking", token.delta.thought)
        self._grow(_TEXT, "text", token.text)
        self._grow(_TEXT, "text", token.delta.refusal)
        for piece in token.delta.calls:
            self._called(piece)
        return self._sent()

    def close(self) -> Iterator[Event]:
        """Yield the rest of all blocks, and their ends."""
        return self._sent(is_end=True)

    def whole(self) -> list[Event]:
        """Return all blocks."""
        return [block.whole() for at, block in enumerate(self._blocks) if not self._is_void(at)]

    def _grow(self, head: Event, key: str, text: str) -> None:
        if text:
            if not self._blocks or self._blocks[-1].key != key:
                self._blocks.append(_Block(head, key))
            self._blocks[-1].add(text)

    def _called(self, piece: CallPart) -> None:
        block = self._calls.get(piece.number)
        if block is None:
            head = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            block = self._calls[piece.number] = _Block(head, "", piece)
            self._blocks.append(block)
        if piece.arguments:
            block.add(piece.arguments)

    def _is_void(self, at: int) -> bool:
        """Whether a block is the white space that a server puts around calls: no client takes such a block back."""
        return at > 0 and self._blocks[at].is_blank and self._blocks[at - 1].call is not None

    def _sent(self, *, is_end: bool = False) -> Iterator[Event]:
        """Yield what can be sent by now."""
        while self._at < len(self._blocks):
            block = self._blocks[self._at]
            is_last = self._at == len(self._blocks) - 1
            if not self._is_void(self._at):
                yield from self._sent_of(block)
            if not (is_end or (block.is_over and not is_last)):
                return
            if self._is_open:
                yield {"type": "content_block_stop", "index": self._n_opened - 1}
            self._is_open, self._at = False, self._at + 1

    def _sent_of(self, block: _Block) -> Iterator[Event]:
        if not self._is_open:
            self._is_open, self._n_opened = True, self._n_opened + 1
            yield {"type": "content_block_start", "index": self._n_opened - 1, "content_block": dict(block.head)}
        pieces, block.waiting = block.waiting, []
        for text in pieces:
            yield {"type": "content_block_delta", "index": self._n_opened - 1, "delta": block.delta(text)}


class MessagesShape(AnswerShape):
    """One message. It has the state of its stream: whether it has begun, and which block is open."""

    def __init__(self, request_id: str, created: int, model: str) -> None:
        del created
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks, self._has_begun = _Blocks(), False
        self._n_prompt: int | None = None

    def prompt(self, n_tokens: int) -> None:
        """Take the length of the prompt, which the begin of the message tells: clients show their context by it."""
        self._n_prompt = n_tokens

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
        ends = [
            *self._blocks.close(),
            {"type": "message_delta", "delta": _end(outcome), "usage": _usage(outcome), "disco": outcome.to_json()},
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
                pass  # a body has the blocks alone
        ends = _end(outcome) | {"usage": _usage(outcome)}
        found = self._head | {"content": blocks.whole()} | ends | {"disco": outcome.to_json()}
        return found | {"token_ids": ids[0]} if 0 in ids else found

    def sign_of_life(self) -> bytes:
        """Return a ping, which this API's clients know; a message begins before it.

        It cannot begin before the prompt is counted: until then it is a comment.
        """
        if self._n_prompt is None:
            return KEEP_ALIVE
        return self._begun() + named_event({"type": "ping"})

    def _begun(self) -> bytes:
        """Return the begin of the message, if it has not been sent."""
        if self._has_begun:
            return b""
        self._has_begun = True
        # Of the whole prompt: what of it comes from a cache, and whether a server counts it so, the end tells.
        usage = _counts(self._n_prompt or 0, 0)
        message: Event = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event({"type": "message_start", "message": message})


def _end(outcome: Outcome) -> dict[str, Any]:
    """Return why a message ended, and the client's stop sequence where it is known that this ended it."""
    if outcome.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": outcome.stop_sequence}
    told = _STOP_REASONS.get(outcome.finish_reason, "max_tokens")  # an end that nobody knows is no whole answer
    return {"stop_reason": told, "stop_sequence": None}


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return Anthropic's usage, in which tokens that came from a cache are not among the input's."""
    prompt, completion = outcome.billed
    cached, written = outcome.used.cached_tokens, outcome.used.cache_write_tokens
    return _counts(max(0, prompt - cached - written), completion, cached, written)


def _counts(given: int, made: int, cached: int = 0, written: int = 0) -> dict[str, int]:
    return {
        "input_tokens": given,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": made,
    }
