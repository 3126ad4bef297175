"""Connections that a server closes at the wrong moment."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from disco_daemon.endpoints.server import Server
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Sampling, Token, Usage
from tests.fixtures.raw import serving

BODY = b"""data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}

data: {"choices":[{"delta":{},"finish_reason":"stop"}]}

data: [DONE]

"""
CUT = b"""data: {"choices":[{"text":" and","finish_reason":null}]}

data: {"choices":[{"text":"","finish_reason":"length"}]}

data: [DONE]

"""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
REQUEST = GenerationRequest("r", ({"role": "user", "content": "x"},))


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    await reader.readexactly(length)


async def ask(server: Server) -> list[Token | Finish]:
    async with aclosing(server.ask(REQUEST, Usage())) as events:
        return [event async for event in events]


@pytest.mark.parametrize(("limit", "whole"), [(None, False), (1, True)])
async def test_a_server_that_takes_no_limit_for_its_default_has_cut_the_answer(limit: int | None, whole: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(CUT), CUT))
        await writer.drain()

    async def told(request: GenerationRequest) -> str:
        return f"<user>x<assistant>{request.answer_so_far}"

    request = replace(REQUEST, answer_so_far="one", sampling=Sampling(max_tokens=limit))
    async with serving(handle, stream_usage=False) as server:
        server._render = told
        events: list[Token | Finish] = []
        if whole:
            await collect(server, request, events)
            assert events == [Token(" and"), Finish("length")]
            return
        with pytest.raises(EndpointError) as failed:
            await collect(server, request, events)
        assert events == [Token(" and")]
        assert failed.value.reason == "cut"


async def collect(server: Server, request: GenerationRequest, into: list[Token | Finish]) -> None:
    async with aclosing(server.ask(request, Usage(), "text")) as answer:
        async for event in answer:
            into.append(event)


async def test_a_list_of_models_that_is_nested_too_deeply_tells_nothing_and_is_not_asked_for_again() -> None:
    n_asked, nested = 0, b'{"data":' * 100_000

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_asked
        await reader.readuntil(b"\r\n\r\n")
        n_asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(nested), nested))
        await writer.drain()

    async with serving(handle, stream_usage=False) as server:
        await server.inquire()
        assert server.should_inquire is False
    assert n_asked == 1
