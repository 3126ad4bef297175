"""An OpenAI-compatible server that answers at once with a scripted text: the other end of a measurement or a test.

`python -m disco_daemon.bench.loopback --port 0` prints `{"url": …}` and serves until SIGTERM, SIGINT or end of stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from aiohttp import web

from .script import DONE, Exchange, error_body, script_answer

TOKENS = 64  # length of an answer by default, tokens
KEEP = 10_000  # exchanges remembered for /stats and for tests; older ones are forgotten
MAX_BODY = 64 * 2**20  # largest request read, bytes
SHUTDOWN_S = 0.01  # how long running answers may go on after close(), s; aiohttp takes 0 for "for ever"
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class BodyEnded(Exception):
    """Raised by a hook: end the body here; `clean` says whether the end of the body is marked as such."""

    def __init__(self, *, clean: bool) -> None:
        super().__init__()
        self.clean = clean


class LoopbackServer:
    """Scripted answers on 127.0.0.1. `tokens` is the length of an answer, `interval_s` the pause before each token, s.

    A test injects faults through the hooks `respond`, `before`, `write`, `models` and `on_request`.
    """

    def __init__(self, *, port: int = 0, tokens: int = TOKENS, interval_s: float = 0.0) -> None:
        self.port = port  # 0 until it listens: a free one
        self.tokens = tokens
        self.interval_s = interval_s
        self.n_requests = 0
        self.exchanges: deque[Exchange] = deque(maxlen=KEEP)
        self.open_streams = 0  # answers under way, streamed or not
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/stats", self._stats)
        # A handler is cancelled as soon as its client goes away: that is how a disconnect is seen.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, handle_signals=False
        )

    @property
    def url(self) -> str:
        """The base URL for an OpenAI client."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await self._listen(bind(self.port))

    async def close(self) -> None:
        """Stop listening and end all connections."""
        self._settle()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # The hooks.

    async def respond(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Answer one chat request."""
        if exchange.body.get("stream"):
            return await self.stream(request, exchange)
        await asyncio.sleep(self.interval_s * len(exchange.tokens))
        return web.json_response(exchange.completion())

    async def before(self, request: web.Request, response: web.StreamResponse, exchange: Exchange, i: int) -> None:
        """Before content chunk `i`; `n` and `n + 1` are the finish chunk and `[DONE]`. May raise `BodyEnded`."""
        if i < len(exchange.tokens):
            await asyncio.sleep(self.interval_s)  # even 0 lets the other streams go on and a disconnect be seen

    async def write(self, response: web.StreamResponse, exchange: Exchange, event: bytes) -> None:
        """Write one event."""
        await response.write(event)

    def on_request(self, exchange: Exchange) -> None:
        """Take note that a chat request arrived; `exchange` is already among `exchanges`."""

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/models`."""
        model = {"id": "loopback", "object": "model", "created": 0, "owned_by": "disco"}
        return web.json_response({"object": "list", "data": [model]})

    # The answers.

    async def stream(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Answer with server-sent events."""
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        try:
            for i, event in enumerate(exchange.content_events()):
                await self.before(request, response, exchange, i)
                await self.write(response, exchange, event)
                exchange.chunks += 1
            for i, event in enumerate((exchange.last_events(), DONE), start=len(exchange.tokens)):
                await self.before(request, response, exchange, i)
                await self.write(response, exchange, event)
        except BodyEnded as end:
            if not end.clean:
                return response
        except ConnectionError:  # gone, and the cancellation that says so is still under way
            exchange.end(by_client=True, now=asyncio.get_running_loop().time())
            return response
        with suppress(ConnectionError):  # gone with the last byte: the answer is whole
            await response.write_eof()
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        try:
            exchange = self._open(request, await request.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response(error_body(f"not a chat request: {error!r}"), status=400)
        self.open_streams += 1
        by_client = False
        try:
            return await self.respond(request, exchange)
        except asyncio.CancelledError:
            by_client = True
            raise
        finally:
            self.open_streams -= 1
            exchange.end(by_client=by_client, now=loop.time())

    def _open(self, request: web.Request, body: Mapping[str, Any]) -> Exchange:
        tokens, reason = script_answer(body, self.tokens)
        name = request.headers.get("X-Request-ID") or f"chatcmpl-{self.n_requests}"
        now = asyncio.get_running_loop().time()
        exchange = Exchange(name, request.headers, body, tokens, reason, now, int(time.time()))
        self.n_requests += 1
        self.exchanges.append(exchange)
        self.on_request(exchange)
        return exchange

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        gone = [{"id": e.id, "at_s": e.closed_at, "chunks": e.chunks} for e in self.exchanges if e.closed.is_set()]
        stats = {
            "requests": self.n_requests,
            "open_streams": self.open_streams,
            "chunks": {e.id: e.chunks for e in self.exchanges},
            "disconnects": gone,
            "now_s": asyncio.get_running_loop().time(),
        }
        return web.json_response(stats)

    async def _listen(self, sock: socket.socket) -> None:
        self.port = sock.getsockname()[1]
        self._site = web.SockSite(self._runner, sock)
        await self._site.start()

    def _settle(self) -> None:
        """Note that what ends now, this server ends."""
        for exchange in self.exchanges:
            exchange.end(by_client=False, now=0.0)


def bind(port: int) -> socket.socket:
    """Return a bound socket on 127.0.0.1 that does not listen yet: connecting to it is refused."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


async def serve(port: int, tokens: int, interval_s: float) -> None:
    """Serve until SIGTERM, SIGINT or the end of stdin."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def watch_stdin() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        with suppress(RuntimeError):  # the loop is already closed
            loop.call_soon_threadsafe(stop.set)

    async with LoopbackServer(port=port, tokens=tokens, interval_s=interval_s) as server:
        threading.Thread(target=watch_stdin, daemon=True).start()
        print(json.dumps({"url": server.url}), flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server from a command line."""
    parser = argparse.ArgumentParser(prog="disco_daemon.bench.loopback", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of an answer, tokens")
    parser.add_argument("--interval-ms", type=float, default=0.0, help="pause before each token, ms")
    args = parser.parse_args(argv)
    asyncio.run(serve(args.port, args.tokens, args.interval_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
