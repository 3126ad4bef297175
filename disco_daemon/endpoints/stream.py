"""A server's event stream: bytes become JSON objects; what they say, `chunks` reads."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec

from ..clock import Deadline, Deadlines
from ..types import Token

MAX_LINE = 1024 * 1024  # bytes of one event; a token takes a few hundred, a whole answer in one some ten thousand
MAX_BRACKETS = 64 * 1024  # "[" and "{" in one event: each may be an object, and a decoder lets nobody else run
MAX_JOINED = 256 * 1024  # bytes of an event in several lines, and how many: each is tried anew with every line
MAX_JOINED_LINES = 64  # of an event in several lines
# A whole answer, bytes as they come: a million tokens of some 250, or half as many with their alternatives. One with
# `max_tokens` gets as much for each as a token with twenty alternatives takes, and something for what is no token.
MAX_ANSWER = 256 * 1024 * 1024
TOKEN_BYTES = 16 * 1024  # for each token of `max_tokens`: one with twenty alternatives takes less
SPARE_BYTES = 1024 * 1024  # for what is no token
MAX_IDLE_LINES = 4096  # in a row without a token: comments, events that say nothing; a token has three lines around it
IDLE_LINES_S = 64.0  # and as many more for each second: a server that thinks shows some signs of life in one
# Bytes that are read before others have a turn, a line as so many: a token takes ten times as long as its line.
MAX_WORK = 64 * 1024
LINE_WORK = 1024
MAX_ANSWER_S = 3600.0  # of waiting for the server in one answer; the longest known, with hours of thought, are no chats

Bytes = AsyncIterator[bytes]


class Endless(Exception):
    """An answer that takes more bytes or time than any that is one."""


def most_bytes(max_tokens: int | None) -> int:
    """Return how large an answer of `max_tokens` may be as it comes, bytes."""
    return MAX_ANSWER if max_tokens is None else min(MAX_ANSWER, SPARE_BYTES + max_tokens * TOKEN_BYTES)


class Patience:
    """The time to wait for the server's next bytes: until a first token, then from token to token, s.

    A sign of life, which is any whole line, begins that time anew up to the first token, and later as well of a server
    that `thinks`: its silence behind a sign may be a thought. Without a token it ends after `alive_s`, signs or not.
    The time a slow reader takes prolongs it, since it is not the server's. All waits together may take MAX_ANSWER_S,
    and with `max_tokens` no longer than so many tokens may. `first` tells after how long the first token came, s, and
    whether it was more than text: a thought, a call; `on_first` is called with that time then. `close` it.
    """

    def __init__(
        self,
        first_token_s: float,
        token_s: float,
        max_tokens: int | None = None,
        *,
        alive_s: float = 0.0,
        thinks: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`deadlines` are those of other answers, one after the other."""
        self._now = asyncio.get_running_loop().time
        self._token_s, self._sign_s = token_s, math.inf if thinks else first_token_s
        self._alive_s, self._thinks = alive_s, thinks
        self.first: tuple[float, bool] | None = None
        self.on_first: Callable[[float], None] | None = None
        self._began = self._since = self._now()
        self._until = self._began + first_token_s
        self._alive_until = self._began + max(first_token_s, alive_s)
        self._heard = self._signed = self._begun = False
        most_s = math.inf if max_tokens is None else max(first_token_s, alive_s) + token_s * max_tokens
        self._most_s = self._left_s = min(MAX_ANSWER_S, most_s)
        self._rest_until: float | None = None
        self._deadlines = deadlines or Deadlines(0)
        self._deadline = self._deadlines.take()

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._deadlines.give(self._deadline)

    def renew(self, token: Token) -> None:
        """A token has come."""
        self._heard = True
        if self.first is None:
            self.first = (self._now() - self._began, not token.text)
            if self.on_first is not None:
                self.on_first(self.first[0])

    def sign(self) -> None:
        """A sign of life has come."""
        self._signed = True

    @property
    def silent_s(self) -> float:
        """How long nothing has come that was waited for, s; the time in which a reader takes a token is none."""
        return 0.0 if self._heard else self._now() - self._since

    def wait_until(self, until: float) -> None:
        """Wait till then, in the event loop's time, signs of life or not: the answer is whole."""
        self._rest_until = until

    def waiting(self) -> Deadline:
        """Return a context in which to wait once: TimeoutError is raised at the deadline of a wait that begins now."""
        return self._deadline.at(self.until())

    def until(self) -> float:
        """Deadline of a wait that begins now, in the event loop's time."""
        if self._rest_until is not None:
            return self._rest_until
        if self._heard:
            now = self._since = self._now()
            self._heard, self._signed, self._begun = False, False, True
            self._until, self._alive_until = now + self._token_s, now + max(self._token_s, self._alive_s)
        elif self._signed:
            self._signed, self._since = False, self._now()
            if self._thinks or not self._begun:
                self._until = min(self._alive_until, max(self._until, self._since + self._sign_s))
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
            raise Endless(f"it took more than {self._most_s:g} s") from e
        finally:
            self._left_s -= self._now() - began


