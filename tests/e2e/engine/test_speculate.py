"""Speculative decoding on the real model: every answer is the one without it, and no KV cell is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import EngineGone
from disco_daemon.engine.llama.draft import DraftModel
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.speculation.speculate import Drafting, Speculator
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.models.default import default_model_path
from disco_daemon.scheduler.latency import IterationLoad
from disco_daemon.types import Delivery, Drawing, GenerationRequest, Sampling
from tests.e2e.engine.test_engine_exact import N_CELLS, Core, assert_no_cell_lost, phrase, random_steps

LIST = "red lamp, green chair, blue table, white shelf, red mirror, green carpet, blue clock, white door"
COPIES = (
    f"Repeat this list word for word: {LIST}.",
    f"Copy this list and add one thing at the end: {LIST}.",
    "Repeat after me: one two three one two three one two three one two three one two three",
)
PROMPTS = (*COPIES, "Tell me a story about a fox.", "Why is the sky blue? Answer with emoji.")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stop": ("table", "2")},
    {"temperature": 0, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"temperature": 0.4, "seed": 7},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {
        "temperature": 0.5,
        "seed": 7,
        "drawing": Drawing(top_k=20, xtc_probability=0.2, repeat_penalty=1.1, repeat_last_n=9),
    },
    {"temperature": 0, "drawing": Drawing(dry_multiplier=0.5, dry_allowed_length=9, min_tokens=30)},
    {"temperature": 0.5, "seed": 7, "drawing": Drawing(mirostat=2)},
)


class Eager(Speculator):
    """Guesses whenever there is a guess: rows cost nothing."""

    def cost_s(self, size: int) -> float:
        return 0.0

    def observe(self, load: IterationLoad, sizes: Any, took_s: float) -> None:
        assert took_s > 0


class Hurried(Core):
    """Readers without a pace, for whom is guessed by `kind`."""

    def __init__(self, llama: Llama, kind: type[Speculator] | None = Eager, model: Drafting | None = None) -> None:
        super().__init__(llama)
        self.done: dict[str, wire.Done] = {}
        if kind is not None:
            self.batcher.speculator = kind(llama, self.admission.latency, self.cells, model)

    def _heard(self, message: wire.Message) -> None:
        super()._heard(message)
        if isinstance(message, wire.Done):
            self.done[message.id] = message

    def ask(self, id_: str, prompt: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        self.batcher.add(wire.Generate(id=id_, messages=messages, **({"temperature": 0} | more)))
        return self.admission.sequences[id_]

    def told(self, prompt: str, **more: Any) -> tuple[str, str, int]:
        """Text, how it ended, and tokens drawn, of an answer that is alone."""
        self.ask("only", prompt, **more)
        self.finish()
        self.check()
        done = self.done.pop("only")
        return self.said.pop("only", ""), done.reason, done.n_completion


@contextmanager
def loaded(**more: Any) -> Iterator[Llama]:
    yield Llama(
        wire.Load(
            model_path=str(default_model_path()), n_ctx=512, n_threads=1, n_gpu_layers=0, n_cells=N_CELLS, **more
        ),
        AbortFlag(),
    )


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    with loaded() as llama:
        yield llama


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: "-".join(s))
def test_answers_with_and_without_guesses_are_the_same(llama: Llama, sampling: dict[str, Any]) -> None:
    plain = [Hurried(llama, None).told(prompt, max_tokens=24, **sampling) for prompt in PROMPTS[::2]]
    core = Hurried(llama)
    assert [core.told(prompt, max_tokens=24, **sampling) for prompt in PROMPTS[::2]] == plain
    assert core.batcher.speculator is not None
    assert 0 < core.batcher.speculator.n_accepted <= core.batcher.speculator.n_drafted


def test_answers_are_the_same_when_it_decides_itself_what_pays(llama: Llama) -> None:
    plain = [Hurried(llama, None).told(prompt, max_tokens=40) for prompt in PROMPTS[::2]]
    core = Hurried(llama, Speculator)
    assert [core.told(prompt, max_tokens=40) for prompt in PROMPTS[::2]] == plain


def test_guesses_save_iterations_where_the_text_repeats_itself(llama: Llama) -> None:
    n_tokens = n_iterations = n_accepted = 0
    for kind in (None, Eager):
        core = Hurried(llama, kind)
        for prompt in COPIES:
            core.told(prompt, max_tokens=40)
        before = n_tokens, n_iterations
        n_tokens, n_iterations = core.batcher.counters.completion_tokens, core.batcher.counters.iterations
        if isinstance(core.batcher.speculator, Eager):
            n_accepted = core.batcher.speculator.n_accepted
    assert n_tokens == before[0]
    assert n_iterations < 0.7 * before[1]
    # Each right guess saves an iteration at most; one that an end stood behind saves none.
    assert n_accepted >= before[1] - n_iterations


@pytest.mark.slow
def test_answers_that_are_held_preempted_and_disturbed_are_those_that_were_not(llama: Llama) -> None:
    rng = random.Random(11)
    n_preempted = n_accepted = 0
    for i in range(4):
        prompt, n_tokens = rng.choice(COPIES) + phrase(rng, 0, 3), rng.randint(16, 32)
        alone = Hurried(llama, None).told(prompt, max_tokens=n_tokens)
        core = Hurried(llama)
        s = core.ask("again", prompt, max_tokens=n_tokens)
        for k in range(rng.randrange(3)):
            core.ask(f"beside {i} {k}", rng.choice(COPIES), max_tokens=8)
        for at in sorted(rng.sample(range(1, n_tokens), 2)):
            while s.draw.n_drawn < at and s.request.id in core.admission.sequences:
                assert core.batcher.step()
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
        assert core.batcher.speculator is not None
        n_accepted += core.batcher.speculator.n_accepted
    assert n_preempted
    assert n_accepted


@pytest.mark.slow
def test_random_steps_with_guesses_lose_no_cell(llama: Llama) -> None:
    rng = random.Random(12)
    core = Hurried(llama)

    def ask(name: str, hold: bool) -> None:
        core.ask(name, f"Repeat: {phrase(rng, 2, 6) * 3}", max_tokens=rng.randint(1, 24), hold=hold)

    n_asked = random_steps(core, rng, 160, ask, most=10)
    speculator = core.batcher.speculator
    assert speculator is not None
    assert speculator.n_drafted > speculator.n_accepted > 0
    assert_no_cell_lost(core, llama, n_asked)


# --- draft model -----------------------------------------------------------------------------------------------------


def drafting(llama: Llama, path: Path) -> DraftModel:
    return DraftModel(
        wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1, n_gpu_layers=0, draft_path=str(path)),
        llama,
        AbortFlag(),
    )


def test_a_draft_model_changes_no_answer(llama: Llama) -> None:
    model = drafting(llama, default_model_path())  # the best draft of a model is itself
    for sampling in ({"temperature": 0}, {"temperature": 0.4, "seed": 7}):
        plain = [Hurried(llama, None).told(prompt, max_tokens=24, **sampling) for prompt in PROMPTS[::2]]
        core = Hurried(llama, Eager, model)
        assert [core.told(prompt, max_tokens=24, **sampling) for prompt in PROMPTS[::2]] == plain
        speculator = core.batcher.speculator
        assert speculator is not None
        assert speculator.n_accepted > 0.1 * core.batcher.counters.completion_tokens
        assert model.token_s > 0


def test_a_draft_model_knows_several_texts_and_forgets_what_was_wrong(llama: Llama) -> None:
    model = drafting(llama, default_model_path())
    plain = [Hurried(llama, None).told(prompt, max_tokens=24)[0] for prompt in PROMPTS]
    core = Hurried(llama, Eager, model)
    for i, prompt in enumerate(PROMPTS):  # one more than it has in mind
        core.ask(f"a{i}", prompt, max_tokens=24)
    core.finish()
    assert [core.said[f"a{i}"] for i in range(len(PROMPTS))] == plain
    assert len(PROMPTS) > 4
    tokens = llama.vocabulary.tokenize("The quick brown fox jumps over")
    first = model.draft("x", tokens, 3)
    assert model.draft("x", [*tokens, 1, 2, 3], 3) is not None
    assert model.draft("x", tokens, 3) == first


def test_a_long_text_is_read_in_pieces_before_it_is_guessed_for(llama: Llama) -> None:
    model = drafting(llama, default_model_path())
    tokens = (llama.vocabulary.tokenize("one two three four ") * 80)[:299]  # behind which the model is sure
    assert [bool(model.draft("long", tokens, 3)) for _ in range(3)] == [False, False, True]
    assert model.draft("longer than its context", tokens * 2, 3) == []


def test_a_draft_model_of_another_vocabulary_is_refused(llama: Llama, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = default_model_path().read_bytes()
    at = data.index(" river".replace(" ", "Ġ").encode())
    other.write_bytes(data[:at] + "Ġrivel".encode() + data[at + len("Ġriver".encode()) :])
    with pytest.raises(ModelError, match=r"token \d+ is 'Ġriver' in one vocabulary and 'Ġrivel' in the other.*unset"):
        drafting(llama, other)


def test_a_draft_model_that_is_none_is_refused(llama: Llama, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        drafting(llama, tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ModelError, match="no GGUF model"):
        drafting(llama, tmp_path / "text.gguf")


# --- in the engine process -------------------------------------------------------------------------------------------


async def answers(config: wire.Load) -> tuple[list[str], wire.Stats]:
    engine = Engine(config, SystemClock())
    engine.start()
    try:
        await engine.ready(60)
        texts = []
        for prompt in COPIES:
            sampling = Sampling(max_tokens=40, temperature=0)
            messages = ({"role": "user", "content": prompt},)
            answer = engine.open(GenerationRequest("r", messages, sampling, delivery=Delivery.OFF))
            texts.append("".join([m.text async for m in answer if isinstance(m, wire.TextPiece)]))
            await answer.close()
        assert engine.stats is not None
        return texts, engine.stats
    finally:
        await engine.close()


async def test_the_engine_answers_the_same_with_speculation_on_and_off() -> None:
    config = wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1, speculate=False)
    plain, stats = await answers(config)
    assert stats.drafted == stats.accepted == 0
    drafted = wire.Load(
        model_path=str(default_model_path()), n_ctx=512, n_threads=1, draft_path=str(default_model_path())
    )
    for guessing in (wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), drafted):
        texts, stats = await answers(guessing)
        assert texts == plain
        assert 0 <= stats.accepted <= stats.drafted


async def test_an_engine_whose_draft_model_is_missing_says_so(tmp_path: Path) -> None:
    engine = Engine(
        wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1, draft_path=str(tmp_path / "no.gguf")),
        SystemClock(),
    )
    engine.start()
    try:
        with pytest.raises(EngineGone, match=r"device\.draft_model .*no\.gguf cannot be read"):
            await engine.ready(60)
        assert engine.state is EngineState.FAILED
    finally:
        await engine.close()
