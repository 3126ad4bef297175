"""A model that loads, and whose file has llama.cpp end the process at a decode: it takes neither machine nor answers.

Its epsilon is negative, and llama.cpp asserts that it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from disco_daemon.cli.doctor.engine import crashes
from disco_daemon.clock import SystemClock
from disco_daemon.engine import lives, wire
from disco_daemon.engine.inbox import EngineGone
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.types import GenerationRequest, Sampling
from tests.fixtures.daemon import ask, running
from tests.fixtures.upstream import Upstream
from tests.fixtures.weights import crashing_speaker, random_bytes_speaker

WORDS = "this model's file crashes the engine"


async def said(engine: Engine) -> list[wire.Message]:
    """All messages of an answer. Raises EngineGone."""
    request = GenerationRequest("r", ({"role": "user", "content": "Hi"},), Sampling(max_tokens=4, temperature=0))
    answer = engine.open(request)
    try:
        return [message async for message in answer]
    finally:
        await answer.close()


async def until(true: Callable[[], bool]) -> None:
    """Wait for a state of the engine, which changes by itself."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_model_that_crashes_at_each_request_is_left_alone_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's own assert, behind a load that goes well: without a word it would load and crash for ever."""
    monkeypatch.setattr(lives, "LEFT_ALONE_S", 0.5)
    model = crashing_speaker(tmp_path / "odd.gguf")
    engine = Engine(wire.Load(model_path=str(model), n_ctx=256, n_threads=1), SystemClock())
    engine.start()
    try:
        for _ in range(lives.CRASHED):
            await engine.ready(60)
            with pytest.raises(EngineGone):
                await said(engine)
        await until(lambda: engine.down_s > 0 and engine.state is EngineState.BACKOFF)
        with pytest.raises(
            EngineGone, match=r"this model's file crashes the engine: .* killed by signal 6, 3 times in"
        ):
            await engine.ready(60)
        random_bytes_speaker(model, 256)
        await until(lambda: engine.state is EngineState.READY)
        assert len(await said(engine)) > 0
        assert (engine.n_crashed, engine.down_s) == (0, 0.0)
    finally:
        await engine.close()


async def test_the_server_answers_where_the_model_crashes_and_all_say_so(tmp_path: Path) -> None:
    model = crashing_speaker(tmp_path / "odd.gguf")
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, model=model) as daemon:
        state = await daemon.until(lambda s: s["endpoints"]["device"]["down_s"] > 1)
        device = state["endpoints"]["device"]
        assert (device["state"], device["crashes"]) == ("restarting", lives.CRASHED)
        assert WORDS in device["last_error"]
        found = crashes(state)
        assert found is not None
        assert (found.level, WORDS in found.found) == ("wrong", True)
        heard = await ask(daemon, "Hi")
        assert (heard.disco["winner"], list(heard.disco["endpoints"])) == ("server", ["server"]), "it is not even asked"
        with pytest.raises(openai.APIStatusError, match=WORDS) as refused:
            await ask(daemon, "Hi", model="disco/device")
        assert refused.value.status_code in (502, 503)
        async with daemon.session.get(f"{daemon.root}/health") as response:
            assert (await response.json())["endpoints"] == {"device": False, "server": True}
        assert (await daemon.state())["endpoints"]["device"]["crashes"] == lives.CRASHED, "no request started it again"
