"""What cannot be read, or is none of this API, is refused in OpenAI's shape, and writes one line to the log at most."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.raw import message, replied
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: dict[str, Any] = {"model": "disco", "messages": [{"role": "user", "content": "Hello!"}]}
CHAT = "/v1/chat/completions"


def chat(body: bytes = json.dumps(HELLO).encode(), **headers: str) -> bytes:
    return message("POST", CHAT, body, **headers)


def deep(n: int) -> Any:
    found: Any = 1
    for _ in range(n):
        found = [found]
    return found


UNREADABLE = {
    "a method that nobody knows": message("BREW", CHAT),
    "no HTTP at all": b"GARBAGE\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
    "an escape in the target": b"GET /\x1b]52;c;ZXZpbA==\x07 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n: x\r\n\r\n",
    "a header with a NUL": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
    "an endless target": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an endless header": message("GET", "/health", X="a" * 20_000),
    "headers without end": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: 1\r\n" * 5000 + b"\r\n",
    "two lengths": b"POST /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": chat(Transfer_Encoding="chunked"),
    "a negative length": chat(Content_Length="-1"),
    "two hosts": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    "HTTP 9": b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "bad chunks": message("POST", CHAT, b"zz\r\nnot a chunk\r\n", Transfer_Encoding="chunked", Content_Length=""),
    "gzip that is none": chat(Content_Encoding="gzip"),
    "deflate that is none": chat(Content_Encoding="deflate"),
}
WRONG: dict[str, tuple[bytes, int]] = {
    "an unknown path": (message("GET", "/v1/nothing"), 404),
    "another method": (message("PUT", CHAT), 405),
    "a method of another route": (message("GET", CHAT), 405),
    "an unknown expectation": (chat(Expect="tea"), 417),
    "an integer beyond 64 bits": (chat(json.dumps(HELLO | {"chat_template_kwargs": {"x": 2**64}}).encode()), 400),
    "one below": (chat(json.dumps(HELLO | {"response_format": {"minimum": -(10**30)}}).encode()), 400),
    "one in a field of nobody's": (chat(json.dumps(HELLO | {"x": [2**70]}).encode()), 400),
    "one in a message": (chat(json.dumps({**HELLO, "messages": [{**HELLO["messages"][0], "x": 2**64}]}).encode()), 400),
    "deep nesting": (chat(json.dumps(HELLO | {"chat_template_kwargs": {"x": deep(100)}}).encode()), 400),
    "very deep nesting": (chat(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), device=False, server=upstream.url) as started:
        yield started


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_cannot_be_read_is_a_400_in_shape_and_one_line_in_the_log(what: str, daemon: DaemonProcess) -> None:
    before = daemon.log.count("\n")
    reply = await replied(daemon.url, UNREADABLE[what])
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert len(reply.error["message"]) < 400
    told = daemon.log.splitlines()[before:]
    assert len(told) <= 1, told
    assert "Traceback" not in daemon.log
    assert all(line.isprintable() for line in told)


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_is_told_in_shape(what: str, daemon: DaemonProcess, upstream: Upstream) -> None:
    before, n_asked = daemon.log, len(upstream.exchanges)
    sent, status = WRONG[what]
    reply = await replied(daemon.url, sent)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    assert daemon.log == before
    assert len(upstream.exchanges) == n_asked


async def test_a_405_says_what_is_allowed(daemon: DaemonProcess) -> None:
    reply = await replied(daemon.url, message("GET", CHAT))
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    reply = await replied(daemon.url, message("DELETE", "/health"))
    assert reply.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("sent", [message("GET", "/health"), chat(), b"GARBAGE\r\n\r\n", message("GET", "/nothing")])
async def test_no_response_tells_versions(sent: bytes, daemon: DaemonProcess) -> None:
    assert (await replied(daemon.url, sent)).headers["server"] == "disco"


async def test_a_streamed_answer_tells_no_versions_either(daemon: DaemonProcess) -> None:
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=HELLO | {"stream": True}) as response:
        assert response.headers["Server"] == "disco"
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("said", ["nan", "inf", "-inf", "1e400", "-5", "99999999999999999999", "soon"])
async def test_a_senseless_retry_after_of_the_server_is_no_fault_of_ours(
    said: str, daemon: DaemonProcess, upstream: Upstream
) -> None:
    with upstream.status(429, headers={"Retry-After": said}):
        reply = await replied(daemon.url, chat())
    assert reply.status in (429, 503)
    assert reply.error
    assert 1 <= int(reply.headers.get("retry-after", "1")) <= 86400
    assert "Traceback" not in daemon.log


async def test_the_daemon_serves_as_before(daemon: DaemonProcess) -> None:
    assert (await ask(daemon, "Still there?")).text
    await daemon.until(lambda s: s["in_flight"] == 0)
