"""The engine process: real model, real llama.cpp, over its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import EngineAnswer, EngineGone
from disco_daemon.engine.llama.memory import N_SEQS
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.models.default import default_model_path
from disco_daemon.types import Append, GenerationRequest, Hold, Sampling
from tests.fixtures.stopwatch import least_of_three

pytestmark = pytest.mark.asyncio(loop_scope="module")


def question(text: str, max_tokens: int = 16, stop: tuple[str, ...] = (), so_far: str = "") -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)
    return GenerationRequest("r", ({"role": "user", "content": text},), sampling, answer_so_far=so_far)


async def told(answer: EngineAnswer) -> tuple[str, wire.Done]:
    text = ""
    try:
        async for message in answer:
            text += message.text if isinstance(message, wire.TextPiece) else ""
    finally:
        await answer.close()
    assert answer.done is not None
    return text, answer.done


@asynccontextmanager
async def loaded(n_ctx: int = 2048, model: Path | None = None, threads: int = 1) -> AsyncIterator[Engine]:
    engine = Engine(
        wire.Load(model_path=str(model or default_model_path()), n_ctx=n_ctx, n_threads=threads), SystemClock()
    )
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


async def test_a_loaded_engine_says_by_which_build_it_computes(engine: Engine) -> None:
    assert engine.info is not None
    version, _, instructions = engine.info.build.partition(" ")
    assert version.count(".") == 2
    assert "CPU" in instructions


async def test_a_long_prefill_stops_within_100_ms(engine: Engine) -> None:
    times, computed = [], []
    for word in ("word ", "sea ", "tree "):  # a busy machine may hold one of them up
        answer = engine.open(question(word * 1800))
        await anext(answer)  # the first chunk is through, the next one is being computed
        began = time.perf_counter()
        await answer.close()
        times.append(time.perf_counter() - began)
        assert answer.done is not None
        assert answer.done.reason == "cancelled"
        computed.append(answer.done.n_prompt)
    assert min(computed) < 1800
    assert min(times) < 0.1


async def test_concurrent_answers_are_the_answers_of_one_at_a_time(engine: Engine) -> None:
    prompts = ["Name three colours.", "What is the capital of France?", "Say good morning.", "Count to ten."]
    alone = [await told(engine.open(question(p))) for p in prompts]
    together = await asyncio.gather(*(told(engine.open(question(p))) for p in prompts))
    for (text, done), (text_alone, done_alone) in zip(together, alone, strict=True):
        assert done.n_prompt + done.n_cached == done_alone.n_prompt + done_alone.n_cached
        # Batch shape changes the rounding of the matrix products, so greedy texts may part after some tokens.
        assert text[:8] == text_alone[:8]


async def test_a_short_prompt_does_not_wait_for_a_long_one(engine: Engine) -> None:
    long = engine.open(question("oak " * 700))
    await anext(long)
    short = engine.open(question("Hi", max_tokens=2))
    came: list[str] = []

    async def listen(name: str, answer: EngineAnswer, until: type[wire.Message]) -> None:
        async for message in answer:
            if isinstance(message, until | wire.Done):
                came.append(name)
                break
        await answer.close()

    # Both listen at the engine's one socket: they hear in the order in which it spoke.
    await asyncio.gather(listen("short", short, wire.Done), listen("long", long, wire.TextPiece))
    assert came == ["short", "long"], "the short answer came after the long prompt's first token"


PROMPTS = ["Tell me a story about a fox.", "Count from one to twenty.", "Why is the sky blue? Answer with emoji."]


def rest_of(request: GenerationRequest, so_far: str, ids: tuple[int, ...] = ()) -> GenerationRequest:
    """The same request, when its answer is known up to somewhere."""
    limit = request.sampling.max_tokens
    assert limit is not None
    sampling = replace(request.sampling, max_tokens=limit - len(ids))
    return replace(request, sampling=sampling, answer_so_far=so_far, answer_ids=ids)


async def pieces_of(engine: Engine, request: GenerationRequest) -> list[wire.TextPiece]:
    answer = engine.open(request)
    try:
        return [m async for m in answer if isinstance(m, wire.TextPiece)]
    finally:
        await answer.close()


def cuts_of(pieces: list[wire.TextPiece], every: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Text, ids and rest at every few places where the text is exactly that of the ids."""
    cuts = []
    for i in range(1, len(pieces), every):
        if pieces[i - 1].ids:
            ids = tuple(t for p in pieces[:i] for t in p.ids)
            cuts.append(("".join(p.text for p in pieces[:i]), ids, "".join(p.text for p in pieces[i:])))
    return cuts


