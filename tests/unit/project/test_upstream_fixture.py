"""The fixture itself, seen by the unmodified OpenAI client: answers are right and each fault looks as named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from disco_daemon.bench.script import script
from tests.fixtures.upstream import Upstream

PROMPT = "alpha beta gamma"
ANSWER = "alpha beta gamma alpha beta gamma alpha beta "  # 8 tokens
SHORT_S = 0.4  # client time-out where the fault is silence, s
PATIENCE_S = 30.0  # where none is expected, s


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=8) as server:
        yield server


@pytest.fixture
async def client(upstream: Upstream) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=upstream.url, api_key="test", max_retries=0, timeout=PATIENCE_S
    ) as openai_client:
        yield openai_client


async def open_stream(
    client: openai.AsyncOpenAI, prompt: str = PROMPT, timeout: float = PATIENCE_S
) -> openai.AsyncStream[ChatCompletionChunk]:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    return await client.chat.completions.create(model="m", messages=messages, stream=True, timeout=timeout)


async def read(stream: openai.AsyncStream[ChatCompletionChunk], seen: list[str]) -> str | None:
    """Append each content to `seen` (kept if the stream breaks); the finish reason."""
    reason = None
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    seen.append(choice.delta.content)
                reason = choice.finish_reason or reason
    return reason


async def test_stream_is_openai_shaped(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=2,
    )
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks[:-1]] == ["alpha ", "beta ", None]
    assert [c.choices[0].delta.role for c in chunks[:-1]] == ["assistant", None, None]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 2)
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    exchange = upstream.exchanges[0]
    assert exchange.headers["Authorization"] == "Bearer test"
    assert exchange.body["max_tokens"] == 2
    assert (exchange.chunks, exchange.ended, exchange.closed_at) == (2, True, None)


async def test_whole_answer_and_models(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": PROMPT}])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 11
    assert [model.id async for model in client.models.list()] == ["loopback"]


@pytest.mark.parametrize(
    ("so_far", "rest"),
    [
        ("alpha beta ", "gamma alpha beta gamma alpha beta "),
        ("alpha be", "ta gamma alpha beta gamma alpha beta "),
        ("", ANSWER),
        (ANSWER, ""),
        ("something else", ANSWER),
    ],
)
async def test_continues_a_partial_answer(client: openai.AsyncOpenAI, so_far: str, rest: str) -> None:
    answer = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": PROMPT}, {"role": "assistant", "content": so_far}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.choices[0].message.content == rest


async def test_concurrent_answers_are_their_own(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    async def ask(word: str) -> str:
        seen: list[str] = []
        await read(await open_stream(client, word), seen)
        return "".join(seen)

    words = [f"w{i}" for i in range(20)]
    assert await asyncio.gather(*map(ask, words)) == ["".join(script(word, 8)) for word in words]
    assert upstream.open_streams == 0


async def test_not_a_chat_request(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not a chat request"):
        await client.post("/chat/completions", body={"messages": 3}, cast_to=object)


async def test_disconnect_is_seen(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.stall_after(2):
        stream = await open_stream(client)
        assert (await anext(stream)).choices[0].delta.content == "alpha "
        assert upstream.open_streams == 1
        before = asyncio.get_running_loop().time()
        await stream.close()
        assert await upstream.wait_closed(0) >= before
    assert upstream.open_streams == 0
    async with aiohttp.ClientSession() as session, session.get(upstream.url.removesuffix("/v1") + "/stats") as response:
        stats = await response.json()
    assert (stats["requests"], stats["open_streams"], len(stats["disconnects"])) == (1, 0, 1)
    assert stats["chunks"] == {upstream.exchanges[0].id: 2}
    assert stats["disconnects"][0]["at_s"] == upstream.exchanges[0].closed_at


async def test_a_complete_answer_is_no_disconnect(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    await read(await open_stream(client), [])
    await client.close()
    with pytest.raises(TimeoutError):
        await upstream.wait_closed(0, timeout=0.05)


async def test_refuse_and_come_back(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    seen: list[str] = []
    assert await read(await open_stream(client), seen) == "stop"  # leaves a pooled connection behind
    async with upstream.refuse():
        with pytest.raises(openai.APIConnectionError):
            await open_stream(client)
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", upstream.port)
    assert await read(await open_stream(client), seen) == "stop"
    assert len(upstream.exchanges) == 2


async def test_refuse_ends_running_answers(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.stall_after(1):
        stream = await open_stream(client)
        await anext(stream)
    async with upstream.refuse():
        with pytest.raises(openai.APIConnectionError):
            await anext(stream)
    assert upstream.exchanges[0].closed_at is None  # not the client's doing
    await stream.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, openai.AuthenticationError), (429, openai.RateLimitError), (500, openai.InternalServerError)],
)
async def test_status(
    upstream: Upstream, client: openai.AsyncOpenAI, status: int, error: type[openai.APIStatusError]
) -> None:
    with upstream.status(status, headers={"Retry-After": "7"}, times=1):
        with pytest.raises(error) as caught:
            await open_stream(client)
        assert caught.value.response.headers["Retry-After"] == "7"
        assert f"injected {status}" in str(caught.value)
        assert await read(await open_stream(client), []) == "stop"  # `times` is used up
    assert upstream.exchanges[0].chunks == 0


async def test_status_with_a_body_of_its_own_hits_models_too(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.status(401, "who are you?"), pytest.raises(openai.AuthenticationError) as caught:
        await client.models.list()
    assert caught.value.response.text == "who are you?"


async def test_hang(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.hang(), pytest.raises(openai.APITimeoutError):
        await open_stream(client, timeout=SHORT_S)
    await upstream.wait_closed(0)
    assert upstream.exchanges[0].chunks == 0


async def test_stall(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    seen: list[str] = []
    with upstream.stall_after(3), pytest.raises(openai.APITimeoutError):
        await read(await open_stream(client, timeout=SHORT_S), seen)
    assert seen == ["alpha ", "beta ", "gamma "]
    await upstream.wait_closed(0)


@pytest.mark.parametrize("n", [0, 3, 8])
async def test_cut(upstream: Upstream, client: openai.AsyncOpenAI, n: int) -> None:
    seen: list[str] = []
    with upstream.cut_after(n), pytest.raises(openai.APIConnectionError) as caught:
        await read(await open_stream(client), seen)
    assert not isinstance(caught.value, openai.APITimeoutError)
    assert len(seen) == n
    assert upstream.exchanges[0].closed_at is None


async def test_close_without_finish(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    seen: list[str] = []
    with upstream.close_without_finish(3):
        assert await read(await open_stream(client), seen) is None
    assert len(seen) == 3


async def raw(upstream: Upstream) -> tuple[str, bytes]:
    """Content type and body of one streamed answer, as a client without an SSE decoder sees it."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    url = f"{upstream.url}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return response.content_type, await response.read()


