"""Answers as Ollama's API has them: a stream of JSON objects, one a line, or one object. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...errors import DiscoError
from ...types import Delta, FinishReason, Outcome, Side, Token
from ..openai.embeddings import Vectors, floats
from ..openai.shapes import AnswerShape, Ids, arguments_of, joined_calls

NS = 1_000_000_000  # in a second
_encode = msgspec.json.Encoder().encode
# Ollama's own ends are stop and length, with calls stop; an end that nobody knows is no whole answer.
_DONE_REASONS: dict[str | None, str] = {
    FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TOOL_CALLS: "stop",
    FinishReason.FUNCTION_CALL: "stop", FinishReason.CONTENT_FILTER: "content_filter",
}  # fmt: skip


def error_body(error: DiscoError) -> dict[str, Any]:
    """Return an error in Ollama's shape, a text, with our own code beside it."""
    return {"error": str(error)} | ({} if error.code is None else {"code": error.code})


def rfc3339(wall_s: float) -> str:
    """Return a time, s since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _line(document: Any) -> bytes:
    return _encode(document) + b"\n"


def _calls(deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Return all calls, their arguments as objects: empty where they are no JSON."""
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call.arguments)}}
        for call in joined_calls(deltas)
    ]


class OllamaShape(AnswerShape):
    """One answer; its calls come whole, in the line before the last, since their arguments are objects."""

    content_type = "application/x-ndjson"

    def __init__(self, request_id: str, created: int, model: str) -> None:
        del request_id
        self._head = {"model": model, "created_at": rfc3339(created)}
        self._called: list[Delta] = []

    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token as a line; none for a part of a call."""
        del first, ids
        thought = ""
        if token.delta:
            thought = token.delta.thought
            if token.delta.calls:
                self._called.append(token.delta)
        said = _said(token)
        if not (said or thought or token.logprobs):
            return b""
        made = self._head | self.piece(said, thought, []) | {"done": False} | _likelihoods([token])
        return _line(made if side is None else made | {"disco": {"side": side}})

    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the calls, if there are any, and the last line, with counts, times and the `disco` object."""
        del include_usage  # the last line always has it
        calls = _calls(self._called)
        called = _line(self._head | self.piece("", "", calls) | {"done": False}) if calls else b""
        return called + _line(self._head | self.piece("", "", []) | _ends(outcome))

    def failed(self, error: DiscoError) -> bytes:
        """Return a failure as a line."""
        return _line(error_body(error))

    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer; there is one choice, and no place for token ids."""
        del ids
        deltas = [token.delta for token in tokens if token.delta]
        thought = "".join(delta.thought for delta in deltas)
        whole = self.piece("".join(map(_said, tokens)), thought, _calls(deltas))
        return self._head | whole | _ends(outcome) | _likelihoods(tokens)

    def note(self, text: str) -> bytes:
        """Return nothing: lines of JSON have no comments."""
        del text
        return b""

    def sign_of_life(self) -> bytes:
        """Return a line that says nothing: clients read each line as JSON, and take an empty text as that."""
        return _line(self._head | self.piece("", "", []) | {"done": False})

    def loaded(self, word: str) -> dict[str, Any]:
        """Return the answer to a request without a question: `word` is load or unload."""
        return self._head | self.piece("", "", []) | {"done": True, "done_reason": word}

    @abstractmethod
    def piece(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what was said, thought and called, as this route has it."""


class ChatLines(OllamaShape):
    """Of /api/chat: each line has a message."""

    def piece(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a message; empty parts are left out, but for the text."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateLines(OllamaShape):
    """Of /api/generate: each line has a `response`; there are no calls."""

    def piece(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a text, and a thought if there is one."""
        del calls
        return {"response": text, "thinking": thought} if thought else {"response": text}


def _said(token: Token) -> str:
    """Return what a token says; a refusal is a text like any other here."""
    return token.text + token.delta.refusal if token.delta else token.text


def _ends(outcome: Outcome) -> dict[str, Any]:
    """Return why an answer ended, its counts, and its times in ns.

    Of the whole time, what is none of the three parts is the wait until the side was started that won.
    """
    prompt, completion = outcome.billed
    won, total_s = outcome.winning, outcome.duration_s
    load_s = prompt_s = 0.0
    if won is not None:
        load_s = min(max(won.load_s, won.usage.load_s), won.ttft_s)
        prompt_s = won.ttft_s - load_s
    eval_s = 0.0 if outcome.ttft_s is None else max(0.0, total_s - outcome.ttft_s)
    times = {"total": total_s, "load": load_s, "prompt_eval": prompt_s, "eval": eval_s}
    ends = {"done": True, "done_reason": _DONE_REASONS.get(outcome.finish_reason, "length")}
    ends |= {f"{name}_duration": round(s * NS) for name, s in times.items()}
    return ends | {"prompt_eval_count": prompt, "eval_count": completion, "disco": outcome.to_json()}


def _likelihoods(tokens: Sequence[Token]) -> dict[str, Any]:
    found = [one for token in tokens if token.logprobs for one in token.logprobs.get("content") or ()]
    return {"logprobs": found} if found else {}


# --- vectors --------------------------------------------------------------------------------------------------------


class OllamaVectors(Vectors):
    """Vectors of /api/embed; `model` is its name as it was asked for, `elapsed_s()` tells how long it has taken."""

    begin = b'{"embeddings":['

    def __init__(self, n: int, model: str, elapsed_s: Callable[[], float]) -> None:
        super().__init__(n)
        self._model, self._elapsed_s = model, elapsed_s

    def _item(self, vector: bytes, index: int) -> bytes:
        del index
        return _encode(floats(vector))

    def _rest(self) -> dict[str, Any]:
        total = {"total_duration": round(self._elapsed_s() * NS)}
        return {"model": self._model, "prompt_eval_count": self.n_tokens} | total


class OneVector(OllamaVectors):
    """The one vector of /api/embeddings, the older route."""

    begin = b'{"embedding":'

    def body(self) -> bytearray:
        """Return the whole response."""
        return self._body + (b"}" if self._n_made else b"[]}")
