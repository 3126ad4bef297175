"""The engine process: real model, real llama.cpp, over its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine, EngineAnswer, EngineConfig, EngineGone, EngineState
from disco_daemon.models import default_model_path
from disco_daemon.types import GenerationRequest, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")


def question(text: str, max_tokens: int = 16, stop: tuple[str, ...] = (), so_far: str = "") -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)
    return GenerationRequest("r", ({"role": "user", "content": text},), sampling, answer_so_far=so_far)


async def told(answer: EngineAnswer) -> tuple[str, wire.Done]:
    text = ""
    try:
        async for message in answer:
            text += message.text if isinstance(message, wire.Piece) else ""
    finally:
        await answer.close()
    assert answer.done is not None
    return text, answer.done


@asynccontextmanager
async def loaded(n_ctx: int = 2048, model: Path | None = None) -> AsyncIterator[Engine]:
    engine = Engine(EngineConfig(model or default_model_path(), n_ctx, n_threads=1), SystemClock())
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with loaded() as engine:
        await engine.ready(60)
        yield engine


async def test_a_long_prefill_stops_within_100_ms(engine: Engine) -> None:
    answer = engine.open(question("word " * 1800))
    await anext(answer)  # the first chunk is through, the next one is being computed
    began = time.perf_counter()
    await answer.close()
    assert time.perf_counter() - began < 0.1
    assert answer.done is not None
    assert answer.done.reason == "cancelled"
    assert answer.done.n_prompt < 1800


async def test_concurrent_answers_are_the_answers_of_one_at_a_time(engine: Engine) -> None:
    prompts = ["Name three colours.", "What is the capital of France?", "Say good morning.", "Count to ten."]
    alone = [await told(engine.open(question(p))) for p in prompts]
    together = await asyncio.gather(*(told(engine.open(question(p))) for p in prompts))
    for (text, done), (text_alone, done_alone) in zip(together, alone, strict=True):
        assert done.n_prompt == done_alone.n_prompt
        # Batch shape changes the rounding of the matrix products, so greedy texts may part after some tokens.
        assert text[:8] == text_alone[:8]


async def test_a_short_prompt_does_not_wait_for_a_long_one(engine: Engine) -> None:
    long = engine.open(question("word " * 700))
    await anext(long)
    short = asyncio.create_task(told(engine.open(question("Hi", max_tokens=2))))
    async for message in long:
        if isinstance(message, wire.Piece | wire.Done):
            break
    assert short.done(), "the short answer came after the long prompt's first token"
    await long.close()


async def test_a_held_answer_swallows_text_and_goes_on_from_there(engine: Engine) -> None:
    whole, _ = await told(engine.open(question("Tell me a story about a fox.", max_tokens=24)))
    answer = engine.open(question("Tell me a story about a fox.", max_tokens=24), hold=True)
    async for message in answer:
        assert isinstance(message, wire.Progress)
        if message.n_past >= message.n_prompt - 1:
            break
    cut = whole.index(" ", len(whole) // 2)
    half = whole.index(" ", 5)  # at a token's end: a token split in two is another matter
    answer.append(whole[:half], go=False)
    answer.append(whole[half:cut], go=True)
    rest, _ = await told(answer)
    assert rest[:8] == whole[cut : cut + 8]


async def test_an_answer_continues_from_what_the_reader_has(engine: Engine) -> None:
    whole, _ = await told(engine.open(question("Tell me a story about a fox.", max_tokens=24)))
    cut = whole.index(" ", len(whole) // 2)
    rest, _ = await told(engine.open(question("Tell me a story about a fox.", 8, so_far=whole[:cut])))
    assert whole[cut:].startswith(rest[:8])


async def test_stop_strings_end_the_answer_and_are_not_shown(engine: Engine) -> None:
    whole, _ = await told(engine.open(question("Count from one to ten.", max_tokens=24)))
    stop = whole[8:12]
    text, done = await told(engine.open(question("Count from one to ten.", max_tokens=24, stop=(stop,))))
    assert done.reason == "stop"
    assert text == whole[: whole.index(stop)]


async def test_more_answers_than_the_context_holds_all_come_through() -> None:
    async with loaded(n_ctx=512) as engine:
        await engine.ready(60)
        answers = await asyncio.gather(*(told(engine.open(question("word " * 90, 60))) for _ in range(8)))
        assert all(done.n_prompt > 90 for _, done in answers)
        assert all(done.reason == "stop" or done.n_completion == 60 for _, done in answers)
        stats = await engine.stats()
        assert stats is not None
        assert (stats.running, stats.waiting) == (0, 0)


async def test_counting_does_not_wait_for_a_running_prefill(engine: Engine) -> None:
    answer = engine.open(question("word " * 1500))
    began = time.perf_counter()
    assert await engine.count([{"role": "user", "content": "Hello!"}])
    assert time.perf_counter() - began < 0.1
    await answer.close()


async def test_a_killed_engine_is_noticed_at_once_and_comes_back() -> None:
    async with loaded() as engine:
        await engine.ready(60)
        answer = engine.open(question("word " * 1500))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        began = time.perf_counter()
        with pytest.raises(EngineGone, match="signal 9"):
            await told(answer)
        assert time.perf_counter() - began < 0.5
        await engine.ready(10)
        text, _ = await told(engine.open(question("Name three colours.")))
        assert text
        assert engine.restarts == 1
        assert engine.in_flight == 0


async def test_a_file_that_is_no_model_is_a_clear_error_and_no_crash_loop(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(1000))
    async with loaded(model=broken) as engine:
        with pytest.raises(EngineGone):
            await engine.ready(60)
        assert engine.state in (EngineState.FAILED, EngineState.BACKOFF)


async def test_closing_leaves_no_process() -> None:
    async with loaded() as engine:
        await engine.ready(60)
        pid = engine.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_closing_while_it_is_being_started_leaves_no_process_and_does_not_hang() -> None:
    async with asyncio.timeout(10):
        for turns in (0, 1, 3, 10):
            engine = Engine(EngineConfig(default_model_path(), 512, n_threads=1), SystemClock())
            engine.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.close()
            assert engine.pid is None


class Jumping(SystemClock):
    """The fault: an hour passes between two requests."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


async def test_an_idle_hour_is_no_hang() -> None:
    clock = Jumping()
    engine = Engine(EngineConfig(default_model_path(), 512, n_threads=1), clock)
    engine.start()
    try:
        await engine.ready(60)
        clock.ahead_s = 3600.0
        assert engine.silent_s == 0
        with engine._inbox():
            assert engine.silent_s < 1, "the engine is blamed for a silence in which it owed nothing"
        answer = engine.open(question("Hi", max_tokens=1))
        assert engine.silent_s < 1
        await told(answer)
    finally:
        await engine.close()
