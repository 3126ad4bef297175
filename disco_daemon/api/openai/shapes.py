"""The shapes of answers on the wire: what any of them gives, and OpenAI's chunks and bodies. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...errors import DiscoError
from ...types import CallForm, CallPart, Delta, Outcome, Side, TextLogprobs, Token
from ..http.events import DONE, KEEP_ALIVE, comment, event

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
    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer; `ids` are there of choices of which they are known and wanted."""

    def prompt(self, n_tokens: int) -> None:
        """Take the length of the prompt, counted or estimated; most shapes tell at the end alone what is billed."""
        del n_tokens

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
        self._begun, self._ended = set[int](), set[int]()  # choices of the stream

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
        first = first or bool(self._begun and token.index not in self._begun)
        self._begun.add(token.index)
        if token.ended is not None:
            self._ended.add(token.index)
        choice = self._choice(token, first=first)
        if ids is not None:
            choice["token_ids"] = ids
        made = self._piece | {"choices": [choice]}
        if side is None:
            return made
        return made | {"disco": {"side": side, "alone": True} if token.alone else {"side": side}}

    def end(self, finish_reason: str) -> dict[str, Any]:
        """Return the last chunk with choices: those that have not ended yet."""
        ended = [Token("", 0, index=i, ended=finish_reason) for i in sorted((self._begun or {0}) - self._ended)]
        return self._piece | {"choices": [self._choice(token, first=False) for token in ended]}

    def bill(self, outcome: Outcome) -> dict[str, Any]:
        """Return the chunk after the last, with the usage block."""
        return self._piece | {"choices": [], "usage": _usage(outcome)}

    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer, each choice with its `ids` where they are there."""
        choices = []
        for index in sorted({token.index for token in tokens} or {0}):
            own = [token for token in tokens if token.index == index]
            ended = next((token.ended for token in own if token.ended is not None), outcome.finish_reason or "stop")
            told = {"token_ids": ids[index]} if index in ids else {}
            choices.append({"index": index} | self._join(own) | {"finish_reason": ended} | told)
        found = self._head | {"object": self.whole, "choices": choices}
        return found | {"usage": _usage(outcome), "disco": outcome.to_json()}

    @abstractmethod
    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        """Return a token, or an empty one, as the choice of a chunk."""

    @abstractmethod
    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return all tokens of a choice as that of a body, without its index."""


class TextShape(OpenAIShape):
    """`text_completion`, in chunks and whole. Only plain text comes this way."""

    prefix, piece, whole = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request_id: str, created: int, model: str) -> None:
        super().__init__(request_id, created, model)
        self._logprobs = defaultdict[int, TextLogprobs](TextLogprobs)

    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        del first
        logprobs = self._logprobs[token.index].of(token.logprobs) if token.logprobs else None
        return {"index": token.index, "text": token.text, "logprobs": logprobs, "finish_reason": token.ended}

    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        told = _joined_logprobs(tokens)
        logprobs = TextLogprobs().of(told) if told else None
        return {"text": "".join(t.text for t in tokens), "logprobs": logprobs}


class ChatShape(OpenAIShape):
    """`chat.completion.chunk` and `chat.completion`."""

    prefix, piece, whole = "chatcmpl-", "chat.completion.chunk", "chat.completion"

    def _choice(self, token: Token, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if token.text or first:
            delta["content"] = token.text
        if token.delta:
            delta |= _delta(token.delta)
        return {"index": token.index, "delta": delta, "logprobs": token.logprobs, "finish_reason": token.ended}

    def _join(self, tokens: Sequence[Token]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(t.text for t in tokens)}
        deltas = [token.delta for token in tokens if token.delta]
        if thought := "".join(delta.thought for delta in deltas):
            message["reasoning_content"] = thought
        if refusal := "".join(delta.refusal for delta in deltas):
            message["refusal"] = refusal
        for delta in deltas:
            for key, value in (delta.others or {}).items():
                message[key] = _grown(message.get(key), value)
        if calls := joined_calls(deltas):
            message |= _calls(calls, indexed=False)
            message["content"] = message["content"] or None
        return {"message": message, "logprobs": _joined_logprobs(tokens)}


def joined_calls(deltas: Iterable[Delta]) -> list[CallPart]:
    """Return the calls of an answer, each as one piece."""
    pieces = defaultdict[int, list[CallPart]](list)
    for delta in deltas:
        for piece in delta.calls:
            pieces[piece.number].append(piece)
    return [
        msgspec.structs.replace(
            own[0],
            arguments="".join(piece.arguments for piece in own),
            others={key: value for piece in own for key, value in (piece.others or {}).items()},
        )
        for _, own in sorted(pieces.items())
    ]


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; empty where they are no JSON."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _delta(delta: Delta) -> dict[str, Any]:
    """Return what a token has beside its text, as a chat's chunks have it."""
    found: dict[str, Any] = {"reasoning_content": delta.thought} if delta.thought else {}
    if delta.refusal:
        found["refusal"] = delta.refusal
    if delta.calls:
        found |= _calls(delta.calls, indexed=True)
    return {**delta.others, **found} if delta.others else found


def _calls(pieces: Sequence[CallPart], *, indexed: bool) -> dict[str, Any]:
    """Return calls, or pieces of them, which have an index, as a chat has them."""
    if pieces[0].form is CallForm.OLD:
        named = {"name": "".join(piece.name for piece in pieces)} if pieces[0].name else {}
        return {"function_call": named | {"arguments": "".join(piece.arguments for piece in pieces)}}
    return {"tool_calls": [_call(piece, indexed=indexed) for piece in pieces]}


def _call(piece: CallPart, *, indexed: bool) -> dict[str, Any]:
    key, text = ("custom", "input") if piece.form is CallForm.CUSTOM else ("function", "arguments")
    inner = {"name": piece.name} if piece.id else {}
    return {
        **(piece.others or {}),
        **({"index": piece.number} if indexed else {}),
        **({"id": piece.id, "type": key} if piece.id else {}),
        key: inner | {text: piece.arguments},
    }


def _joined_logprobs(tokens: Sequence[Token]) -> dict[str, Any] | None:
    """Return the log-probabilities of all tokens in a chat's shape; None if none has any."""
    found = [one for token in tokens if token.logprobs for one in token.logprobs.get("content") or ()]
    return {"content": found} if found else None


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return OpenAI's usage block."""
    prompt, completion = outcome.billed
    used = outcome.used
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens}
        | ({"cache_write_tokens": used.cache_write_tokens} if used.cache_write_tokens else {}),
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    } | ({} if used.cost is None else {"cost": used.cost})


def _grown(old: Any, more: Any) -> Any:
    """Return a field of a server's own with what a later chunk has of it: texts and lists grow, the rest is set."""
    if isinstance(old, str) and isinstance(more, str):
        return old + more
    if isinstance(old, list) and isinstance(more, list):
        return old + more
    if isinstance(old, dict) and isinstance(more, dict):
        return {**old, **{key: _grown(old.get(key), value) for key, value in more.items()}}
    return more