class EventStream:
    """The JSON objects of an event stream, up to `[DONE]` or its end; `done` tells which of them it was.

    Cut at line ends in the bytes, so that neither a character split between two reads nor a U+2028 inside a text
    can cut a line. Comments, `id:` and `event:` lines are skipped. The lines of one event are joined, as the standard
    has it; but a line that is whole by itself is an event, since there are servers that leave out the empty line. So
    are JSON objects without `data:`, one a line, and one document over many lines, where nothing else has come.

    Others have a turn after MAX_WORK. `n_bytes` has the last object; `n_idle` lines have come since the reader
    set it to 0, for a token.
    """

    def __init__(self, body: Bytes, patience: Patience, max_bytes: int = MAX_ANSWER) -> None:
        self._body = body
        self._patience = patience
        patience.sign()  # the response has begun
        self._max_bytes = max_bytes
        self._held: list[bytes] = []  # lines of an event that is not whole yet
        self._ends_in_return = False  # what was read: a line feed may follow, which is of the same line end
        self._has_events = False  # lines that begin with `data:`
        self._document: list[bytes] = []  # the lines of one that began without
        self._n_document = 0  # its bytes
        self._work = 0  # since others had a turn
        self._began = asyncio.get_running_loop().time()
        self.n_idle = 0
        self.n_bytes = 0
        self._n_documents = 0
        self.done = False

    def wait_until(self, until: float) -> None:
        """Wait no longer than till then for what may come behind an answer that is whole, in the event loop's time."""
        self._patience.wait_until(until)

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        """Raises ValueError for what is no JSON, TimeoutError when patience is over, Endless for too much."""
        opened, n_bytes, is_spaced = bytearray(), 0, False
        while (data := await self._patience.read(self._body)) is not None:
            n_bytes += len(data)
            if self._ends_in_return or b"\r" in data:
                data = self._with_line_feeds(data)
            if b"\n" in data:
                self._patience.sign()
                *lines, rest = (bytes(opened) + data if opened else data).split(b"\n")
                opened.clear()
            else:
                lines, rest = [], data
            opened += rest
            self._work += LINE_WORK + len(rest)
            for line in lines:
                if is_spaced and not line and not self._held:  # the end of an event that was whole
                    is_spaced = False
                    continue
                self._work += LINE_WORK + len(line)
                if self._work > MAX_WORK:
                    self._work = 0
                    await asyncio.sleep(0)  # others have a turn
                self.n_idle += 1
                if self.n_idle > MAX_IDLE_LINES:
                    self._check_idle()
                if not line and not self._held:
                    continue
                if len(line) > MAX_BRACKETS:
                    self._check(line)
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
                self.n_bytes, is_spaced = len(line), True
                yield found
                if not self.n_idle:
                    self._work -= LINE_WORK  # a token: whoever takes those takes few before others have a turn
            if self._work > MAX_WORK:
                self._work = 0
                await asyncio.sleep(0)
            if len(opened) > MAX_LINE:
                self._check(opened)
            if n_bytes > self._max_bytes:
                raise Endless(f"it has more than {self._max_bytes} bytes")
        self._check(opened)
        if (found := self._event(bytes(opened))) is not None:
            self.n_bytes = len(opened)
            yield found
        self._settle()
        for document in self._documents():
            self.n_bytes = self._n_document
            yield document

    def _check_idle(self) -> None:
        """Raise Endless where too many lines have come without a token; those of a document have a bound of theirs."""
        allowed = MAX_IDLE_LINES + (asyncio.get_running_loop().time() - self._began) * IDLE_LINES_S
        if self.n_idle - len(self._document) > allowed:
            raise Endless(f"it sends lines without end, and no token in more than {MAX_IDLE_LINES} of them")

    @staticmethod
    def _check(line: bytes | bytearray) -> None:
        """Raise ValueError for a line that is too long, or would take too long to decode."""
        if len(line) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} bytes")
        if len(line) > MAX_BRACKETS and line.count(b"[") + line.count(b"{") > MAX_BRACKETS:
            raise ValueError(f"a line with more than {MAX_BRACKETS} objects")

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return what was read with line feeds in place of carriage returns, of which each alone ends a line, too."""
        if not data:
            return data
        if self._ends_in_return and data[:1] == b"\n":
            data = data[1:]
        self._ends_in_return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _event(self, line: bytes) -> dict[str, Any] | None:
        """The event that a line makes whole, if it does."""
        line = line.removeprefix(_BOM)
        if not line.startswith(b"data:"):
            if self._held and not line.strip():
                self._settle()
            return None if self._has_events or self._held else self._bare(line)
        self._has_events = True
        payload = line[5:].strip()
        if payload in _DONE:
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

    def _bare(self, line: bytes) -> dict[str, Any] | None:
        """Return the object in a line without `data:`; None while that is open, or for lines that say nothing."""
        bare = line.strip()
        if self._document:
            self._open_document(line)
            return None
        if bare in _DONE:
            self.done = True
            return None
        if bare[:1] not in (b"{", b"["):
            return None
        try:
            found = _decode(bare)
        except _NO_JSON:
            self._open_document(line)
            return None
        self._n_documents += 1
        return found

    def _open_document(self, line: bytes) -> None:
        """Keep a line of a document that is not whole. Raises ValueError for too many."""
        self._document.append(line)
        self._n_document += len(line) + 1
        if self._n_document > MAX_LINE:
            raise ValueError(f"a document of more than {MAX_LINE} bytes")

    def _documents(self) -> list[dict[str, Any]]:
        """Return the objects of a document that came in many lines. One document is a whole answer."""
        found: list[dict[str, Any]] = []
        if self._document:
            whole = b"\n".join(self._document)
            self._check(whole)
            try:
                found = [_decode(whole)]
            except _NO_JSON:
                found = _list_decoder.decode(whole)
            self._n_documents += 1
        self.done = self.done or self._n_documents == 1
        return found

    def _join(self, payload: bytes) -> dict[str, Any] | None:
        """One more line of an event; None while it is not whole."""
        self._held.append(payload)
        whole = b"\n".join(self._held)
        self._work += len(whole)
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


_BOM = b"\xef\xbb\xbf"
_DONE = (b"[DONE]", b'"[DONE]"')
_decoder = msgspec.json.Decoder(dict[str, Any])
_list_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_lenient = json.JSONDecoder(strict=False)  # knows NaN, half characters, and control characters in a text
_NO_JSON = (msgspec.MsgspecError, ValueError, RecursionError)  # a ValueError is one of UTF-8


def _decode(payload: bytes) -> dict[str, Any]:
    """Return an object, an empty one for null. Raises a MsgspecError, or a ValueError.

    What JSON does not allow and every client reads nevertheless is read here, too: `chunks` makes it writable again.
    """
    try:
        return _decoder.decode(payload)
    except RecursionError as e:
        raise ValueError("a document nested too deeply") from e
    except (msgspec.MsgspecError, ValueError) as e:
        found = _read_leniently(payload, e)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("an event that is no object")  # noqa: TRY004  as for all that is no JSON
    return found


def _read_leniently(payload: bytes, error: Exception) -> object:
    """Return what a payload says that is not quite JSON. Raises `error` for what is none at all."""
    try:
        return _lenient.decode(payload.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("a document nested too deeply") from error
    except ValueError:
        raise error from None


def _is_whole(payload: bytes) -> bool:
    try:
        _decode(payload)
    except _NO_JSON:
        return False
    return True
