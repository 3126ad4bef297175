"""The engine's core on the real model: whatever happens around an answer, it is the same, and no KV cell is lost.

In this process, step by step. DISCO_ENGINE_ANSWERS and DISCO_ENGINE_STEPS say how much of it: 500 and 10000 are the
full measure, which takes a quarter of an hour.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.sequence import Sequence
from disco_daemon.models.default import default_model_path
from disco_daemon.scheduler.baselines import RoundRobin
from disco_daemon.scheduler.latency import IterationLatency
from tests.unit.engine.test_batch import Apart

N_ANSWERS = int(os.environ.get("DISCO_ENGINE_ANSWERS", "10"))
N_STEPS = int(os.environ.get("DISCO_ENGINE_STEPS", "250"))
N_CELLS, N_SEQS = 768, 6
WORDS = ("river", "lamp", "stone", "garden", "winter", "silver", "music", "door", "island", "paper", "cloud", "letter")

pytestmark = pytest.mark.slow


class Core:
    """Batcher, admission and cells around the real model, and what each answer came to."""

    def __init__(self, llama: Llama) -> None:
        llama.clear()
        self.llama = llama
        self.said: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        latency = IterationLatency(llama.latency_prior)
        self.cells = Cells(llama, min(N_SEQS, llama.n_seqs), N_CELLS)
        self.admission = Admission(self.cells, RoundRobin(slice_s=0.05), latency)
        self.batcher = Batcher(llama, self._heard, self.admission, grouping=Apart())

    def _heard(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_, text=text):
                self.said[id_] = self.said.get(id_, "") + text
            case wire.Done(id=id_, reason=reason):
                self.ended[id_] = reason
            case wire.Failed(id=id_, message=text):
                pytest.fail(f"{id_}: {text}")

    def ask(self, id_: str, prompt: str, **more: Any) -> Sequence:
        messages = [{"role": "user", "content": prompt}]
        self.batcher.add(wire.Generate(id=id_, messages=messages, temperature=0, pace_tps=4.8, **more))
        return self.admission.sequences[id_]

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.batcher.step():
                return
        pytest.fail("the engine never comes to rest")

    def check(self) -> None:
        """llama.cpp has of each sequence what we think it has, and nothing of any other."""
        memory = self.llama._memory
        for seq in range(self.cells.n_seqs):
            expected = self.cells._index.length(seq)
            if not self.llama.divisible and seq not in self.cells._taken:
                assert llama_cpp.llama_memory_seq_pos_max(memory, seq) == -1, "cached texts have cells, and no state"
                continue
            assert llama_cpp.llama_memory_seq_pos_max(memory, seq) == expected - 1
            if self.llama.windowed:
                assert not expected or self.llama.can_cut(seq, expected), "it has all that the next token sees"
                continue
            first = 0 if self.llama.divisible else expected - 1  # a state is that of the last token
            assert llama_cpp.llama_memory_seq_pos_min(memory, seq) == (first if expected else -1)
        running = self.admission.resident
        assert {s.slot: s.n_past for s in running} == {s.slot: self.cells.n_of(s.slot) for s in running}
        assert 0 <= self.cells.n_used <= N_CELLS
        assert self.cells.n_garbage >= 0


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(
        wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1, n_gpu_layers=0, n_cells=N_CELLS),
        AbortFlag(),
    )


def phrase(rng: random.Random, least: int = 3, most: int = 30) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def test_answers_that_were_preempted_are_those_that_were_not(llama: Llama) -> None:
    rng = random.Random(5)
    core = Core(llama)
    n_swapped = n_recomputed = 0
    for i in range(N_ANSWERS):
        prompt, n_tokens = f"Tell me about the {phrase(rng)}.", rng.randint(12, 24)
        core.ask("alone", prompt, max_tokens=n_tokens)
        core.finish()
        alone = core.said.pop("alone", "")
        if rng.random() < 0.5:
            core = Core(llama)  # nothing is cached
        s = core.ask("again", prompt, max_tokens=n_tokens)
        for k in range(rng.randrange(4)):
            core.ask(f"beside {i} {k}", phrase(rng), max_tokens=8)
        for at in sorted(rng.sample(range(1, n_tokens), 2)):
            while s.draw.n_drawn < at and s.request.id in core.admission.sequences:
                assert core.batcher.step()
            if s.slot >= 0:
                core.cells.swap_s_per_byte = rng.choice([1e-12, 1.0])  # swapped, or computed again
                core.admission.preempt(s)
                n_swapped += s.saved is not None
                n_recomputed += s.saved is None
                core.check()
        core.finish()
        assert core.said.pop("again", "") == alone
        core.check()
    assert n_swapped
    assert n_recomputed
    print(f"{N_ANSWERS} answers, {n_swapped} swaps, {n_recomputed} recomputed")


def random_steps(core: Core, rng: random.Random, n_steps: int, ask: Callable[[str, bool], object], most: int) -> int:
    """Join, leave, cancel, preempt, hold and go on at random, at most `most` at a time; how many answers were asked."""
    held: set[str] = set()
    n_asked = 0
    for _ in range(n_steps):
        whom = rng.choice(list(core.admission.sequences) or [""])
        op = rng.choice(["ask", "ask", "cancel", "preempt", "append", "hold", "step", "step", "step", "step", "step"])
        if op == "ask" and len(core.admission.sequences) < most:
            n_asked += 1
            hold = rng.random() < 0.2
            held |= {f"r{n_asked}"} if hold else set()
            ask(f"r{n_asked}", hold)
        elif op == "cancel":
            core.batcher.cancel(whom)
        elif op == "preempt" and whom and core.admission.sequences[whom].slot >= 0:
            core.cells.swap_s_per_byte = rng.choice([1e-12, 1.0])  # swapped, or computed again
            core.admission.preempt(core.admission.sequences[whom])
        elif op == "append" and whom in held:
            go = rng.random() < 0.5
            held -= {whom} if go else set()
            core.batcher.append(wire.AppendText(id=whom, text=phrase(rng, 1, 3), go=go))
        elif op == "hold" and whom:
            held.add(whom)
            core.batcher.hold(whom)
        else:
            core.batcher.step()
        core.check()
    return n_asked


def assert_no_cell_lost(core: Core, llama: Llama, n_asked: int) -> None:
    """End all that runs: then every cell is free, and can be computed in."""
    for whom in list(core.admission.sequences):
        core.batcher.cancel(whom)
    core.check()
    assert core.cells.n_taken == core.cells.saved_bytes == 0
    assert len(core.ended) == n_asked
    assert core.cells.make_room(N_CELLS), "some cells are held by nobody, and not free"
    core.cells.move()
    assert core.cells.n_garbage == core.cells.n_used == 0
    row = [(1, i, 0, False) for i in range(N_CELLS)]
    assert all(llama.decode(row[i : i + 128]) == 0 for i in range(0, N_CELLS, 128)), "a cell is lost"


def test_random_steps_lose_no_cell(llama: Llama) -> None:
    rng = random.Random(6)
    core = Core(llama)

    def ask(name: str, hold: bool) -> None:
        core.ask(name, phrase(rng), max_tokens=rng.randint(1, 12), hold=hold)

    n_asked = random_steps(core, rng, N_STEPS, ask, most=12)
    assert_no_cell_lost(core, llama, n_asked)
    print(f"{N_STEPS} steps, {n_asked} answers, {core.cells.n_moves} moves in {core.cells.move_s:.2f} s")
