"""The two ways to send an answer: a stream of server-sent events, or one JSON body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from ...clock import Clock, Deadline
from ...errors import DiscoError, ReaderGone
from ...types import Outcome, Reason, Side, Token
from ..openai.shapes import AnswerShape, Ids
from . import signs_of_life

READER_TIMEOUT_S = 300.0  # a reader that takes nothing for this long holds a server's stream open in vain

_PLAIN = " !#$&'()*+,/:;=?@[]"  # what a header may hold besides letters and digits; the rest is written as %XX
MAX_NAMED = 20  # ignored fields in a header
MAX_NAME = 100  # characters of the name of one


def headers(
    request_id: str,
    route: str | None,
    quality: str | None = None,
    *,
    model: str | None = None,
    reason: str | None = None,
    ignored: Sequence[str] = (),
) -> dict[str, str]:
    """Return the daemon's own response headers; `quality` is of an answer by a device over two machines.

    The fields `ignored` are percent-encoded: their names are a client's.
    """
    named = ", ".join(quote(name, errors="replace")[:MAX_NAME] for name in ignored[:MAX_NAMED])
    told = {
        "X-Disco-Request-Id": request_id,
        "X-Disco-Route": route,
        "X-Disco-Model": None if model is None else quote(model, safe=_PLAIN),
        "X-Disco-Reason": reason,
        "X-Disco-Quality": quality,
        "X-Disco-Ignored": named or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def bill(outcome: Outcome) -> dict[str, str]:
    """Return the headers of a whole answer's time and cost."""
    found = {"X-Disco-Cost-Usd": f"{outcome.cost_usd:.12f}".rstrip("0").rstrip(".")}
    return found if outcome.ttft_s is None else found | {"X-Disco-Ttft-Ms": f"{outcome.ttft_s * 1000:.1f}"}


