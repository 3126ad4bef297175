"""A server's event stream: bytes become JSON objects, and those tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from msgspec import structs

from ..clock import Deadline
from ..delivery.counting import TextCount, TextCounts
from ..types import Finish, Json, Token
from ..types.drawing import MAX_CHOICES

MAX_LINE = 4 * 1024 * 1024  # bytes of one event; a token takes a few hundred
MAX_JOINED = 256 * 1024  # bytes of an event in several lines, and how many: each is tried anew with every line
MAX_JOINED_LINES = 64  # of an event in several lines
# A whole answer, bytes as they come: a million tokens of some 250, or half as many with their alternatives. One with
# `max_tokens` gets as much for each as a token with twenty alternatives takes, and something for what is no token.
MAX_ANSWER = 256 * 1024 * 1024
TOKEN_BYTES = 16 * 1024  # for each token of `max_tokens`: one with twenty alternatives takes less
SPARE_BYTES = 1024 * 1024  # for what is no token
MAX_ANSWER_S = 3600.0  # of waiting for the server in one answer; the longest known, with hours of thought, are no chats

Bytes = AsyncIterator[bytes]
Count = Callable[[dict[str, Any], str, Json, Json | None], int]  # of a choice's text, the rest of it, and their names


class Endless(Exception):
    """An answer that takes more bytes or time than any that is one."""


def most_bytes(max_tokens: int | None) -> int:
    """Return how large an answer of `max_tokens` may be as it comes, bytes."""
    return MAX_ANSWER if max_tokens is None else min(MAX_ANSWER, SPARE_BYTES + max_tokens * TOKEN_BYTES)


class Patience:
    """The time to wait for the server's next bytes: until a first token, then from token to token, s.

    Comments and empty chunks do not prolong it; the time a slow reader takes does, since it is not the server's. All
    waits together may take MAX_ANSWER_S, and with `max_tokens` no longer than so many tokens may. `close` it.
    """

    def __init__(self, first_token_s: float, token_s: float, max_tokens: int | None = None) -> None:
        self._now = asyncio.get_running_loop().time
        self._token_s = token_s
        self._until = self._now() + first_token_s
        self._heard = False
        most_s = math.inf if max_tokens is None else first_token_s + token_s * max_tokens
        self._most_s = self._left_s = min(MAX_ANSWER_S, most_s)
        self._deadline = Deadline()

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._deadline.close()

    def renew(self) -> None:
        """A token has come."""
        self._heard = True

    def until(self) -> float:
        """Deadline of a wait that begins now, in the event loop's time."""
        if self._heard:
            self._heard, self._until = False, self._now() + self._token_s
        return self._until

    async def read(self, body: Bytes) -> bytes | None:
        """The next bytes, None at the end. Raises TimeoutError, or Endless when all waits took too long."""
        began = self._now()
        last = began + self._left_s
        try:
            with self._deadline.at(min(self.until(), last)):  # once a read: it may carry many tokens
                return await body.__anext__()
        except StopAsyncIteration:
            return None
        except TimeoutError as e:
            if self._now() < last:
                raise
            msg = f"it took more than {self._most_s:g} s"
            raise Endless(msg) from e
        finally:
            self._left_s -= self._now() - began