async def caught_up(answer: EngineAnswer) -> None:
    async for message in answer:
        if isinstance(message, wire.PrefillProgress) and message.caught_up and answer.up_to_date:
            return
    pytest.fail("the answer ended while it was held")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", [None, 7])
async def test_a_continuation_by_ids_is_the_rest_of_the_unbroken_answer(
    engine: Engine, prompt: str, seed: int | None
) -> None:
    request = question(prompt, max_tokens=48)
    if seed is not None:
        sampling = replace(request.sampling, temperature=0.9, seed=seed, frequency_penalty=0.4, presence_penalty=0.2)
        request = replace(request, sampling=sampling)
    pieces = await pieces_of(engine, request)
    cuts = cuts_of(pieces, max(1, len(pieces) // 8))  # how long an answer is, is the processor's rounding's affair, too
    assert len(cuts) > 4
    for text, ids, rest in cuts:
        assert (await told(engine.open(rest_of(request, text, ids))))[0] == rest


async def test_a_long_prefill_gives_the_very_numbers_of_generating() -> None:
    """Beyond 512 tokens llama.cpp splits the attention of a lone row over its threads."""
    async with loaded(threads=2) as engine:
        await engine.ready(60)
        request = question("Here is a list of words: " + "one two three four " * 110 + "Go on.", max_tokens=16)
        for text, ids, rest in cuts_of(await pieces_of(engine, request), 7):
            assert (await told(engine.open(rest_of(request, text, ids))))[0] == rest


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to look into")
@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ({}, b"GOMP_SPINCOUNT=1000"),
        ({"GOMP_SPINCOUNT": "7"}, b"GOMP_SPINCOUNT=7"),
        ({"OMP_WAIT_POLICY": "active"}, b"OMP_WAIT_POLICY=active"),
    ],
)
async def test_its_threads_do_not_spin_for_long_unless_the_user_says_how_they_wait(
    said: dict[str, str], seen: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    async with loaded() as engine:
        await engine.ready(60)
        found = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
    assert [line for line in found if line.startswith((b"GOMP_SPINCOUNT", b"OMP_WAIT_POLICY"))] == [seen]


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_held_answer_fed_in_odd_pieces_goes_on_as_the_unbroken_one(engine: Engine, prompt: str) -> None:
    request = question(prompt, max_tokens=48)
    for text, _, rest in cuts_of(await pieces_of(engine, request), 13):
        answer = engine.open(request, hold=True)
        for at in range(0, len(text), 7):
            answer.send(Append(text[at : at + 7], go=False))
            if at % 2:
                await caught_up(answer)
        answer.send(Append("", go=True))
        got, done = await told(answer)
        assert rest.startswith(got[:4]), (text, got, rest)
        assert done.n_completion <= 48


async def test_a_parked_prefill_is_not_computed_again(engine: Engine) -> None:
    answer = engine.open(question("lamp " * 400, max_tokens=8))
    await anext(answer)  # the first chunk is through
    answer.send(Hold())
    await caught_up(answer)
    answer.send(Append("Yes, words", go=True))
    _, done = await told(answer)
    assert 400 < done.n_prompt < 460, "the prompt is billed once, with the few tokens appended"


async def test_an_answer_cut_inside_a_word_is_healed(engine: Engine) -> None:
    agree = []
    for prompt in PROMPTS:
        request = question(prompt, max_tokens=32)
        whole, _ = await told(engine.open(request))
        short = replace(request.sampling, max_tokens=6)
        for cut in range(3, len(whole) - 12, 7):
            rest, _ = await told(engine.open(replace(rest_of(request, whole[:cut]), sampling=short)))
            agree.append(rest[:4] == whole[cut : cut + 4])
            assert "\N{REPLACEMENT CHARACTER}" not in rest
    assert len(agree) > 10
    assert sum(agree) >= 0.8 * len(agree), f"{sum(agree)} of {len(agree)} cuts"


async def token_ids(engine: Engine, request: GenerationRequest) -> tuple[int, ...]:
    counted = await engine.count(request, ids=True)
    assert counted is not None
    return counted.ids


async def test_a_raw_prompt_is_taken_as_it_is(engine: Engine) -> None:
    raw = replace(question("", 8), messages=(), prompt="The capital of France is")
    text, done = await told(engine.open(raw))
    ids = await token_ids(engine, raw)
    assert done.n_prompt + done.n_cached == len(ids)
    counted = await engine.count(raw)
    assert counted is not None
    assert (counted.n_tokens, counted.n_cached) == (len(ids), len(ids))
    assert (await told(engine.open(replace(raw, prompt=ids))))[0] == text
    chat = question("Hi", 8)
    ids = await token_ids(engine, chat)
    assert (await told(engine.open(replace(raw, prompt=ids))))[0] == (await told(engine.open(chat)))[0]


@pytest.mark.parametrize("prompt", ["", (), (-1,), (1, 10**6)])
async def test_a_raw_prompt_that_is_none_is_refused(engine: Engine, prompt: str | tuple[int, ...]) -> None:
    answer = engine.open(replace(question("", 8), messages=(), prompt=prompt))
    failed = await anext(answer)
    assert isinstance(failed, wire.Failed)
    assert (failed.reason, failed.your_fault) == ("bad_messages", True)
    await answer.close()


async def test_held_answers_make_room_for_one_that_wants_to_generate(engine: Engine) -> None:
    held = [engine.open(question(f"Hi number {i}", 4), hold=True) for i in range(N_SEQS + 1)]
    text, _ = await told(engine.open(question("Name three colours.", 4)))
    assert text
    for answer in held:
        answer.send(Append("", go=True))
    for answer in held:
        assert (await told(answer))[1].n_completion > 0


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


async def test_counting_does_not_wait_for_a_running_prefill(engine: Engine) -> None:
    words = iter(("sea ", "fir ", "elm "))

    async def counted_s() -> float:
        answer = engine.open(question(next(words) * 1500))
        times = []
        for _ in range(9):  # one that a busy machine holds up for 50 ms is None; most are not
            began = time.perf_counter()
            counted = await engine.count(question("Hello!"))
            times.append(time.perf_counter() - began if counted else float("inf"))
        await answer.close()
        assert answer.done is not None
        was_running = answer.done.n_prompt < 1500  # the prefill; else nothing is measured
        return statistics.median(times) if was_running else float("inf")

    assert await least_of_three(counted_s, 0.1) < 0.1


async def test_a_killed_engine_is_noticed_at_once_and_comes_back() -> None:
    async def noticed_s() -> float:
        async with loaded() as engine:
            await engine.ready(60)
            answer = engine.open(question("sea " * 1500))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            began = time.perf_counter()
            with pytest.raises(EngineGone, match="signal 9"):
                await told(answer)
            took_s = time.perf_counter() - began
            await engine.ready(60)
            text, _ = await told(engine.open(question("Name three colours.")))
            assert text
            assert engine.restarts == 1
            assert engine.in_flight == 0
            return took_s

    assert await least_of_three(noticed_s, 0.5) < 0.5


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
    async with asyncio.timeout(60):
        for turns in (0, 1, 3, 10):
            engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), SystemClock())
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
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), clock)
    engine.start()
    try:
        await engine.ready(60)
        clock.ahead_s = 3600.0
        assert engine.silent_s == 0
        with engine._channel.inbox():
            assert engine.silent_s < 1, "the engine is blamed for a silence in which it owed nothing"
        answer = engine.open(question("Hi", max_tokens=1))
        assert engine.silent_s < 1
        await told(answer)
    finally:
        await engine.close()


