"""The soak judges answers by the one that nothing has disturbed, and its proxy breaks connections as it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.soak.clients import Broken, SoakAnswer, _error_of, judge
from benchmarks.soak.proxy import Proxy

WHOLE = "one two three"


@pytest.mark.parametrize(
    ("heard", "left", "wrong"),
    [
        (SoakAnswer(WHOLE, "stop"), False, None),
        (SoakAnswer("one two", "length"), False, "length after 7 of 13"),
        (SoakAnswer("one two"), False, "the end was not told"),
        (SoakAnswer("one two"), True, None),
        (SoakAnswer("one two", None, "the server broke"), False, None),
        (SoakAnswer("", None, "overloaded"), False, None),
        (SoakAnswer("one one two", None, "broke"), False, "no beginning"),
        (SoakAnswer("one two three four", "stop"), True, "no beginning"),
    ],
)
def test_an_answer_is_whole_or_a_beginning_whose_end_is_told(heard: SoakAnswer, left: bool, wrong: str | None) -> None:
    said = judge(heard, WHOLE, left=left)
    assert (said is None) if wrong is None else (said is not None and wrong in said)


def test_an_error_has_openais_shape() -> None:
    assert _error_of(b'{"error":{"message":"no","type":"t","param":null,"code":null}}') == "no"
    for data in (b"500 Internal Server Error", b'{"error":"no"}', b'{"error":{"message":"no"}}', b""):
        with pytest.raises(Broken):
            _error_of(data)


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    """A server that says what it is told; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def told(port: int, data: bytes) -> bytes:
    """What comes back until the connection ends, properly or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    heard = b""
    try:
        while piece := await reader.read(1024):
            heard += piece
    except ConnectionError:
        heard += b"|reset"
    writer.transport.abort()
    return heard


async def test_a_proxy_passes_on_what_comes_and_notes_what_it_watches_for(echo: int) -> None:
    async with Proxy(echo, b"secret") as proxy:
        assert await told(proxy.port, b"hello") == b"hello"
        assert (proxy.passed, proxy.seen) == (1, False)
        proxy.trickling = True
        assert await told(proxy.port, b"a secret that trickles") == b"a secret that trickles"
        assert proxy.seen


async def test_a_proxy_refuses_cuts_and_answers_in_the_servers_place(echo: int) -> None:
    async with Proxy(echo) as proxy:
        proxy.refusing = True
        assert await told(proxy.port, b"hello") in (b"", b"|reset")
        proxy.refusing = False
        proxy.instead, proxy.n_instead = b"HTTP/1.1 429 No\r\n\r\n", 1
        assert await told(proxy.port, b"GET / HTTP/1.1\r\n\r\n") == b"HTTP/1.1 429 No\r\n\r\n"
        proxy.cut_after = 3
        assert (await told(proxy.port, b"hello")).endswith((b"|reset", b""))
        assert await told(proxy.port, b"hello") == b"hello"
        async with proxy.stalled():
            waiting = asyncio.create_task(told(proxy.port, b"late"))
            while not proxy.n_open:
                await asyncio.sleep(0)
        assert await waiting == b"late"
    assert proxy.n_open == 0
