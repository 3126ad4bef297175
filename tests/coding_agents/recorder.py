"""Stands between an agent and the daemon, and keeps what the agent asks: requests with their headers and bodies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from disco_daemon.bench.loopback import MAX_BODY, bind

HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "content-encoding", "accept-encoding"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request as an agent sent it; `body` is its JSON, None where there is none."""

    method: str
    path: str  # with the query
    has_key: bool
    body: Any
    status: int


class Recorder:
    """Passes requests on to `target`, unchanged but for the address, and answers as they come back."""

    def __init__(self, target: str) -> None:
        self.requests: list[Request] = []
        self._target = target
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        await self._runner.setup()
        sock = bind(0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await web.SockSite(self._runner, sock).start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        has_key = bool({"authorization", "x-api-key"} & {name.lower() for name in headers})
        raw = await request.read()
        body = await request.json() if raw else None
        async with self._session.request(
            request.method, f"{self._target}{request.path_qs}", headers=headers, data=raw or None
        ) as answer:
            self.requests.append(Request(request.method, request.path_qs, has_key, body, answer.status))
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            with suppress(ConnectionError):  # the agent has gone
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response
