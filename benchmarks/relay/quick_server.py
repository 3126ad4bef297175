"""The scripted server of throughput figures: the loopback server's answers, by a loop's protocol alone.

`python -m benchmarks.relay.quick_server --tokens 200` prints `{"url": …}` and serves until end of stdin. It writes each
token by itself, one of each stream in turn, twice as fast as the loopback server does: what stands between is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from disco_daemon.bench.loopback import bind
from disco_daemon.bench.script import DONE, Exchange, script_answer

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class QuickConnection(asyncio.Protocol):
    """One connection: reads a request with a Content-Length, and answers it before the next one."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._read = b""
        self._pieces: Iterator[bytes] = iter(())
        self._transport: asyncio.Transport | None = None
        self._paused = self._writing = False
        self._soon = asyncio.get_running_loop().call_soon

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the other end."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read what has come of a request; answer it once it is whole."""
        self._read += data
        head, ended, rest = self._read.partition(b"\r\n\r\n")
        if not ended:
            return
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line[:15].lower() == b"content-length:"), 0)
        if len(rest) < length:
            return
        body, self._read = rest[:length], rest[length:]
        self._answer(json.loads(body) if body else {})

    def pause_writing(self) -> None:
        """The other end is slow."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has read."""
        self._paused = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody listens any more."""
        self._transport = None

    def _answer(self, body: dict[str, Any]) -> None:
        assert self._transport is not None
        if not body.get("stream"):
            document = json.dumps({"object": "list", "data": [{"id": "loopback", "object": "model"}]}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(document)}\r\n\r\n"
            self._transport.write(head.encode() + document)
            return
        tokens, reason = script_answer(body, self._n_tokens)
        exchange = Exchange("chatcmpl-0", {}, body, tokens, reason, 0.0, int(time.time()))
        self._transport.write(HEAD)
        self._pieces = _pieces(exchange)
        self._write()

    def _write(self) -> None:
        """Write a token, and let the other streams write theirs before the next one."""
        if self._transport is None or self._paused:
            return
        if (piece := next(self._pieces, None)) is not None:
            self._transport.write(piece)
            self._soon(self._write)


def _pieces(exchange: Exchange) -> Iterator[bytes]:
    """The body of one answer, in chunks of HTTP."""
    for event in (*exchange.content_events(), exchange.last_events(), DONE):
        yield b"%x\r\n%b\r\n" % (len(event), event)
    yield b"0\r\n\r\n"


async def serve(n_tokens: int) -> None:
    """Serve until end of stdin."""
    loop = asyncio.get_running_loop()
    listener = bind(0)
    server = await loop.create_server(lambda: QuickConnection(n_tokens), sock=listener)
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}/v1"}), flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="length of an answer (default: %(default)s)")
    asyncio.run(serve(parser.parse_args().tokens))