class _TokenIds:
    """The token ids for a client: those of the side that began the answer, until another side takes it over.

    Ids of two vocabularies in one list, or a list with a hole, would read as another answer.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._side: Side | None = None
        self.joint = False

    def of(self, token: Token, side: Side) -> Ids | None:
        """Return the ids of one token, None if not asked for or not known."""
        if not self._wanted:
            return None
        self._side = self._side or side
        self.joint = self.joint or side is not self._side
        return None if self.joint else token.ids or None


class StreamSink:
    """Writes tokens as they come, and a sign of life after each SIGN_OF_LIFE_S of silence.

    The response begins with the first of all these, so that an earlier failure is a plain HTTP error with the right
    status. Where that was no token, nobody knows yet which side will win: the first chunk says so. `closed()` ends it.
    """

    def __init__(
        self,
        request: web.Request,
        shape: AnswerShape,
        request_id: str,
        clock: Clock,
        *,
        include_usage: bool = False,
        token_ids: bool = False,
        sides: bool = False,
        quality: str | None = None,
        ignored: Mapping[Side, Sequence[str]] | None = None,
    ) -> None:
        """`quality` is what the device's answer is planned to have, None where all have the same.

        `ignored` has the fields that an answer by a side does not heed.
        """
        self._request = request
        self._shape = shape
        self._request_id = request_id
        self._include_usage = include_usage
        self._sides = sides
        self._quality, self._ignored = quality, ignored or {}
        self._ids = _TokenIds(wanted=token_ids)
        self._pending = b""
        self._winner: Side | None = None
        self._model: str | None = None
        self._reason: Reason | None = None
        self._now = asyncio.get_running_loop().time
        self._deadline = Deadline()
        self._writing = False
        self._signs = signs_of_life.SignsOfLife(self._sign, clock, signs_of_life.SIGN_OF_LIFE_S)
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the response has begun, or is about to: from then on errors are sent in-band."""
        return self._winner is not None or self._has_left

    @property
    def _has_left(self) -> bool:
        """Whether status and headers have left, or are just leaving."""
        return self.response is not None or self._signs.under_way

    def prompt(self, n_tokens: int) -> None:
        """Take the length of the prompt, for a shape whose begin tells it."""
        self._shape.prompt(n_tokens)

    def route(self, side: Side, model: str, reason: Reason) -> None:
        """Take what the headers tell, if they have not left."""
        self._model, self._reason = model, reason

    def token(self, token: Token, side: Side) -> None:
        """Take one token, made by `side`, to be written by the next `flush`."""
        first = self._winner is None
        self._winner = self._winner or side
        told = side if self._sides or (first and self._has_left) else None
        self._pending += self._shape.token(token, self._ids.of(token, side), first=first, side=told)

    def note(self, text: str) -> None:
        """Send a remark between two tokens. Before the first token there is no place for it."""
        if self._winner is not None:
            self._pending += self._shape.note(text)

    def mix(self) -> None:
        """Tell no token ids from here on."""
        self._ids.joint = True

    async def flush(self) -> None:
        """Write the tokens taken so far; wait while the client's socket is full. Raises ReaderGone."""
        if self._pending:
            await self._write(b"")

    async def finish(self, outcome: Outcome) -> web.StreamResponse:
        """Write the end of a whole answer, as its shape has it."""
        self._winner = outcome.winner
        return await self._write(self._shape.ending(outcome, include_usage=self._include_usage), last=True)

    async def fail(self, error: DiscoError) -> web.StreamResponse:
        """Send a failure in mid-answer, in-band; nothing may follow."""
        return await self._write(self._shape.failed(error), last=True)

    async def closed(self) -> None:
        """End the signs of life and the deadline; nothing may be written after it."""
        self._deadline.close()
        await self._signs.closed()

    async def _write(self, data: bytes, *, last: bool = False) -> web.StreamResponse:
        """Write all that is pending and `data`; the response begins with the first write."""
        data, self._pending = self._pending + data, b""
        self._writing = True
        try:
            with self._deadline.at(self._now() + READER_TIMEOUT_S):
                await self._signs.given()
                response = self.response or await self._begin()
                await (response.write_eof(data) if last else response.write(data))
            return response
        except TimeoutError as e:
            raise ReaderGone(f"the client has not read for {READER_TIMEOUT_S:g} s") from e
        except ConnectionError as e:
            raise ReaderGone("the client has left") from e
        finally:
            self._writing = False
            self._signs.heard()

    async def _sign(self) -> None:
        """Send a sign of life, unless something else is on its way. A reader that takes none is gone."""
        if self._writing:
            return
        try:
            async with asyncio.timeout(READER_TIMEOUT_S):
                response = self.response or await self._begin()
                await response.write(self._shape.sign_of_life())
        except (TimeoutError, ConnectionError):
            if self._request.transport is not None:
                self._request.transport.abort()  # aiohttp then cancels the request, and with it the answer

    async def _begin(self) -> web.StreamResponse:
        quality = self._quality if self._winner is not None else None  # as the route, it is not known before
        quality = quality and (quality if self._winner is Side.DEVICE else "whole")
        ignored = () if self._winner is None else self._ignored.get(self._winner, ())
        told = headers(self._request_id, self._winner, quality, model=self._model, reason=self._reason, ignored=ignored)
        response = _Stream(headers=told)
        response.content_type = self._shape.content_type
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        await response.prepare(self._request)
        self.response = response
        return response


class _Stream(web.StreamResponse):
    """A response whose headers leave with what is first written, not before it: one packet less before a token."""

    _send_headers_immediately = False


class BodySink:
    """Collects an answer into one body."""

    def __init__(self, shape: AnswerShape, *, token_ids: bool = False) -> None:
        self._shape = shape
        self._ids = _TokenIds(wanted=token_ids)
        self._known: dict[int, list[int]] = {}
        self._tokens: list[Token] = []

    def prompt(self, n_tokens: int) -> None:
        """Ignore it: the end tells what was counted."""

    def route(self, side: Side, model: str, reason: Reason) -> None:
        """Ignore it: the outcome has it."""

    def token(self, token: Token, side: Side) -> None:
        """Keep one token, made by `side`."""
        self._tokens.append(token)
        if ids := self._ids.of(token, side):
            self._known.setdefault(token.index, []).extend(ids)

    def note(self, text: str) -> None:
        """Ignore a remark: a body has no comments, and its `disco` object has the handoffs."""

    def mix(self) -> None:
        """Tell no token ids."""
        self._ids.joint = True

    async def flush(self) -> None:
        """Do nothing: a body is sent when the answer is whole."""

    def body(self, outcome: Outcome) -> dict[str, Any]:
        """Return the whole response body."""
        return self._shape.body(self._tokens, {} if self._ids.joint else self._known, outcome)
