"""The two shapes an answer can leave in: a stream of server-sent events, or one JSON body."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import msgspec
from aiohttp import web

from ..errors import DiscoError, ReaderGone
from ..types import Outcome, Side, Token
from . import openai

READER_TIMEOUT_S = 300.0  # a reader who takes nothing for so long holds a server's stream open for nobody

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One server-sent event. There is never an `id:` field: the openai client then trips over comments."""
    return b"data: " + _encode(payload) + b"\n\n"


def headers(request_id: str, route: str | None) -> dict[str, str]:
    """The daemon's own response headers."""
    found = {"X-Disco-Request-Id": request_id}
    if route is not None:
        found["X-Disco-Route"] = route
    return found


class StreamSink:
    """Writes tokens as they come. The response begins with the first token, so that an earlier failure is a plain
    HTTP error with the right status.
    """  # noqa: D205

    def __init__(self, request: web.Request, head: dict[str, Any], request_id: str, *, include_usage: bool) -> None:
        self._request = request
        self._head = head
        self._request_id = request_id
        self._include_usage = include_usage
        self._pending = b""
        self._winner: Side | None = None
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the answer has begun: from then on an error is told in-band."""
        return self._winner is not None

    def token(self, token: Token, winner: Side) -> None:
        """Take one token, to be written by the next `flush`."""
        first = self._winner is None
        self._winner = winner
        delta = openai.delta_of(token, first=first)
        self._pending += event(openai.chunk(self._head, delta, logprobs=token.logprobs))

    async def flush(self) -> None:
        """Write what was taken; waits while the client's socket is full. Raises ReaderGone."""
        if self._pending:
            await self._write(b"")

    async def finish(self, outcome: Outcome) -> web.StreamResponse:
        """Write the end of a whole answer: finish_reason, usage if asked for, the disco object, [DONE]."""
        self._winner = outcome.winner
        last = openai.chunk(self._head, {}, outcome.finish_reason or "stop")
        if self._include_usage:
            usage = openai.usage_of(*outcome.billed)
            tail = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage}
            data = event(last) + event(tail | {"disco": outcome.to_json()})
        else:
            data = event(last | {"disco": outcome.to_json()})
        return await self._write(data + b"data: [DONE]\n\n", last=True)

    async def fail(self, error: DiscoError) -> web.StreamResponse:
        """Tell a failure in mid-answer. Clients read errors only as data; no [DONE] may follow."""
        return await self._write(event(openai.error_body(error)), last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> web.StreamResponse:
        """Write all that is pending and `data`; the response begins with the first write."""
        data, self._pending = self._pending + data, b""
        try:
            async with asyncio.timeout(READER_TIMEOUT_S):
                response = self.response or await self._begin()
                await response.write(data)
                if last:
                    await response.write_eof()
            return response
        except TimeoutError as e:
            msg = f"the client has not read for {READER_TIMEOUT_S:g} s"
            raise ReaderGone(msg) from e
        except ConnectionError as e:
            raise ReaderGone("the client has left") from e

    async def _begin(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers(self._request_id, self._winner))
        response.content_type = "text/event-stream"
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        await response.prepare(self._request)
        self.response = response
        return response


class BodySink:
    """Collects an answer into one `chat.completion`."""

    def __init__(self, head: dict[str, Any], request_id: str) -> None:
        self._head = head
        self._request_id = request_id
        self._pieces: list[str] = []
        self._deltas: list[dict[str, Any]] = []
        self._logprobs: list[Any] = []

    async def flush(self) -> None:
        """Nothing leaves before the answer is whole."""

    def token(self, token: Token, winner: Side) -> None:
        """Keep one token."""
        del winner
        self._pieces.append(token.text)
        if token.delta:
            self._deltas.append(copy.deepcopy(dict(token.delta)))  # tokens are frozen, and merging writes
        if token.logprobs:
            self._logprobs += token.logprobs.get("content") or []

    def body(self, outcome: Outcome) -> dict[str, Any]:
        """The whole response body."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces)}
        for delta in self._deltas:
            _merge(message, delta)
        if message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in message["tool_calls"]]
            message["content"] = message["content"] or None
        logprobs = {"content": self._logprobs} if self._logprobs else None
        choice = {
            "index": 0, "message": message, "logprobs": logprobs, "finish_reason": outcome.finish_reason or "stop",
        }  # fmt: skip
        usage = openai.usage_of(*outcome.billed)
        return self._head | {
            "object": "chat.completion", "choices": [choice], "usage": usage, "disco": outcome.to_json(),
        }  # fmt: skip


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
