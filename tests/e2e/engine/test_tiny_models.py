"""Models of the kinds that the default model is not: hybrid, of experts, with a sliding window, compressed, recurrent.

Tiny ones with random weights, so that a text depends on all that is before it; see tests/fixtures/tiny_models.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp
import msgspec
import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.kv.checkpoints import LAST_CHUNK, Checkpoints
from disco_daemon.engine.llama import memory, model
from disco_daemon.engine.llama.embedder import Embeddings
from disco_daemon.engine.llama.memory import N_BATCH, N_SEQS, N_SPARE_SEQS
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.sequence import Prefill
from disco_daemon.engine.serve.sequence import Sequence as Sequence_
from disco_daemon.engine.speculation.speculate import Option, Speculator
from disco_daemon.scheduler.latency import IterationLatency
from tests.e2e.engine.test_engine_exact import N_CELLS, Core
from tests.fixtures.tiny_models import MODELS, tiny_model

N_CTX = 512
WINDOWED = "windowed"  # a model with a sliding window, and so many cells that layers with one have cells of their own
N_CELLS_OF = {WINDOWED: 2048}
KINDS = [*(kind for kind in MODELS if kind != "mla-nextn"), WINDOWED]  # that one: test_mtp.py
TEXT = "The quick brown fox jumps over the lazy dog and finds a river in the winter, behind the old garden wall. " * 3


class AbortedAfter(AbortFlag):
    """Ends a decode behind so many steps of its graph, as a request that leaves just then."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.callback = llama_cpp.ggml_abort_callback(self._is_over)

    def _is_over(self, _: object) -> bool:
        self.left -= self.left > 0
        return self.left == 0

    def clear(self) -> None:
        self.left = -1


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def abort(kind: str) -> AbortedAfter:
    return AbortedAfter()


@pytest.fixture(scope="module")
def llama(kind: str, abort: AbortedAfter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    model = Llama(load_of(tmp_path_factory.mktemp("tiny"), kind), abort, warm=False)
    yield model
    model.close()


def load_of(folder: Path, kind: str) -> wire.Load:
    path = tiny_model(folder / f"{kind}.gguf", "sliding-window" if kind == WINDOWED else kind)
    n_cells = N_CELLS_OF.get(kind, N_CELLS)
    return wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=2, n_gpu_layers=0, n_cells=n_cells, exact=True)


def said(llama: Llama, prompt: list[int], n: int) -> list[int]:
    """The likeliest `n` tokens behind a prompt."""
    llama.clear()
    tokens, n_past = list(prompt), 0
    for _ in range(n):
        rows = [(tokens[i], i, 0, i == len(tokens) - 1) for i in range(n_past, len(tokens))]
        assert llama.decode(rows) == 0
        n_past = len(tokens)
        tokens.append(int(llama.logits(len(rows) - 1).argmax()))
    return tokens[len(prompt) :]


def test_it_is_of_its_kind(llama: Llama, kind: str) -> None:
    assert llama.windowed is (kind == WINDOWED)
    assert llama.divisible is (kind != WINDOWED and MODELS[kind].divisible)


