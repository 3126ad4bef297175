"""A server that floods takes turns with everything else: what is read between two turns of the loop is bounded.

Whatever carries nothing has a bound in sum, with an error that says so. Turns are counted, and no clock is looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp.client_proto import ResponseHandler

from disco_daemon.endpoints.chunks import MAX_PIECE
from disco_daemon.endpoints.kept_connections import MAX_FED, TURN_WORK
from disco_daemon.endpoints.server import Server
from disco_daemon.endpoints.server_answer import LARGE
from disco_daemon.endpoints.server_client import _CODINGS, MAX_UNPACKED, _unpack
from disco_daemon.endpoints.stream import (
    LINE_WORK,
    MAX_BRACKETS,
    MAX_IDLE_LINES,
    MAX_LINE,
    MAX_WORK,
    Endless,
    EventStream,
    Patience,
)
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Token, Usage
from tests.fixtures.floods import CHUNKED, FLOODS, OPEN, much
from tests.fixtures.raw import serving

REQUEST = GenerationRequest("r", ({"role": "user", "content": "x"},))


class Turns:
    """Counts the turns that the loop has: each is one that another answer could have had."""

    def __init__(self) -> None:
        self.n = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.n += 1
        self._next = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._next.cancel()


@contextmanager
def counted() -> Iterator[Turns]:
    turns = Turns()
    try:
        yield turns
    finally:
        turns.stop()


@dataclass
class Parsed:
    """The turn and the size of each step of the parser."""

    turns: Turns
    steps: list[tuple[int, int]] = field(default_factory=list)


@pytest_asyncio.fixture
async def parsed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parsed]:
    with counted() as turns:
        found, before = Parsed(turns), ResponseHandler.data_received

        def noted(self: ResponseHandler, data: bytes) -> None:
            found.steps.append((turns.n, len(data)))
            before(self, data)

        monkeypatch.setattr(ResponseHandler, "data_received", noted)
        yield found


@asynccontextmanager
async def flooding(head: bytes, flood: bytes) -> AsyncIterator[Server]:
    """A server that answers with a head, and a flood, if any, until nobody reads it any more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while flood and not writer.is_closing():
            writer.write(flood)
            await writer.drain()

    async with serving(serve) as server:
        yield server


async def heard(server: Server) -> list[Any]:
    async with aclosing(server.generate(REQUEST, Usage())) as events:
        return [event async for event in events]


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_with_an_error_that_names_it_and_others_have_turns_meanwhile(
    name: str, parsed: Parsed
) -> None:
    head, flood, why = FLOODS[name]
    async with flooding(head, much(flood)) as server:
        with pytest.raises(EndpointError, match=why) as failed:
            await heard(server)
    assert failed.value.reason in ("endless", "garbage")
    assert not failed.value.your_fault
    each = Counter[int]()
    for turn, size in parsed.steps:
        each[turn] += size
    assert max(each.values()) <= 2 * (MAX_FED if head in (b"", CHUNKED) else TURN_WORK)
    assert sum(each.values()) <= 2 * MAX_LINE


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b": x", b"", b"data: {}", b'data: {"a":[1,2,3]}', b"{}", b"event: y"])
async def test_lines_that_are_there_already_are_read_with_turns_between(line: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield (line + b"\n") * (4 * MAX_IDLE_LINES)

    with counted() as turns:
        stream = EventStream(body(), Patience(5, 5))
        with pytest.raises(Endless, match="lines without end"):
            async for _ in stream.objects():
                pass
        assert turns.n >= MAX_IDLE_LINES * LINE_WORK // MAX_WORK - 1


async def test_a_line_that_comes_in_small_pieces_is_read_with_turns_between() -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(MAX_LINE // 16 + 1):
            yield b"x" * 16

    with counted() as turns:
        with pytest.raises(ValueError, match="a line of more than"):
            async for _ in EventStream(body(), Patience(5, 5)).objects():
                pass
        assert turns.n >= MAX_LINE // 16 * LINE_WORK // MAX_WORK


async def test_tokens_renew_the_allowance() -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b": x\n" * (MAX_IDLE_LINES - 1) + b"data: {}\n"

    stream = EventStream(body(), Patience(5, 5))
    async for _ in stream.objects():
        stream.n_idle = 0


@pytest.mark.parametrize("opened", [b"[", b"{"])
async def test_a_line_of_nothing_but_brackets_is_not_decoded(opened: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'data: {"a":[' + b",".join(itertools.repeat(b"[]" if opened == b"[" else b"{}", MAX_BRACKETS)) + b"]}\n"

    with pytest.raises(ValueError, match="objects"):
        async for _ in EventStream(body(), Patience(5, 5)).objects():
            pass


# --- large chunks -----------------------------------------------------------------------------------------------------


def chat(**said: Any) -> Callable[[str], dict[str, Any]]:
    return lambda text: {"choices": [{"index": 0, "finish_reason": "stop", **_with(said, text)}]}


def _with(said: Any, text: str) -> Any:
    if isinstance(said, dict):
        return {key: _with(value, text) for key, value in said.items()}
    return text if said is ... else said


WHOLE = {
    "delta": chat(delta={"content": ...}),
    "message": chat(message={"role": "assistant", "content": ...}),
    "text": chat(text=...),
}


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("text", ["word " * 8_000, "é\U0001f600" * 9_000, "x" * 40_000])
async def test_a_whole_answer_in_one_chunk_comes_in_pieces_with_turns_between(form: str, text: str) -> None:
    document = WHOLE[form](text) | {"usage": {"completion_tokens": 8_000, "prompt_tokens": 3}}
    told = b"data: " + msgspec.json.encode(document) + b"\n\ndata: [DONE]\n\n"
    assert LARGE < len(told) < MAX_LINE

    async def once() -> tuple[list[Any], list[int]]:
        seen, at = [], []
        with counted() as turns:
            async with (
                flooding(OPEN + told, b"") as server,
                aclosing(server.generate(REQUEST, Usage())) as all_,
            ):
                async for event in all_:
                    seen.append(event)
                    at.append(turns.n)
        return seen, at

    events, at = await once()
    tokens = [one for one in events if isinstance(one, Token)]
    assert "".join(one.text for one in tokens) == text
    assert max(len(one.text) for one in tokens) <= MAX_PIECE
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "stop"
    assert all(later > earlier for earlier, later in itertools.pairwise(at[: len(tokens)]))


async def test_what_is_packed_is_unpacked_with_turns_between() -> None:
    n_pieces = 64
    packer = zlib.compressobj(wbits=_CODINGS["gzip"])
    packed = packer.compress(b"x" * (n_pieces * MAX_UNPACKED)) + packer.flush()

    async def body() -> AsyncIterator[bytes]:
        yield packed

    with counted() as turns:
        size = 0
        async for part in _unpack(body(), _CODINGS["gzip"]):
            assert len(part) <= MAX_UNPACKED
            size += len(part)
        assert turns.n >= n_pieces - 2
    assert size == n_pieces * MAX_UNPACKED
