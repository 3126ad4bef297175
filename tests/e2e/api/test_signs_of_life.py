"""A real daemon's stream is never silent for long, whatever it waits for; what failed first keeps its status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import ClientResponse

from disco_daemon.api.http.signs_of_life import SIGN_OF_LIFE_S
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

PATIENCE_S = 60.0
SHORT_S = 0.2
OFTEN = f"import disco_daemon.api.http.signs_of_life as s; s.SIGN_OF_LIFE_S = {SHORT_S}"
KEEP_ALIVE = b": keep-alive\n\n"


@asynccontextmanager
async def stream(daemon: DaemonProcess, model: str, **more: Any) -> AsyncIterator[ClientResponse]:
    """A streamed answer as it is on the wire."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True} | more
    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body, timeout=patience) as response:
        yield response


async def signs(response: ClientResponse, n: int) -> None:
    """Wait for `n` signs that come before anything else."""
    for _ in range(n):
        assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE


def said(told: bytes) -> str:
    """The text of a stream that came whole."""
    *events, done = [line[6:] for line in told.split(b"\n") if line.startswith(b"data: ")]
    assert done == b"[DONE]", told
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_the_first_byte_comes_after_ten_seconds_however_long_a_server_is_silent(tmp_path: Path) -> None:
    """The one test that waits as long as users do."""
    loop, speak = asyncio.get_running_loop(), asyncio.Event()
    async with (
        Upstream(tokens=4) as upstream, running(tmp_path, server=upstream.url, device=False) as daemon,
    ):  # fmt: skip
        with upstream.held_until(speak, None):
            asked_at = loop.time()
            async with stream(daemon, "disco") as response:
                await signs(response, 1)
                assert SIGN_OF_LIFE_S - 0.1 <= loop.time() - asked_at <= SIGN_OF_LIFE_S + 0.5
                assert response.status == 200
                assert "X-Disco-Route" not in response.headers
                speak.set()
                told = await response.read()
        assert said(told)
        assert b'"disco":{"side":"server"}' in told


async def test_a_failure_has_its_status_until_the_headers_left_and_is_told_in_band_from_then_on(
    tmp_path: Path,
) -> None:
    fail = asyncio.Event()
    async with (
        Upstream(tokens=4) as upstream,
        running(tmp_path, server=upstream.url, device=False, before=OFTEN) as daemon,
    ):
        with upstream.status(401):
            async with stream(daemon, "disco") as response:
                assert response.status == 502
                assert (await response.json())["error"]["message"]
        with upstream.held_until(fail, None), upstream.status(401):
            async with stream(daemon, "disco") as response:
                await signs(response, 2)
                assert response.status == 200
                fail.set()
                told = await response.read()
        event = json.loads(told.replace(KEEP_ALIVE, b"").strip().removeprefix(b"data: "))
        assert set(event["error"]) == {"message", "type", "param", "code"}
        assert b"[DONE]" not in told


async def test_a_stream_lives_while_a_model_loads_stands_still_and_answers_others(tmp_path: Path) -> None:
    few = {"device": {"n_ctx": 256, "n_cells": 512}}  # for two or three answers at a time
    texts = set()
    async with running(tmp_path, settings=few, before=OFTEN) as daemon:
        for _ in ("it loads", "it is there"):
            device = (await daemon.until(lambda s: s["endpoints"]["device"]["pid"] is not None))["endpoints"]["device"]
            os.kill(device["pid"], signal.SIGSTOP)
            try:
                async with stream(daemon, "disco/device", max_tokens=4, temperature=0) as response:
                    await signs(response, 3)
                    os.kill(device["pid"], signal.SIGCONT)
                    texts.add(said(await response.read()))
            finally:
                os.kill(device["pid"], signal.SIGCONT)
        assert len(texts) == 1, "the signs are in no text"

        async def queued() -> bytes:
            async with stream(daemon, "disco/device", max_tokens=100, temperature=0) as response:
                return await response.read()

        answers = await asyncio.gather(*(queued() for _ in range(6)))
        assert len({said(answer) for answer in answers}) == 1
        assert any(KEEP_ALIVE in answer for answer in answers), "some had to wait"
