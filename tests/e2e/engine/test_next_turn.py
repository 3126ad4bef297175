"""What is computed behind a whole answer while nobody waits: the next turn finds it, and is the same bit for bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.types import GenerationRequest, Sampling
from tests.e2e.engine.test_engine_exact import N_CELLS, Core, phrase

PATIENCE_S = 60.0
ABORT = AbortFlag()
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def llama() -> Llama:
    load = wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1, n_gpu_layers=0, n_cells=N_CELLS)
    return Llama(load, ABORT)


def compute(core: Core) -> bool:
    return core.admission.next_turns.compute(core.llama, core.cells)


def ask(core: Core, id_: str, messages: Messages, **more: Any) -> list[int]:
    """Answer a conversation; return the tokens of all of it."""
    core.batcher.add(wire.Generate(id=id_, messages=messages, temperature=0, **more))
    s = core.admission.sequences[id_]
    core.finish()
    return list(s.tokens)


def second(core: Core, question: str, answer: str) -> Messages:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And what came after that?"},
    ]


def test_a_second_turn_finds_what_comes_before_its_question(llama: Llama) -> None:
    core = Core(llama)
    question = "Name a river and a garden."
    tokens = ask(core, "first", [{"role": "user", "content": question}], max_tokens=8)
    between, reused = llama.vocabulary.between_turns, core.cells.n_reused
    assert llama.vocabulary.tokenize("<|im_end|>\n<|im_start|>user\n", parse_special=True) == between
    asked = llama.vocabulary.prompt_tokens(
        wire.Count(id="c", messages=list(second(core, question, core.said["first"])))
    )
    assert asked[: len(tokens) + len(between)] == tokens + between
    assert core.cells.count_cached(asked) == len(tokens) - 1
    assert compute(core)
    core.check()
    assert core.cells.count_cached(asked) == len(tokens) + len(between)
    assert core.cells.n_reused == reused
    assert not compute(core)


def test_it_is_the_same_answer_bit_for_bit(llama: Llama) -> None:
    rng = random.Random(3)
    for _ in range(6):
        question = f"Tell me about the {phrase(rng)}."
        texts = []
        for ahead in (True, False):
            core = Core(llama)
            ask(core, "first", [{"role": "user", "content": question}], max_tokens=12)
            if ahead:
                assert compute(core)
            ask(core, "second", second(core, question, core.said["first"]), max_tokens=12)
            core.check()
            texts.append(core.said["second"])
        fresh = Core(llama)
        ask(fresh, "alone", second(fresh, question, core.said["first"]), max_tokens=12)
        assert texts == [fresh.said["alone"]] * 2


def test_behind_what_is_no_whole_answer_of_a_chat_nothing_is_computed(llama: Llama) -> None:
    core = Core(llama)
    core.ask("cancelled", "Tell me of the sea.", max_tokens=20)
    for _ in range(3):
        assert core.batcher.step()
    core.batcher.cancel("cancelled")
    core.finish()
    core.batcher.add(wire.Generate(id="raw", messages=[], prompt="The sea", temperature=0, max_tokens=4))
    core.finish()
    assert core.ended == {"cancelled": "cancelled", "raw": "length"}
    assert not compute(core)


def test_an_aborted_computation_leaves_the_cells_as_they_were(llama: Llama) -> None:
    core = Core(llama)
    tokens = ask(core, "first", [{"role": "user", "content": "Name a lamp."}], max_tokens=8)
    ABORT.set()
    try:
        assert compute(core)
    finally:
        ABORT.clear()
    core.check()
    assert core.cells.count_cached(tokens + llama.vocabulary.between_turns) == len(tokens) - 1
    assert not compute(core)


def test_no_cached_text_gives_way_to_it_and_no_cell_is_lost(llama: Llama) -> None:
    rng, core = random.Random(11), Core(llama)
    for i in range(24):
        ask(core, str(i), [{"role": "user", "content": phrase(rng, 20, 60)}], max_tokens=rng.randint(2, 30))
        before = core.cells.n_used
        while compute(core):
            core.check()
        assert core.cells.n_used >= before


async def test_an_engine_at_rest_computes_it() -> None:
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), SystemClock())
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        question, text = {"role": "user", "content": "Name a river."}, ""
        answer = engine.open(GenerationRequest("r", (question,), Sampling(max_tokens=6, temperature=0)))
        async for message in answer:
            text += message.text if isinstance(message, wire.TextPiece) else ""
        assert answer.done is not None
        n_tokens = answer.done.n_prompt + answer.done.n_completion
        turns = (question, {"role": "assistant", "content": text}, {"role": "user", "content": "And a lake?"})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                counted = await engine.count(GenerationRequest("c", turns, Sampling()))
                if counted is not None and counted.n_cached > n_tokens:
                    break
                await asyncio.sleep(0.01)
        assert counted.n_cached < counted.n_tokens
    finally:
        await engine.close()
