"""A model's own layer that guesses (MTP): every answer is the one without it, right guesses and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.llama import drafter, model, mtp
from disco_daemon.engine.llama.model import Llama
from disco_daemon.engine.llama.mtp import N_AT_ONCE, N_ROWS, N_TEXTS, OwnLayer
from disco_daemon.engine.measure.checkup import bindings
from disco_daemon.engine.speculation.speculate import Option, Speculator
from disco_daemon.engine.supervisor import Engine
from tests.e2e.engine.test_engine_exact import N_CELLS, Core, assert_no_cell_lost, phrase, random_steps
from tests.e2e.engine.test_speculate import SAMPLINGS, Eager, Hurried, answers
from tests.e2e.engine.test_tiny_models import TEXT, AbortedAfter
from tests.fixtures.tiny_models import tiny_model

RIGHT, OFTEN, NEVER = 0.0, 0.003, 1.0  # depths of models whose own layer is right so often
CASES = [("nextn", RIGHT), ("nextn", NEVER), ("mla-nextn", OFTEN)]


class Always(Eager):
    """Computes its guesses always, now few and now many, whatever they are worth: no machine's speed decides that."""

    def _best(self, options: list[Option], rate: float) -> Option | None:
        del rate
        return self._rng.choice([one for one in options if one.of_model] or [None])

    _rng = random.Random(5)


@dataclass
class Pair:
    """One model twice: with its own layer, and without."""

    on: Llama
    off: Llama
    depth: float
    abort: AbortedAfter

    @property
    def layer(self) -> OwnLayer:
        assert self.on.own_layer is not None
        return self.on.own_layer

    def guessing(self) -> Hurried:
        return Hurried(self.on, Always, self.layer)


def load_of(path: Path, **more: Any) -> wire.Load:
    sizes = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "n_cells": N_CELLS}
    return wire.Load(model_path=str(path), **(sizes | more))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, depth = request.param
    path = tiny_model(tmp_path_factory.mktemp("mtp") / f"{kind}.gguf", kind, depth=depth)
    abort = AbortedAfter()
    made = Pair(Llama(load_of(path), abort, warm=False), Llama(load_of(path, speculate=False), abort), depth, abort)
    assert made.off.own_layer is None
    yield made
    made.on.close()
    made.off.close()


