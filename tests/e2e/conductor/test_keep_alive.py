"""A model that nobody needs is unloaded, and loaded again by the next request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import EngineAnswer
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.models.default import default_model_path
from disco_daemon.types import Append, GenerationRequest, Sampling
from tests.fixtures.daemon import ask, running
from tests.fixtures.upstream import Upstream

KEEP_ALIVE_S = 60.0
PATIENCE_S = 60.0


class Jumping(SystemClock):
    """The fault: time passes at once."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def question(max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest("r", ({"role": "user", "content": "Count to ten."},), Sampling(max_tokens, 0))


async def told(answer: EngineAnswer) -> str:
    try:
        return "".join([getattr(message, "text", "") async for message in answer])
    finally:
        await answer.close()


async def until(engine: Engine, state: EngineState) -> None:
    """Its condition tells when a load is over; of an unload only who looks hears."""
    async with asyncio.timeout(PATIENCE_S):
        while engine.state is not state or (state is EngineState.UNLOADED and engine.pid is not None):
            await asyncio.sleep(0.01)


def engine_with(clock: SystemClock, keep_alive_s: float = KEEP_ALIVE_S) -> Engine:
    return Engine(
        wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), clock, keep_alive_s=keep_alive_s
    )


async def test_an_idle_model_goes_and_comes_back_with_the_next_request() -> None:
    clock = Jumping()
    engine = engine_with(clock)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        before = await told(engine.open(question()))
        pid = engine.pid
        clock.ahead_s += KEEP_ALIVE_S
        await until(engine, EngineState.UNLOADED)
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert engine.info is not None
        assert engine.load_wait_s == engine.info.load_s, "what a request would wait is what loading took last"
        assert engine.last_error is None

        await engine.ready(PATIENCE_S)
        assert engine.load_wait_s == 0
        assert await told(engine.open(question())) == before
        assert (engine.restarts, engine.last_error) == (0, None)
    finally:
        await engine.close()


async def test_to_count_a_prompt_wakes_it_and_does_not_wait() -> None:
    clock = Jumping()
    engine = engine_with(clock)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        clock.ahead_s += KEEP_ALIVE_S
        await until(engine, EngineState.UNLOADED)
        assert await engine.count(question()) is None
        assert engine.state is EngineState.LOADING
        assert engine.load_wait_s > 0
        await until(engine, EngineState.READY)
        assert await engine.count(question()) is not None
    finally:
        await engine.close()


async def test_a_request_in_the_moment_of_unloading_waits_for_the_next_load() -> None:
    clock = Jumping()
    engine = engine_with(clock)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        clock.ahead_s += KEEP_ALIVE_S
        async with asyncio.timeout(PATIENCE_S):
            while engine.state is not EngineState.UNLOADED:  # and the process still there
                await asyncio.sleep(0)
        assert engine.pid is not None
        await engine.ready(PATIENCE_S)
        assert await told(engine.open(question()))
        assert engine.restarts == 0
    finally:
        await engine.close()


async def test_an_answer_that_runs_or_is_held_keeps_the_model() -> None:
    clock = Jumping()
    engine = engine_with(clock)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        answer = engine.open(question(), hold=True)
        async for message in answer:
            if isinstance(message, wire.PrefillProgress) and message.caught_up:
                break  # it waits for orders from here on, and owes nothing
        clock.ahead_s += 100 * KEEP_ALIVE_S
        assert not engine._idle_for_long()
        answer.send(Append("One, two", go=True))
        assert await told(answer)
        assert not engine._idle_for_long(), "the time counts from the end of the last request"
        clock.ahead_s += KEEP_ALIVE_S
        assert engine._idle_for_long()
    finally:
        await engine.close()


async def test_by_default_it_stays() -> None:
    clock = Jumping()
    engine = engine_with(clock, keep_alive_s=0.0)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        clock.ahead_s += 10_000 * KEEP_ALIVE_S
        assert not engine._idle_for_long()
    finally:
        await engine.close()


async def test_closing_while_it_is_unloaded_does_not_hang() -> None:
    clock = Jumping()
    engine = engine_with(clock)
    engine.start()
    await engine.ready(PATIENCE_S)
    clock.ahead_s += KEEP_ALIVE_S
    await until(engine, EngineState.UNLOADED)
    async with asyncio.timeout(PATIENCE_S):
        await engine.close()
    engine.wake()
    assert engine.state is EngineState.STOPPED


async def test_a_daemon_asks_the_server_at_once_while_the_model_comes_back(tmp_path: Path) -> None:
    settings = {"device": {"keep_alive_s": 0.5}, "policy": {"budget": 1.0}}  # the server may have all of them
    async with (
        Upstream(tokens=4) as upstream,
        running(tmp_path, server=upstream.url, policy="optimal", settings=settings) as daemon,
    ):
        await daemon.until(lambda state: state["endpoints"]["device"]["state"] == "unloaded", PATIENCE_S)
        async with daemon.session.get(f"{daemon.root}/disco/v1/plan?tokens=100") as response:
            plan = await response.json()
        assert plan["readiness"]["device"]["load_s"] > 0
        assert plan["plan"]["server_s"] == 0
        async with daemon.session.get(f"{daemon.root}/health") as response:
            assert response.status == 200
        heard = await ask(daemon, "one two three four", max_tokens=4)
        assert heard.text
        assert heard.disco["winner"] == "server"
        await daemon.until(lambda state: state["endpoints"]["device"]["state"] != "unloaded", PATIENCE_S)
        heard = await ask(daemon, "Hi", model="disco/device", max_tokens=4)
        assert heard.disco["winner"] == "device"
        state = await daemon.state()
        assert state["endpoints"]["device"]["restarts"] == 0
