"""One request must not hurt the others: what would cost too much is refused, and the engine lives on.

An answer streams all the while, and at the end the engine's process is the one that it began with.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import llama_cpp
import openai
import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import EngineGone
from disco_daemon.engine.lives import MAX_LOADS
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.errors import EndpointError
from disco_daemon.models.default import default_model_path
from disco_daemon.system import process as processes
from disco_daemon.system import supervised
from disco_daemon.types import Append, GenerationRequest, Sampling
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.stopwatch import least_of_three
from tests.unit.engine.test_grammar import OUT_OF_BOUNDS, schema

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]  # beside other tests

N_CTX = 2048
BIG: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 2**64}}}


def asked(text: str, max_tokens: int = 16, **extra: Any) -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    return GenerationRequest("r", ({"role": "user", "content": text},), sampling, extra)


# --- over HTTP -----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": N_CTX}}) as daemon:
        await daemon.device_ready()
        yield daemon


class Neighbour:
    """Somebody whose answers are being streamed, one after the other; `gaps` between their pieces, s."""

    def __init__(self, device: DaemonProcess) -> None:
        self._device = device
        self.gaps: list[float] = []
        self.begun, self.enough = asyncio.Event(), asyncio.Event()

    async def listens(self) -> None:
        """Until it is enough, in mid-answer; who does not read at a pace gets tokens as they come."""
        messages: Any = [{"role": "user", "content": "Tell me a long story."}]
        while not self.enough.is_set():
            stream = await self._device.client.chat.completions.create(
                model="disco/device", messages=messages, stream=True, extra_body={"disco": {"delivery": "off"}}
            )
            before: float | None = None
            async with stream:
                async for chunk in stream:
                    now = time.perf_counter()
                    if chunk.choices and chunk.choices[0].delta.content:
                        self.gaps += [now - before] if before is not None else []
                        before = now
                        self.begun.set()
                    if self.enough.is_set():
                        break


async def refused(device: DaemonProcess, **body: Any) -> tuple[dict[str, Any], float]:
    """The error that a request gets, and after how long, s."""
    began = time.perf_counter()
    data = io.BytesIO(
        json.dumps({"model": "disco/device", "messages": [{"role": "user", "content": "Hi"}], **body}).encode()
    )
    async with device.session.post(f"{device.url}/chat/completions", data=data) as response:
        found = (await response.json())["error"]
        assert response.status == 400, found
    return found, time.perf_counter() - began


async def test_what_costs_too_much_is_refused_while_a_neighbour_hears_on(device: DaemonProcess) -> None:
    pid = (await device.state())["endpoints"]["device"]["pid"]
    neighbour = Neighbour(device)
    hears = asyncio.create_task(neighbour.listens())
    await neighbour.begun.wait()
    try:
        for of, why in OUT_OF_BOUNDS:
            if "bits" not in why and why != "larger than":  # what Python's json cannot write down
                error, _ = await refused(device, response_format=schema(of, strict=True))
                assert error["param"] == "response_format" or "nested too deeply" in error["message"]
        for content, n in (("hi", 10_000), ("hi", 2_000), ("seven words of text " * 300_000, 1)):
            tries = [await refused(device, messages=[{"role": "user", "content": content}] * n) for _ in range(3)]
            for error, _ in tries:
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is {N_CTX}" in error["message"]
            assert min(took_s for _, took_s in tries) < 1.0
        heard = len(neighbour.gaps)
        async with asyncio.timeout(60):
            while len(neighbour.gaps) < max(4, heard) + 3:
                neighbour.begun.clear()
                await neighbour.begun.wait()
        assert max(neighbour.gaps) < 5.0, "far below what a hang is"
    finally:
        neighbour.enough.set()
        await hears
    after = await device.until(lambda s: s["endpoints"]["device"]["in_flight"] == 0)
    assert (after["endpoints"]["device"]["pid"], after["endpoints"]["device"]["restarts"]) == (pid, 0)


async def test_an_integer_of_65_bits_is_a_400_and_leaves_nothing(device: DaemonProcess) -> None:
    for body in (
        {"response_format": BIG},
        {"chat_template_kwargs": {"x": 2**64}},
        {"chat_template_kwargs": {"x": [{"y": -(2**70)}]}},
    ):
        error, _ = await refused(device, **body)
        assert error["type"] == "invalid_request_error"
    state = await device.until(lambda s: s["endpoints"]["device"]["in_flight"] == 0)
    assert state["endpoints"]["device"]["restarts"] == 0
    with pytest.raises(openai.BadRequestError):
        await device.client.chat.completions.create(
            model="disco", messages=[{"role": "user", "content": "Hi"}], response_format=BIG
        )


# --- the engine alone ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=N_CTX, n_threads=1), SystemClock())
    engine.start()
    try:
        await engine.ready(60)
        yield engine
    finally:
        await engine.close()


async def said(engine: Engine, request: GenerationRequest) -> list[wire.FromEngine]:
    answer = engine.open(request)
    try:
        return [message async for message in answer]
    finally:
        await answer.close()


@pytest.mark.parametrize(
    "extra",
    [{"response_format": BIG}, {"chat_template_kwargs": {"x": 2**64}}, {"chat_template_kwargs": {"x": "\udfff"}}],
)
async def test_what_cannot_be_sent_to_the_engine_leaves_no_inbox(engine: Engine, extra: dict[str, Any]) -> None:
    with pytest.raises(EndpointError) as failed:
        engine.open(asked("Hi", **extra))
    assert (failed.value.your_fault, failed.value.status) == (True, 400)
    assert (engine.in_flight, engine.silent_s) == (0, 0)
    assert await engine.count(asked("Hi", chat_template_kwargs={"x": 2**64})) is None
    assert engine.in_flight == 0


async def test_an_order_that_cannot_be_sent_ends_the_answer(engine: Engine) -> None:
    answer = engine.open(asked("Hi"), hold=True)
    answer.send(Append(" there", (2**70,), go=True))
    messages = [message async for message in answer]
    assert isinstance(messages[-1], wire.Failed)
    await answer.close()
    assert engine.in_flight == 0


async def test_the_engine_itself_refuses_a_format_beyond_the_bounds(engine: Engine) -> None:
    pid = engine.pid
    for of, why in OUT_OF_BOUNDS:
        try:
            (failed,) = await said(engine, asked("Hi", response_format=schema(of, strict=True)))
        except EndpointError:  # it cannot even be sent
            continue
        assert isinstance(failed, wire.Failed), why
        assert (failed.reason, failed.param, failed.your_fault) == ("bad_response_format", "response_format", True)
    assert engine.pid == pid


async def test_a_long_prompt_has_the_tokens_of_one_that_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(default_model_path()), params)
    turns = [f" Turn {i}: \n the  quick, brown fox's {i * 7919} é 漢字 ways.  " for i in range(300)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    cut = Vocabulary(model).prompt_tokens(wire.Count(id="q", messages=messages))
    monkeypatch.setattr("disco_daemon.engine.llama.vocabulary.CUT_CHARS", 1 << 30)
    assert cut == Vocabulary(model).prompt_tokens(wire.Count(id="q", messages=messages))
    assert len(cut) > 3000
    llama_cpp.llama_model_free(model)


async def test_a_prompt_is_tokenized_once_for_count_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(default_model_path()), params)
    vocabulary = Vocabulary(model)
    messages = [{"role": "user", "content": "Once and for all."}]
    first = vocabulary.prompt_tokens(wire.Count(id="q", messages=messages))
    monkeypatch.setattr(Vocabulary, "tokenize", None)
    assert vocabulary.prompt_tokens(wire.Generate(id="g", messages=messages)) == first
    llama_cpp.llama_model_free(model)


async def test_a_prompt_that_does_not_fit_is_counted_roughly_and_at_once(engine: Engine) -> None:
    request = asked("seven words of text that are many " * 100_000)

    async def refused_s() -> float:
        began = time.perf_counter()
        (failed,) = await said(engine, request)
        took_s = time.perf_counter() - began
        assert isinstance(failed, wire.Failed)
        assert failed.reason == "context_length_exceeded"
        return took_s

    assert await least_of_three(refused_s, 1.0) < 1.0
    assert await engine.count(request, ids=True) is None, "there is nothing to continue with"


async def test_a_new_life_is_not_judged_by_the_silence_of_the_last(engine: Engine) -> None:
    answer = engine.open(asked("Count to a hundred.", 400))
    await anext(answer)
    assert engine.pid is not None
    restarts = engine.restarts
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineGone):
        async for _ in answer:
            pass
    assert engine.in_flight == 1, "its owner has not closed it yet"
    await engine.ready(60)
    assert engine.silent_s == 0
    await answer.close()
    assert (engine.in_flight, engine.restarts) == (0, restarts + 1)
    assert len(await said(engine, asked("Hi"))) > 1


async def test_a_model_that_crashes_the_loader_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = 0

    async def crashing(*_: Any, **options: Any) -> Process:
        nonlocal lives
        lives += 1
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", crash, **options)

    monkeypatch.setattr(supervised, "spawn", crashing)
    monkeypatch.setattr(processes, "PAUSE_FIRST_S", 0.001)
    engine = Engine(wire.Load(model_path="odd.gguf", n_ctx=512, n_threads=1), SystemClock())
    engine.start()
    try:
        with pytest.raises(EngineGone, match=r"odd\.gguf could not be loaded 5 times, and is given up.*killed by sig"):
            await engine.ready(60)
        assert (engine.state, lives) == (EngineState.FAILED, MAX_LOADS)
        assert "disco models use" in str(engine.last_error)
    finally:
        await engine.close()


# The worker, on a processor whose special layout of weights crashes llama.cpp.
CRASHES_REPACKED = """
import os, signal, sys
from disco_daemon.engine import worker
from disco_daemon.engine.llama import model as llama
init = llama.Llama.__init__
def crashing(self, load, abort, **options):
    if load.repack:
        os.kill(os.getpid(), signal.SIGSEGV)
    init(self, load, abort, **options)
llama.Llama.__init__ = crashing
worker.main()
"""


async def test_where_the_weights_layout_crashes_llama_cpp_they_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lives = 0

    async def on_such_a_processor(_: str, fd: str, **options: Any) -> Process:
        nonlocal lives
        lives += 1
        argv = [sys.executable, "-P", "-c", CRASHES_REPACKED, fd]
        return await asyncio.create_subprocess_exec(*argv, **options)

    monkeypatch.setattr(supervised, "spawn", on_such_a_processor)
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), SystemClock())
    engine.start()
    try:
        await engine.ready(60)
        assert (engine.state, lives) == (EngineState.READY, 2)
        assert len(await said(engine, asked("Hi"))) > 1
    finally:
        await engine.close()
    assert "weights stay as the file has them" in caplog.text


async def test_a_template_without_bounds_is_refused_when_the_model_loads(tmp_path: Path) -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path = str(default_model_path())
    config = wire.Load(model_path=path, n_ctx=512, n_threads=1, chat_template=template)
    engine = Engine(config, SystemClock())
    engine.start()
    try:
        with pytest.raises(EngineGone, match=r"takes more than it may.*device\.chat_template"):
            await engine.ready(60)
        assert engine.state is EngineState.FAILED
    finally:
        await engine.close()
