"""Engine processes with models of the kinds that the default one is not: nothing around an answer changes its text.

What a text is to be comes from the core in this process, with nothing cached and nothing beside it; see
tests/fixtures/tiny_models.py. Of a model whose state cannot be cut less is
cached; the texts are the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.supervisor import Engine
from disco_daemon.types import Append, GenerationRequest, Hold, Sampling
from tests.e2e.engine.test_engine import caught_up, cuts_of, pieces_of, question, rest_of, told
from tests.e2e.engine.test_engine_exact import Core
from tests.e2e.engine.test_tiny_models import phrase
from tests.fixtures.tiny_models import MODELS, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

N_CELLS = 512
Cut = tuple[str, tuple[int, ...], str]  # text, ids and rest
PATIENCE_S = 60.0


@dataclass
class Tiny:
    """An engine process with a tiny model, and the same model in this process."""

    engine: Engine
    llama: Llama
    divisible: bool
    known: dict[str, str] = field(default_factory=dict)

    def alone(self, request: GenerationRequest) -> str:
        """Its text where nothing is cached and nothing is beside it."""
        messages: list[dict[str, Any]] = [dict(message) for message in request.messages]
        n = request.sampling.max_tokens
        key = f"{messages} {n}"
        if key not in self.known:
            core = Core(self.llama)
            core.batcher.add(wire.Generate(id="alone", messages=messages, temperature=0, max_tokens=n))
            core.finish()
            self.known[key] = core.said.get("alone", "")
        return self.known[key]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODELS)
async def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tiny]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    path = tiny_model(folder / "tiny.gguf", request.param)
    disk = wire.Disk(folder=str(folder / "kv"), max_bytes=2**30, idle_s=0.0)
    config = wire.Load(model_path=str(path), n_ctx=N_CELLS, n_threads=2, n_cells=N_CELLS, disk=disk)
    engine = Engine(config, SystemClock())
    engine.start()
    llama = Llama(config, AbortFlag(), warm=False)
    try:
        await engine.ready(PATIENCE_S)
        yield Tiny(engine, llama, MODELS[request.param].divisible)
    finally:
        await engine.close()
        llama.close()


async def test_the_next_turn_is_as_alone_at_rest_and_out_of_what_a_killed_engine_left_on_disk(tiny: Tiny) -> None:
    rng, text, ids, vocabulary, n_asked = random.Random(5), "", [0], tiny.llama.vocabulary, 0
    while vocabulary.answer_tokens(text) != ids:  # what a random model says may be other tokens when it is read
        n_asked += 1
        first = question(phrase(rng, 20, 40), 6)
        pieces = await pieces_of(tiny.engine, first)
        text, ids = "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.ids]
    n_tokens = len(vocabulary.prompt_tokens(wire.Count(id="c", messages=[dict(m) for m in first.messages]))) + len(ids)
    turns = (*first.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "And a lake?"})
    second = GenerationRequest("r", turns, Sampling(max_tokens=12, temperature=0))
    expected = tiny.alone(second)
    engine = tiny.engine
    async with asyncio.timeout(PATIENCE_S):
        while (counted := await engine.count(second)) is None or counted.n_cached <= n_tokens:
            await asyncio.sleep(0.01)  # the other process has no event to wait for
    assert (await told(engine.open(second)))[0] == expected
    async with asyncio.timeout(PATIENCE_S):
        while engine.stats is None or engine.stats.disk_texts < n_asked:  # with less, this one may not be there yet
            await asyncio.sleep(0.01)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while engine.restarts == 0:
            await asyncio.sleep(0.01)
    await engine.ready(PATIENCE_S)
    again, done = await told(engine.open(second))
    assert again == expected
    assert done.n_cached > 0


async def test_prompts_that_begin_alike_and_come_at_once_are_answered_as_each_alone(tiny: Tiny) -> None:
    words = phrase(random.Random(1), 60, 60).split()
    asked = [question(" ".join([*words[:n], "lamp"]), 8) for n in (60, 58, 31, 9)]
    expected = [tiny.alone(request) for request in asked]
    text, _ = await told(tiny.engine.open(asked[0]))
    assert text == expected[0]
    together = await asyncio.gather(*(told(tiny.engine.open(request)) for request in asked))
    assert [text for text, _ in together] == expected
    n_cached = [done.n_cached for _, done in together]
    assert min(n_cached) > 0 if tiny.divisible else n_cached[0] > 0, "a state is kept near each prompt's end"


async def test_clients_that_leave_change_no_answer_of_others(tiny: Tiny) -> None:
    rng = random.Random(2)
    asked = [question(phrase(rng, 5, 40), 24) for _ in range(3)]
    expected = [tiny.alone(request) for request in asked]
    staying = [asyncio.create_task(told(tiny.engine.open(request))) for request in asked]
    for until in (wire.PrefillProgress | wire.TextPiece, wire.TextPiece) * 3:
        answer = tiny.engine.open(question(phrase(rng, 100, 150), 200))
        async for message in answer:
            assert not isinstance(message, wire.Done | wire.Failed)
            if isinstance(message, until):
                break
        await answer.close()
    assert [text for text, _ in await asyncio.gather(*staying)] == expected


async def test_more_answers_than_the_cells_hold_are_each_as_alone_and_so_is_what_is_asked_again(tiny: Tiny) -> None:
    rng = random.Random(3)
    asked = [question(phrase(rng, 60, 80), 40) for _ in range(7)]
    expected = [tiny.alone(request) for request in asked]
    together = await asyncio.gather(*(told(tiny.engine.open(request)) for request in asked))
    assert [text for text, _ in together] == expected
    assert sum(done.n_prompt + done.n_cached + done.n_completion for _, done in together) > N_CELLS
    for request, text in zip(asked[:2], expected, strict=False):
        assert (await told(tiny.engine.open(request)))[0] == text, "out of the cells or the host's memory"
    async with asyncio.timeout(PATIENCE_S):
        while (stats := tiny.engine.stats) is None or stats.running:
            await asyncio.sleep(0.01)  # told after the last answer's end; the other process has no event to wait for
    assert (stats.running, stats.paused, stats.waiting) == (0, 0, 0)


async def test_an_answer_goes_on_by_ids_as_the_rest_of_it(tiny: Tiny) -> None:
    """Of another side: the rest asked anew, told to a held answer in pieces, or to one that had lost a race."""
    rng, cuts = random.Random(4), list[Cut]()
    while len(cuts) < 2:  # a random model says parts of characters: behind one, no text is exactly that of its ids
        request = question(phrase(rng, 10, 30), 24)
        pieces = await pieces_of(tiny.engine, request)
        assert "".join(piece.text for piece in pieces) == tiny.alone(request)
        cuts = cuts_of(pieces, max(1, len(pieces) // 3))
    for text, ids, rest in cuts:
        assert (await told(tiny.engine.open(rest_of(request, text, ids))))[0] == rest
        held = tiny.engine.open(request, hold=True)
        held.send(Append("", ids[: len(ids) // 2], go=False))
        await caught_up(held)
        held.send(Append(text, ids[len(ids) // 2 :], go=True))
        assert (await told(held))[0] == rest
        loser, shown = tiny.engine.open(request), ""
        async for message in loser:
            if isinstance(message, wire.TextPiece):
                break
        loser.send(Hold())
        loser.send(Append(text, ids, go=True))
        async for message in loser:
            if isinstance(message, wire.TextPiece) and not loser.outdated:
                shown += message.text
        await loser.close()
        assert shown == rest