class EventStream:
    """The JSON objects of an event stream, up to `[DONE]` or its end; `done` tells which of them it was.

    Cut at line feeds in the bytes, so that neither a character split between two reads nor a U+2028 inside a text
    can cut a line. Comments, `id:` and `event:` lines are skipped. The lines of one event are joined, as the standard
    has it; but a line that is whole by itself is an event, since there are servers that leave out the empty line.
    """

    def __init__(self, body: Bytes, patience: Patience, max_bytes: int = MAX_ANSWER) -> None:
        self._body = body
        self._patience = patience
        self._max_bytes = max_bytes
        self._held: list[bytes] = []  # lines of an event that is not whole yet
        self.done = False

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        """Raises ValueError for what is no JSON, TimeoutError when patience is over, Endless for too much."""
        buffer, n_bytes = b"", 0
        while (data := await self._patience.read(self._body)) is not None:
            n_bytes += len(data)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                if not line and not self._held:
                    continue
                try:  # what nearly every line is; white space around it is JSON's, too
                    found = None if self._held or line[:5] != b"data:" else _decoder.decode(line[5:])
                except _NO_JSON:
                    found = None
                if found is None:
                    found = self._event(line)
                    if self.done:
                        return
                    if found is None:
                        continue
                yield found
            if len(buffer) > MAX_LINE:
                msg = f"a line of more than {MAX_LINE} bytes"
                raise ValueError(msg)
            if n_bytes > self._max_bytes:
                msg = f"it has more than {self._max_bytes} bytes"
                raise Endless(msg)
        if (found := self._event(buffer)) is not None:
            yield found
        self._settle()

    def _event(self, line: bytes) -> dict[str, Any] | None:
        """The event that a line makes whole, if it does."""
        if not line.startswith(b"data:"):
            if self._held and not line.strip():
                self._settle()
            return None
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self._settle()
            self.done = True
            return None
        if not self._held:
            try:
                return _decode(payload)
            except _NO_JSON:
                if payload:
                    self._held.append(payload)
                return None
        return self._join(payload)

    def _join(self, payload: bytes) -> dict[str, Any] | None:
        """One more line of an event; None while it is not whole."""
        self._held.append(payload)
        whole = b"\n".join(self._held)
        try:
            found = _decode(whole)
        except _NO_JSON:
            if len(whole) > MAX_JOINED or len(self._held) > MAX_JOINED_LINES or _is_whole(payload):
                self._settle()  # what came before can become nothing any more
            return None
        self._held.clear()
        return found

    def _settle(self) -> None:
        """The event has ended. Raises what is wrong with it, if it was not whole."""
        if self._held:
            _decode(b"\n".join(self._held))


_decoder = msgspec.json.Decoder(dict[str, Any])
_NO_JSON = (msgspec.MsgspecError, ValueError, RecursionError)  # a ValueError is one of UTF-8


def _decode(payload: bytes) -> dict[str, Any]:
    """Raises a MsgspecError, or a ValueError."""
    try:
        return _decoder.decode(payload)
    except RecursionError as e:
        raise ValueError("a document nested too deeply") from e


def _is_whole(payload: bytes) -> bool:
    try:
        _decode(payload)
    except _NO_JSON:
        return False
    return True


class Reader:
    """Chunks of one answer as Tokens; both kinds of chunks, a chat's `delta` and a raw completion's `text`.

    How many tokens it has by now, their ids or log-probabilities tell, or a usage block that comes with it; else its
    text, however that is cut: a chunk may count none. `n_tokens` were given out so far. Of `n_choices` each has an
    index.
    """

    def __init__(self, *, ids_back: bool = False, n_choices: int = 1) -> None:
        self._open = set(range(n_choices))
        self._is_one = n_choices == 1
        self.ending = "stop"  # the finish_reason of an answer whose server tells none, but that it is whole
        self._ids_back = ids_back
        self._ids: tuple[int, ...] = ()  # of chunks whose text is still to come: a character cut in two
        self._unnamed = 0  # tokens given out since the last ids
        self._names = False  # it has told ids: what comes without is a part of the next ones' text
        self.n_tokens = 0
        self._text, self._others = TextCount(), TextCounts()
        self._n_by_text = self._n_by_name = 0

    def token(self, choice: dict[str, Any], n_told: int | None = None) -> Token | None:
        """One chunk's choice as a Token, None if it carries nothing. Raises TypeError for what is no choice.

        `n_told` tokens the answer has with this chunk, by a usage block that came with it.
        """
        found = _token(choice, self._count)
        if self._ids_back:
            found = self._with_ids(found, choice)
        if found is None:
            return None
        if n_told is not None:
            found = self._with_count(found, n_told - self.n_tokens)
        self.n_tokens += found.n_tokens
        if found.delta and "tool_calls" in found.delta:
            self.ending = "tool_calls"
        return found if self._is_one else structs.replace(found, index=_index(choice), delta=found.delta or {})

    def end(self, choice: dict[str, Any], reason: str) -> list[Token | Finish]:
        """Return the end of a choice, which is that of the answer if it is the last one. Raises TypeError."""
        if self._is_one:
            return [Finish(reason)]
        self._open.discard(index := _index(choice))
        if self._open:
            return [Token("", 0, {}, index=index, ended=reason)]
        return [Token("", 0, {}, index=index), Finish(reason)]  # it may have said nothing

    def _count(self, choice: dict[str, Any], text: str, delta: Json, logprobs: Json | None) -> int:
        """Return how many tokens the answer has more than before: the first one of all counts whatever it is."""
        index = None if self._is_one else choice.get("index")
        if text:
            n = self._text.add(text) if index is None else self._others.add({"content": text}, index)
            self._n_by_text += n
        if delta:
            self._n_by_text += self._others.add(delta, index)
        if logprobs:
            self._n_by_name += _count_named(logprobs)
        return max(0 if self.n_tokens else 1, max(self._n_by_text, self._n_by_name) - self.n_tokens)

    def _with_ids(self, found: Token | None, choice: dict[str, Any]) -> Token | None:
        """The same with its ids."""
        self._ids += _ids(choice)
        if found is None:
            return None
        ids, self._ids = self._ids, ()
        self._names = self._names or bool(ids)
        n_tokens = found.n_tokens
        if self._names:  # of a text whose ids are still to come at least one token has begun
            n_tokens = max(0, len(ids) - self._unnamed) if ids else int(not self._unnamed)
        self._unnamed = 0 if ids else self._unnamed + n_tokens
        return Token(found.text, n_tokens, found.delta, found.logprobs, ids)

    @staticmethod
    def _with_count(found: Token, n_new: int) -> Token:
        """Return the token with the count that the usage block adds: of text never more than it has bytes.

        And never less than its text shows: not every server's blocks are running sums.
        """
        most = len(found.text.encode("utf-8", "replace")) if found.delta is None else 0
        n_tokens = max(found.n_tokens, min(n_new, most))
        return Token(found.text, n_tokens, found.delta, found.logprobs, found.ids)