def test_its_texts_are_varied_and_depend_on_all_before_them(llama: Llama) -> None:
    prompt = llama.vocabulary.tokenize(TEXT)
    answer = said(llama, prompt, 24)
    assert len(set(answer)) > 12, "a text that repeats itself hides what is wrong with it"
    for at in (len(prompt) // 4, len(prompt) // 2, len(prompt) - 2):
        other = [*prompt[:at], prompt[0], *prompt[at + 1 :]]
        assert said(llama, other, 24) != answer, f"the token {at} of {len(prompt)} makes no difference"


def test_a_prompt_gives_the_same_bits_in_one_piece_and_in_many(llama: Llama) -> None:
    prompt = llama.vocabulary.tokenize(TEXT)
    logits = []
    for piece in (len(prompt), 32, 7, 1):
        llama.clear()
        for start in range(0, len(prompt), piece):
            end = min(start + piece, len(prompt))
            assert llama.decode([(prompt[i], i, 0, i == len(prompt) - 1) for i in range(start, end)]) == 0
        logits.append(llama.logits((len(prompt) - 1) % piece).copy())
    assert all(np.array_equal(logits[0], other) for other in logits[1:])


WORDS = ("river", "lamp", "stone", "garden", "winter", "silver", "music", "door", "island", "paper", "cloud", "letter")


def phrase(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


class Alone:
    """What a request comes to that has the engine for itself, with nothing cached."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self._known: dict[tuple[str, int, str], str] = {}

    def text(self, prompt: str, n: int, answer_so_far: str = "") -> str:
        """Its text; ends what any other core computes."""
        request = prompt, n, answer_so_far
        if request not in self._known:
            core = Core(self._llama)
            core.ask("alone", prompt, max_tokens=n, answer_so_far=answer_so_far)
            core.finish()
            self._known[request] = core.said.get("alone", "")
        return self._known[request]


@pytest.fixture(scope="module")
def alone(llama: Llama) -> Alone:
    return Alone(llama)


def test_a_decode_that_is_broken_off_anywhere_changes_no_answer(
    llama: Llama, alone: Alone, abort: AbortedAfter
) -> None:
    rng = random.Random(1)
    asked = {f"r{i}": (phrase(rng, 3, 60), rng.randint(4, 10)) for i in range(4)}
    expected = {name: alone.text(*request) for name, request in asked.items()}
    for at in (1, 4, 9, 16, 25, 36, 60, 90):
        core = Core(llama)
        for name, (prompt, n) in asked.items():
            core.ask(name, prompt, max_tokens=n)
        n_aborted = 0
        for step in range(400):
            abort.left = at if step % 3 == 1 and n_aborted < 4 else -1
            busy = core.batcher.step()
            n_aborted += abort.left == 0
            abort.clear()
            core.check()
            if not busy:
                break
        assert n_aborted
        assert core.said == expected, f"broken off behind {at} steps of the graph"
        assert set(core.ended.values()) == {"length"}


def test_an_answer_that_waited_and_came_back_is_as_if_it_had_not(llama: Llama, alone: Alone) -> None:
    rng = random.Random(2)
    prompt, beside = phrase(rng, 5, 40), phrase(rng, 5, 40)
    expected = {"first": alone.text(prompt, 12), "beside": alone.text(beside, 12)}
    for how in (1e-12, 1.0):  # swapped, or computed again
        core = Core(llama)
        first = core.ask("first", prompt, max_tokens=12)
        core.ask("beside", beside, max_tokens=12)
        for at in (3, 8):
            while first.draw.n_drawn < at:
                assert core.batcher.step()
            core.cells.swap_s_per_byte = how
            core.admission.preempt(first)
            core.check()
        core.finish()
        assert core.said == expected


def test_a_held_answer_that_gets_text_from_elsewhere_goes_on_as_if_it_had_been_given(
    llama: Llama, alone: Alone
) -> None:
    rng = random.Random(3)
    prompt, beside = phrase(rng, 5, 30), phrase(rng, 5, 30)
    whole, other = alone.text(prompt, 12), alone.text(beside, 12)
    for at in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1):  # in the middle of tokens, mostly
        given = whole[:at] + "and so"
        expected = alone.text(prompt, 8, answer_so_far=given)
        core = Core(llama)
        core.ask("loser", prompt, max_tokens=8 + len(llama.vocabulary.answer_tokens(given)))
        core.ask("beside", beside, max_tokens=12)
        for _ in range(4):
            core.batcher.step()
        core.batcher.hold("loser")  # of a race: it is parked
        core.check()
        core.batcher.append(wire.AppendText(id="loser", text=whole[:at], go=False))
        core.batcher.step()
        core.check()
        core.said.pop("loser", None)
        core.batcher.append(wire.AppendText(id="loser", text="and so", go=True))
        core.finish()
        assert core.said == {"loser": expected, "beside": other}, f"handed over behind {at} characters"


def test_prompts_that_begin_alike_are_answered_as_if_each_came_first(llama: Llama, alone: Alone) -> None:
    rng = random.Random(4)
    words = phrase(rng, 100, 100).split()
    prompts = [" ".join(words[:n]) + f" {WORDS[i]}" for i, n in enumerate((100, 95, 60, 99, 30, 97, 10, 70))]
    expected = [alone.text(prompt, 4) for prompt in prompts]
    for at_once in (1, 3):
        core = Core(llama)
        for i, prompt in enumerate(prompts):
            core.ask(f"{i}", prompt, max_tokens=4)
            if i % at_once == 0:
                core.finish()
            core.cells.tidy()  # what is cached goes to main memory, and comes back in part
        core.finish()
        assert [core.said[f"{i}"] for i in range(len(prompts))] == expected


N_HISTORIES = int(os.environ.get("DISCO_HISTORIES", "24"))  # of all kinds; 500 are the full measure
Messages = list[dict[str, str]]


def say(core: Core, name: str, messages: Messages, n: int) -> Sequence_:
    core.batcher.add(wire.Generate(id=name, messages=list(messages), temperature=0, max_tokens=n))
    return core.admission.sequences[name]


def edited(chat: Messages, rng: random.Random) -> Messages:
    """A chat as its client sends it next: gone on with, edited in its middle, compacted, or begun again."""
    users = [i for i, message in enumerate(chat) if message["role"] == "user"]
    at, question = rng.choice(users), {"role": "user", "content": phrase(rng, 2, 30)}
    match rng.choice(("next", "next", "next", "edit", "answer again", "compact", "begin again")):
        case "next":
            return [*chat, question]
        case "edit":
            return [*chat[:at], question]
        case "answer again":
            return chat[: at + 1]
        case "compact":
            return [chat[0], {"role": "user", "content": f"So far: {phrase(rng, 3, 10)}"}, *chat[-1:], question]
        case _:
            return [chat[0], question]


def test_chats_with_any_history_are_answered_as_if_each_prompt_came_first(
    llama: Llama, abort: AbortedAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_thread(llama, monkeypatch)
    assert_histories_change_no_answer(llama, abort, -(-N_HISTORIES // len(KINDS)))


def one_thread(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with one: a second one waits for the first many times as long as it computes."""
    for name in ("n_threads", "n_threads_batch"):
        monkeypatch.setattr(llama, name, 1)


def assert_histories_change_no_answer(llama: Llama, abort: AbortedAfter, n: int, seed: int = 8) -> None:
    """Lead `n` times two chats with one system prompt, interleaved, with cancels and evictions.

    Each answer once more alone is the same; and what was computed is used again, where a model keeps it.
    """
    rng, asked, n_reused = random.Random(seed), list[tuple[Messages, int, str]](), 0
    keeps = llama.divisible
    for _ in range(n):
        core = Core(llama)
        if not llama.divisible:
            room = rng.choice((0, 300_000, 10**9))
            core.cells.checkpoints = Checkpoints(room, every=rng.choice((8, 40)), last=rng.choice((2, 8)))
            keeps |= llama.resumes and room > 0
        system = {"role": "system", "content": phrase(rng, 20, 60)}
        chats = [[system, {"role": "user", "content": phrase(rng, 2, 30)}] for _ in range(2)]
        for turn in range(4):
            n_tokens = [rng.randint(2, 8) for _ in chats]
            for i, n in enumerate(n_tokens):
                say(core, f"{i} {turn}", chats[i], n)
                for _ in range(rng.randrange(6)):
                    core.batcher.step()
                    core.check()
                if rng.random() < 0.25:
                    core.batcher.cancel(f"{i} {turn}")
                    core.check()
            if core.admission.resident and rng.random() < 0.3:
                core.cells.swap_s_per_byte = rng.choice((1e-12, 1.0))  # swapped, or computed again
                core.admission.preempt(rng.choice(core.admission.resident))
            if rng.random() < 0.3:
                core.cells.tidy()
            core.finish()
            abort.left = rng.choice((-1, -1, 5, 30))
            while core.admission.next_turns.compute(llama, core.cells):
                abort.clear()
            abort.clear()
            core.check()
            for i, n in enumerate(n_tokens):
                said = core.said.get(f"{i} {turn}", "")
                if core.ended[f"{i} {turn}"] != "cancelled":
                    asked.append((chats[i], n, said))
                chats[i] = edited([*chats[i], {"role": "assistant", "content": said}], rng)
        n_reused += core.cells.n_reused
    assert n_reused > 0 or not keeps
    for messages, n, said in asked:
        core = Core(llama)
        say(core, "alone", messages, n)
        core.finish()
        assert core.said.get("alone", "") == said


def test_the_third_turn_of_a_chat_is_computed_behind_the_second(llama: Llama) -> None:
    core, rng, chat, turns = Core(llama), random.Random(9), Messages(), list[Prefill]()
    for turn in range(3):
        chat.append({"role": "user", "content": phrase(rng, 40, 50) if turn < 2 else "And a lamp?"})
        turns.append(say(core, f"{turn}", chat, 12).prefill)
        core.finish()
        chat.append({"role": "assistant", "content": core.said.get(f"{turn}", "")})
    assert turns[2].n_cached > turns[1].n_prompt - 2 * LAST_CHUNK, "its answer may be read as other tokens than it was"


def test_memory_is_reckoned_for_the_states_that_llama_cpp_makes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    if kind == WINDOWED or MODELS[kind].divisible:
        pytest.skip("it has no state, or a window")
    prompt = phrase(random.Random(10), 20, 30)
    expected = alone.text(prompt, 8)
    known, needs = memory.fitting, list[memory.Need]()

    def fitting(n_ctx: int, n_cells: int, need: memory.Need, available: int) -> tuple[int, int]:
        needs.append(need)
        return known(n_ctx, n_cells, need, available)

    monkeypatch.setattr(model, "fitting", fitting)
    load = wire.Load(model_path=str(tiny_model(tmp_path / "m.gguf", kind)), n_ctx=N_CTX, n_threads=2, n_cells=N_CELLS)
    for share, n_seqs in ((1.0, N_SEQS), (1e-9, memory.LEAST_SEQS)):
        monkeypatch.setattr(memory, "STATES_SHARE", share)
        llama = Llama(load, AbortFlag(), warm=False)
        assert llama.n_seqs == n_seqs
        core = Core(llama)
        core.ask("alone", prompt, max_tokens=8)
        core.batcher.step()
        seq, state = core.admission.resident[0].slot, len(llama.state(core.admission.resident[0].slot))
        cells = len(llama.save(seq)) - state
        assert needs[-1].work == pytest.approx(
            memory.work_bytes(N_BATCH, llama.vocabulary.n_tokens, llama.n_embd)
            + (n_seqs + N_SPARE_SEQS) * (1 + llama.n_snapshots) * state
        )
        assert core.cells.n_of(seq) * llama.bytes_per_token == pytest.approx(cells, rel=0.1, abs=1000)
        core.finish()
        assert core.said == {"alone": expected}
        llama.close()


def test_a_context_that_is_asked_for_and_fits_only_so_is_kept_in_bytes(
    llama: Llama, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says is bit for bit what a model says that is set to that, however it is computed."""
    if kind not in MODELS:
        pytest.skip("its file is that of another kind")
    needs = list[memory.Need]()
    known = memory.fitting

    def fitting(n_ctx: int, n_cells: int, need: memory.Need, available: int) -> tuple[int, int]:
        needs.append(need)
        return known(n_ctx, n_cells, need, available)

    monkeypatch.setattr(model, "fitting", fitting)
    path, n_ctx = tiny_model(tmp_path / "m.gguf", kind), 2048
    load = wire.Load(model_path=str(path), n_ctx=n_ctx, n_threads=2, n_cells=n_ctx)

    def loaded(kv_type: str, **more: object) -> Llama:
        needs.clear()
        return Llama(msgspec.structs.replace(load, kv_type=kv_type, **more), AbortFlag(), warm=False)

    def room(kv_type: str) -> int:
        loaded(kv_type).close()
        return int((needs[-1].work + n_ctx * needs[-1].per_token) / memory.SPARE)

    least, most = room("q8_0"), room("f16")
    if not MODELS[kind].takes_cells:
        assert least == most, "it has nothing that could be kept so"
        return
    assert least < most
    cases = [(most + 1000, "f16"), ((least + most) // 2, "q8_0"), (least - 1000, "f16")]
    if kind == "sliding-window":  # its windows alone take more at 16 bits than there is then
        cases.pop()
    for free, kv_type in cases:
        monkeypatch.setattr(model, "available_bytes", lambda free=free: free)
        monkeypatch.setattr(model, "too_large", lambda *_: None)
        found = loaded("auto", flash_attn=False if kv_type == "q8_0" else None)
        assert (found.kv_type, found.n_ctx == n_ctx) == (kv_type, free > least)
        if kv_type == "q8_0":
            prompt = found.vocabulary.tokenize(TEXT)
            found.renew(msgspec.structs.replace(load, kv_type="auto"))
            expected = said(found, prompt, 12)
            set_so = loaded("q8_0")
            assert said(set_so, prompt, 12) == expected
            assert (set_so.bytes_per_token, set_so.n_seqs) == (found.bytes_per_token, found.n_seqs)
            set_so.close()
        found.close()


class KnownTexts:
    """A draft model that knows how these texts go on, and is wrong somewhere in every second guess."""

    token_s = 0.0

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts, self._rng = texts, random.Random(5)

    def draft(self, key: str, tokens: Sequence[int], n: int) -> list[int]:
        del key
        whole = next(text for text in self._texts if text[: len(tokens)] == list(tokens))
        found = whole[len(tokens) : len(tokens) + n]
        if found and self._rng.random() < 0.5:
            at = self._rng.randrange(len(found))
            found[at] = found[at] % 100 + 1000
        return found


class Guessing(Speculator):
    """Computes short guesses always, whatever they are worth: a machine's speed decides nothing here."""

    def _best(self, options: list[Option], rate: float) -> Option | None:
        del rate
        return min((one for one in options if one.of_model), key=lambda one: one.size, default=None)


def test_right_and_wrong_guesses_change_no_answer(llama: Llama) -> None:
    assert_guesses_change_no_answer(llama, random.Random(6), Guessing)


def assert_guesses_change_no_answer(llama: Llama, rng: random.Random, how: type[Guessing], n_tokens: int = 24) -> None:
    """Answers beside each other, of which one is the longest, and next turns, with guesses and without."""
    if not llama.n_retractable:
        pytest.skip("an engine guesses nothing where wrong guesses could not be cut")
    asked: dict[str, Messages] = {f"r{i}": [{"role": "user", "content": phrase(rng, 3, 60)}] for i in range(3)}
    texts, expected = list[list[int]](), dict[str, str]()

    def n_of(name: str) -> int:
        return n_tokens + 72 * (name[1] == "1")

    def alone(name: str) -> None:
        core = Core(llama)
        s = say(core, name, asked[name], n_of(name))
        core.finish()
        texts.append(list(s.tokens))
        expected.update(core.said)

    for name in list(asked):
        alone(name)
    for name in ("r0", "r1"):
        answer = {"role": "assistant", "content": expected[name]}
        asked[f"{name} next"] = [*asked[name], answer, {"role": "user", "content": phrase(rng, 2, 20)}]
        alone(f"{name} next")
    core = Core(llama)
    latency = IterationLatency(llama.latency_prior)
    guessing = core.batcher.speculator = how(llama, latency, core.cells, KnownTexts(texts))
    for turn in ([name for name in asked if "next" not in name], [name for name in asked if "next" in name]):
        for name in turn:  # without a pace: a reader with text in hand gets no guesses
            core.batcher.add(wire.Generate(id=name, messages=asked[name], temperature=0, max_tokens=n_of(name)))
        while core.batcher.step():
            core.check()
    assert core.said == expected
    assert 0 < guessing.n_accepted < guessing.n_drafted
    if llama.n_snapshots:
        assert core.cells.n_reused > 0, "what was guessed right is used again"


def test_an_embedding_has_the_same_bits_in_any_pieces_broken_off_or_beside_an_answer(
    llama: Llama, alone: Alone, abort: AbortedAfter
) -> None:
    prompt = phrase(random.Random(7), 5, 40)
    expected = alone.text(prompt, 12)
    found = list[bytes]()

    def hear(message: wire.Message) -> None:
        assert not isinstance(message, wire.Failed)
        if isinstance(message, wire.Embedded):
            found.extend(message.vectors)

    for room, broken_off in ((512, -1), (32, -1), (7, 9), (7, 90)):
        read = llama.vocabulary.raw_tokens
        embeddings = Embeddings(llama.embedding_context, read, llama.n_ctx, llama.n_embd_out, hear)
        core = Core(llama)
        core.ask("answer", prompt, max_tokens=12)
        embeddings.add(embeddings.tokenized(wire.Embed(id="e", inputs=(TEXT,))))
        abort.left, busy = broken_off, True
        while busy:
            busy = embeddings.step(lambda: room)  # noqa: B023 - called before the next round
            abort.clear()
            busy |= core.batcher.step()
        assert core.said == {"answer": expected}
    assert len(found) == 4
    assert len(set(found)) == 1