async def test_close_without_done(upstream: Upstream) -> None:
    with upstream.close_without_done():
        _, body = await raw(upstream)
    assert b'"finish_reason":"stop"' in body
    assert b"[DONE]" not in body
    assert (await raw(upstream))[1].endswith(b"data: [DONE]\n\n")


async def test_empty_and_html_200(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.empty_200():
        assert await raw(upstream) == ("text/event-stream", b"")
        assert await read(await open_stream(client), []) is None
    with upstream.html_200():
        kind, body = await raw(upstream)
        assert (kind, body[:15]) == ("text/html", b"<!doctype html>")
        assert await read(await open_stream(client), []) is None


async def test_error_event(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    seen: list[str] = []
    error = {"message": "out of memory", "type": "server_error", "code": "oom"}
    with upstream.error_event_after(2, error), pytest.raises(openai.APIError, match="out of memory") as caught:
        await read(await open_stream(client), seen)
    assert caught.value.code == "oom"
    assert len(seen) == 2


async def test_garbage(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    seen: list[str] = []
    with upstream.garbage_after(2), pytest.raises(json.JSONDecodeError):
        await read(await open_stream(client), seen)
    assert len(seen) == 2


@pytest.mark.parametrize("headers_first", [True, False])
async def test_delay(upstream: Upstream, client: openai.AsyncOpenAI, headers_first: bool) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    with upstream.delay(SHORT_S, headers_first=headers_first):
        stream = await open_stream(client)
        headers_s = loop.time() - start
        assert await read(stream, []) == "stop"
    assert loop.time() - start >= SHORT_S
    assert (headers_s < SHORT_S) == headers_first


async def test_comments_and_split_utf8(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    prompt = "größe 🙂 日本"
    seen: list[str] = []
    pieces: list[bytes] = []
    with upstream.with_comments(), upstream.split_utf8():
        assert await read(await open_stream(client, prompt), seen) == "stop"
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": prompt}]}
        url = f"{upstream.url}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            async for piece in response.content.iter_any():
                pieces.append(piece)
    assert seen == ["größe ", "🙂 ", "日本 "] * 2 + ["größe ", "🙂 "]
    assert b"".join(pieces).count(b": keep-alive\n\n") == 10
    assert any(piece[0] & 0xC0 == 0x80 for piece in pieces)  # characters really arrive cut


async def test_a_fault_stays_with_the_requests_it_met(upstream: Upstream, client: openai.AsyncOpenAI) -> None:
    with upstream.stall_after(1):
        stalled = await open_stream(client)
        await anext(stalled)
    assert await read(await open_stream(client), []) == "stop"
    assert not upstream.exchanges[0].ended
    await stalled.close()
    await upstream.wait_closed(0)