@pytest.fixture(autouse=True)
def _always_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are never sure, and a guess that is not made cannot be wrong."""
    monkeypatch.setattr(drafter, "LEAST_SURE", 0.0)


def counts(core: Core) -> tuple[int, int]:
    assert core.batcher.speculator is not None
    return core.batcher.speculator.n_accepted, core.batcher.speculator.n_drafted


@pytest.mark.parametrize("sampling", SAMPLINGS[0:6:3], ids=lambda s: "-".join(s))
def test_answers_with_and_without_its_guesses_are_the_same(pair: Pair, sampling: dict[str, Any]) -> None:
    prompts = [phrase(random.Random(i), 3, 60) for i in range(2)]
    plain = [Hurried(pair.off, None).told(prompt, max_tokens=24, **sampling) for prompt in prompts]
    core = pair.guessing()
    assert [core.told(prompt, max_tokens=24, **sampling) for prompt in prompts] == plain
    n_right, n_guessed = counts(core)
    assert n_guessed > 0
    if sampling == {"temperature": 0} and pair.depth != NEVER:
        assert n_right >= (0.9 if pair.depth == RIGHT else 0.1) * n_guessed


def test_right_guesses_save_iterations(pair: Pair) -> None:
    if pair.depth != RIGHT:
        pytest.skip("its guesses are not right always")
    plain, core = Hurried(pair.off, None), pair.guessing()
    for one in (plain, core):
        one.told(TEXT, max_tokens=60)
    assert core.batcher.counters.completion_tokens == plain.batcher.counters.completion_tokens
    assert core.batcher.counters.iterations < 0.5 * plain.batcher.counters.iterations


def test_answers_beside_each_other_and_long_ones_are_the_same(pair: Pair) -> None:
    """More of them than it knows texts, some of a common beginning, and longer than what waits for it."""
    rng = random.Random(3)
    common = phrase(rng, 20, 20)
    asked = {f"r{i}": f"{common} {phrase(rng, 1, 9)}" if i % 2 else phrase(rng, 1, 40) for i in range(N_TEXTS + 1)}
    alone = {name: Hurried(pair.off, None).told(prompt, max_tokens=16)[0] for name, prompt in asked.items()}
    core = pair.guessing()
    for name, prompt in asked.items():
        core.ask(name, prompt, max_tokens=16)
    while core.batcher.step():
        core.check()
        assert len(pair.layer._texts) <= N_TEXTS
        assert all(text.n_waiting < N_ROWS for text in pair.layer._texts.values())
    assert core.said == alone
    long = Hurried(pair.off, None).told(common, max_tokens=2 * N_ROWS)
    assert pair.guessing().told(common, max_tokens=2 * N_ROWS) == long


def test_answers_that_are_held_preempted_and_broken_off_are_those_that_were_not(pair: Pair) -> None:
    rng = random.Random(11)
    n_preempted = n_guessed = 0
    for i in range(2):
        prompt, n_tokens = phrase(rng, 3, 40), rng.randint(24, 40)
        alone = Hurried(pair.off, None).told(prompt, max_tokens=n_tokens)
        core = pair.guessing()
        s = core.ask("again", prompt, max_tokens=n_tokens)
        for k in range(rng.randrange(3)):
            core.ask(f"beside {i} {k}", phrase(rng), max_tokens=8)
        for at in sorted(rng.sample(range(1, n_tokens), 3)):
            pair.abort.left = rng.randint(1, 200)  # some step of some graph, the layer's or the model's
            while s.draw.n_drawn < at and s.request.id in core.admission.sequences:
                assert core.batcher.step()
                if pair.abort.left == 0:
                    pair.abort.clear()
            pair.abort.clear()
            if s.slot >= 0 and rng.random() < 0.7:
                core.cells.swap_s_per_byte = rng.choice([1e-12, 1.0])  # swapped, or computed again
                core.admission.preempt(s)
                n_preempted += 1
            elif s.request.id in core.admission.sequences:
                core.batcher.hold("again")
                core.said.pop("again", None)
                core.batcher.append(wire.AppendText(id="again", text="", go=True))
            core.check()
        core.finish()
        core.check()
        assert (core.said.pop("again", ""), core.done["again"].reason) == alone[:2]
        n_guessed += counts(core)[1]
    assert n_preempted
    assert n_guessed


@pytest.mark.slow
def test_random_steps_with_its_guesses_lose_no_cell(pair: Pair) -> None:
    rng = random.Random(12)
    core = pair.guessing()

    def ask(name: str, hold: bool) -> None:
        core.ask(name, phrase(rng), max_tokens=rng.randint(1, 24), hold=hold)

    n_asked = random_steps(core, rng, 120, ask, most=10)
    assert counts(core)[1] > 0
    assert_no_cell_lost(core, pair.on, n_asked)


# --- the layer -------------------------------------------------------------------------------------------------------


def test_a_guess_does_not_depend_on_how_its_text_came(pair: Pair) -> None:
    """In pieces, behind wrong guesses, read early, or shared from another sequence: the same rows, the same guess."""
    tokens = pair.on.vocabulary.tokenize(TEXT * 4)[: 2 * N_ROWS]

    def given(n: int, *, ahead: int = 0, early: bool = False) -> list[int]:
        pair.on.clear()
        for start in range(0, len(tokens) - 1, n):
            part = tokens[start : min(start + n, len(tokens) - 1)]
            wrong = [7] * ahead
            rows = [(token, start + i, 2, False) for i, token in enumerate([*part, *wrong])]
            assert pair.on.decode(rows) == 0
            pair.on.truncate(2, start + len(part), lambda: pytest.fail("a text that cannot be cut"))
            if early:
                pair.layer.draft("early", tokens[: start + len(part) + 1], 3)
        return pair.layer.draft("any", tokens, 7)

    expected = given(len(tokens))
    assert len(expected) == 7
    for n, ahead, early in ((N_AT_ONCE, 0, False), (30, 0, True), (1, 0, True), (20, 15, True), (100, 15, False)):
        assert given(n, ahead=ahead, early=early) == expected, (n, ahead, early)
    pair.on.share(2, 3, len(tokens) - 1)
    pair.on.forget(2)
    assert pair.layer.draft("any", tokens, 7) == expected
    assert pair.layer.draft("another text", [5, *tokens[1:]], 7) == []
    pair.on.forget(3)
    assert pair.layer.draft("any", tokens, 7) == []


def test_a_text_whose_beginning_was_taken_over_is_guessed_for(pair: Pair) -> None:
    tokens = pair.on.vocabulary.tokenize(TEXT)
    pair.on.clear()
    assert pair.on.decode([(token, i, 0, False) for i, token in enumerate(tokens[:40])]) == 0
    kept = pair.on.save(0)
    pair.on.forget(0)
    assert pair.on.restore(1, kept)
    assert pair.layer.draft("any", tokens[:41], 3) == []
    assert pair.on.decode([(token, i, 1, False) for i, token in enumerate(tokens[40:-1], 40)]) == 0
    assert len(pair.layer.draft("any", tokens, 3)) == 3


def test_it_is_off_beside_a_draft_model_with_speculation_off_and_in_another_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tmp_path / "m.gguf", "nextn")
    assert model._guesses_itself(load_of(path))
    assert not model._guesses_itself(load_of(path, draft_path=str(path)))
    assert not model._guesses_itself(load_of(path, speculate=False))
    assert not model._guesses_itself(load_of(path, layers=(0, 2, 4)))
    assert not model._guesses_itself(load_of(tiny_model(tmp_path / "moe.gguf", "moe")))
    monkeypatch.setattr(mtp, "_staged", None)
    without = Llama(load_of(path), AbortedAfter())
    assert without.own_layer is None
    without.close()
    assert "MTP" not in bindings().features
    monkeypatch.undo()
    assert "MTP" in bindings().features


def test_memory_is_kept_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path / "m.gguf", "nextn", context=1 << 20)
    monkeypatch.setattr(model, "available_bytes", lambda: 400 << 20)
    n_cells = list[int]()
    for speculate in (True, False):
        made = Llama(load_of(path, n_ctx=0, n_cells=0, speculate=speculate), AbortedAfter(), warm=False)
        n_cells.append(made.n_cells * made.bytes_per_token)
        needed = mtp.layer_bytes(made.vocabulary.n_tokens, made.n_embd)
        made.close()
    assert n_cells[1] - n_cells[0] > 0.4 * needed > 1 << 20


async def test_the_engine_answers_the_same_with_its_guesses(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "nextn", depth=RIGHT)
    plain, _ = await answers(load_of(path, speculate=False))
    texts, stats = await answers(load_of(path))
    assert texts == plain
    assert 0 <= stats.accepted <= stats.drafted


@pytest.mark.parametrize("speculate", [True, False])
async def test_the_engine_says_whether_it_guesses(tmp_path: Path, *, speculate: bool) -> None:
    engine = Engine(load_of(tiny_model(tmp_path / "m.gguf", "nextn"), speculate=speculate), SystemClock())
    engine.start()
    try:
        assert (await engine.ready(60)).own_layer is speculate
    finally:
        await engine.close()


def test_it_decides_itself_whether_its_guesses_pay(pair: Pair) -> None:
    plain = Hurried(pair.off, None).told(TEXT, max_tokens=60)
    assert Hurried(pair.on, Speculator, pair.layer).told(TEXT, max_tokens=60) == plain