async def test_a_held_answer_that_has_caught_up_is_silent_by_design_and_no_hang() -> None:
    clock = Jumping()
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), clock)
    engine.start()
    try:
        await engine.ready(60)
        # All but the last are the same prompt: they share its cells, for there would not be enough.
        ask = question("Hi", max_tokens=2)
        await told(engine.open(ask))
        answers = [engine.open(ask, hold=True) for _ in range(N_SEQS + 1)]
        for answer in answers[:N_SEQS]:
            await caught_up(answer)
        while engine._channel.owes_reply:  # the one without a slot says so last
            await anext(answers[-1])
        clock.ahead_s = 3600.0
        assert engine.silent_s == 0
        answers[0].send(Append("Hello", go=True))
        assert 0 < engine.silent_s < 1, "it owes from the order on"
        await told(answers[0])
        for answer in answers[1:]:
            await answer.close()
            assert answer.done is not None
        assert engine.restarts == 0
    finally:
        await engine.close()


async def test_an_order_to_an_engine_that_has_died_is_told_in_the_stream_only() -> None:
    async with loaded() as engine:
        await engine.ready(60)
        answer = engine.open(question("Hi"), hold=True)
        await caught_up(answer)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineGone):
            await told(answer)
        answer.send(Append("text", go=True))
        answer.send(Hold())