def _token(choice: dict[str, Any], count: Count) -> Token | None:
    delta = choice.get("delta")
    if delta is None and "text" in choice:
        return _of(choice, choice["text"] or "", {}, None, count)
    delta = delta or {}
    logprobs = choice.get("logprobs") or None
    if not isinstance(logprobs, dict | None):
        raise TypeError("logprobs is no object")
    content = delta.get("content") or ""
    if isinstance(content, list):
        content, thought = _parts(content)
        delta = delta | ({"reasoning_content": thought} if thought else {})
    return _of(choice, content, delta, logprobs, count)


def _parts(content: list[Any]) -> tuple[str, str]:
    """Text and thought of content in parts, as Mistral's models that think send it; other parts say nothing here.

    Raises TypeError, AttributeError or KeyError for what is no list of parts.
    """
    text = thought = ""
    for part in content:
        if part.get("type") == "text":
            text += part["text"]
        elif part.get("type") == "thinking":
            thinking = part["thinking"]
            thought += thinking if isinstance(thinking, str) else _parts(thinking)[0]
    return text, thought


def _of(choice: dict[str, Any], text: object, delta: Json, logprobs: Json | None, count: Count) -> Token | None:
    if not isinstance(text, str):
        raise TypeError("the text of a chunk is no string")
    if len(delta) > 1 or not text:
        delta = {k: v for k, v in delta.items() if k not in ("content", "role") and v not in (None, "", [], {})}
        if not (text or delta):
            return None
        return Token(text, count(choice, text, delta, logprobs), delta or None, logprobs)
    return Token(text, count(choice, text, {}, logprobs), None, logprobs)


def _count_named(logprobs: Json | None) -> int:
    """Return the number of tokens that have log-probabilities; 0 if none has."""
    told = logprobs.get("content") if logprobs else None
    return len(told) if isinstance(told, list) else 0


def _index(choice: dict[str, Any]) -> int:
    """The number of a choice. Raises TypeError for what is none."""
    index = choice.get("index")
    if type(index) is not int or not 0 <= index < MAX_CHOICES:
        raise TypeError("a choice without a number")
    return index


def _ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The chunk's token ids, () if it has none that can be read: they are an extra, and no reason to fail."""
    ids = choice.get("token_ids")
    good = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    return tuple(ids) if good and ids else ()
