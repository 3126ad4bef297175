"""What a server's event stream says: bytes as JSON objects, and those as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from ..types import Json, Token, Usage
from .counting import tokens_in, tokens_of_delta

MAX_LINE = 4 * 1024 * 1024  # bytes of one event; a token takes a few hundred

Bytes = AsyncIterator[bytes]


class Patience:
    """How long to wait for the server's next bytes: until a first token, then from token to token, s.

    Comments and empty chunks do not prolong it; the time a slow reader takes does, since it is not the server's.
    """

    def __init__(self, first_token_s: float, token_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._token_s = token_s
        self._until = self._now() + first_token_s
        self._heard = False

    def heard(self) -> None:
        """A token has come."""
        self._heard = True

    def until(self) -> float:
        """Deadline of a wait that begins now, in the event loop's time."""
        if self._heard:
            self._heard, self._until = False, self._now() + self._token_s
        return self._until


async def json_events(body: Bytes, patience: Patience) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of an event stream, up to `[DONE]` or its end.

    Raises ValueError for what is none, TimeoutError when `patience` is over.

    Cut at line feeds in the bytes, so that neither a character split between two reads nor a U+2028 inside a text
    can cut a line. Comments, `id:` and `event:` lines are skipped.
    """
    buffer = b""
    while True:
        async with asyncio.timeout_at(patience.until()):  # once a read, not once a token: a read may carry many
            data = await anext(body, None)
        if data is None:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > MAX_LINE:
            msg = f"a line of more than {MAX_LINE} bytes"
            raise ValueError(msg)
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                yield _decode(payload)
    if buffer.startswith(b"data:") and buffer[5:].strip() != b"[DONE]":
        yield _decode(buffer[5:].strip())


_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Reader:
    """Chunks of one answer as Tokens; both kinds of chunks, a chat's `delta` and a raw completion's `text`.

    How many tokens a chunk has, its ids or log-probabilities tell, or a usage block that comes with it; else its text.
    `n_tokens` were given out so far.
    """

    def __init__(self, *, ids_back: bool = False) -> None:
        self._ids_back = ids_back
        self._ids: tuple[int, ...] = ()  # of chunks whose text is still to come: a character cut in two
        self._unnamed = 0  # tokens given out since the last ids
        self._names = False  # it has told ids: what comes without is a part of the next ones' text
        self.n_tokens = 0

    def token(self, choice: dict[str, Any], n_told: int | None = None) -> Token | None:
        """One chunk's choice as a Token, None if it carries nothing. Raises TypeError for what is no choice.

        `n_told` tokens the answer has with this chunk, by a usage block that came with it.
        """
        found = _token(choice)
        if self._ids_back:
            found = self._named(found, choice)
        if found is None:
            return None
        if n_told is not None:
            found = self._told(found, n_told - self.n_tokens)
        self.n_tokens += found.n_tokens
        return found

    def _named(self, found: Token | None, choice: dict[str, Any]) -> Token | None:
        """The same with its ids."""
        self._ids += _ids(choice)
        if found is None:
            return None
        ids, self._ids = self._ids, ()
        self._names = self._names or bool(ids)
        n_tokens = max(1, len(ids) - self._unnamed) if self._names else found.n_tokens
        self._unnamed = 0 if ids else self._unnamed + n_tokens
        return Token(found.text, n_tokens, found.delta, found.logprobs, ids)

    @staticmethod
    def _told(found: Token, n_new: int) -> Token:
        """The same with as many tokens as the usage block adds: of text not more than it has bytes, whoever says so."""
        most = len(found.text.encode("utf-8", "replace")) if found.delta is None else found.n_tokens
        n_tokens = min(max(1, n_new), max(1, most))
        return Token(found.text, n_tokens, found.delta, found.logprobs, found.ids)


def take_bill(billed: dict[str, Any], usage: Usage) -> None:
    """Put a usage block's counts into `usage`; zeros and what is missing say nothing.

    Of the prompt, OpenAI tells in `prompt_tokens_details` how much was in its cache, which is cheaper. Raises TypeError
    for what is no count: it would be booked and stored.
    """
    n_completion = _count(billed, "completion_tokens")
    usage.told = n_completion > 0
    if usage.told:
        usage.completion_tokens = n_completion
        details = billed.get("completion_tokens_details")
        usage.reasoning_tokens = _count(details, "reasoning_tokens") if isinstance(details, dict) else 0
    if prompt := _count(billed, "prompt_tokens"):
        details = billed.get("prompt_tokens_details")
        cached = min(prompt, _count(details, "cached_tokens")) if isinstance(details, dict) else 0
        usage.prompt_tokens, usage.cached_tokens = prompt - cached, cached


def _count(billed: dict[str, Any], key: str) -> int:
    n = billed.get(key) or 0
    if not isinstance(n, int) or n < 0:
        msg = f"usage.{key} is no count"
        raise TypeError(msg)
    return n


def _token(choice: dict[str, Any]) -> Token | None:
    delta = choice.get("delta")
    if delta is None and "text" in choice:
        return _of(choice["text"] or "", {}, None)
    delta = delta or {}
    logprobs = choice.get("logprobs") or None
    if not isinstance(logprobs, dict | None):
        raise TypeError("logprobs is no object")
    return _of(delta.get("content") or "", delta, logprobs)


def _of(text: object, delta: dict[str, Any], logprobs: Json | None) -> Token | None:
    if not isinstance(text, str):
        raise TypeError("the text of a chunk is no string")
    if len(delta) > 1 or not text:
        delta = {k: v for k, v in delta.items() if k not in ("content", "role") and v not in (None, "", [], {})}
        if not (text or delta):
            return None
        n_tokens = tokens_of_delta(delta) + (tokens_in(text) if text else 0) if delta else tokens_in(text)
        return Token(text, _named_in(logprobs) or n_tokens, delta or None, logprobs)
    return Token(text, (_named_in(logprobs) if logprobs else 0) or tokens_in(text), None, logprobs)


def _named_in(logprobs: Json | None) -> int:
    """Tokens that log-probabilities are told of; 0 if of none."""
    told = logprobs.get("content") if logprobs else None
    return len(told) if isinstance(told, list) else 0


def _ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The chunk's token ids, () if it has none that can be read: they are an extra, and no reason to fail."""
    ids = choice.get("token_ids")
    good = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    return tuple(ids) if good and ids else ()


def one_line(text: str) -> str:
    """What a server says as one line of at most 200 characters and a mark, never a page of HTML."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:200] + "…"
