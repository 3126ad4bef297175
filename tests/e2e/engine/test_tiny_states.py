"""Each architecture that carries a state through a text, or a window: what is used again changes no answer."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.llama.memory import N_BATCH, SNAPSHOT_SEQS, SNAPSHOTS, snapshots_fitting
from disco_daemon.engine.llama.model import Llama
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.speculation.speculate import Option
from disco_daemon.models.default import default_model_path
from disco_daemon.models.kept_numbers import GOING_BACK
from tests.e2e.engine.test_engine_exact import N_CELLS, Core
from tests.e2e.engine.test_speculate import answers
from tests.e2e.engine.test_tiny_models import (
    N_CTX,
    TEXT,
    AbortedAfter,
    Guessing,
    assert_guesses_change_no_answer,
    assert_histories_change_no_answer,
    one_thread,
    said,
)
from tests.fixtures.tiny_models import tiny_model
from tests.fixtures.tiny_states import STATEFUL

N_HISTORIES = int(os.environ.get("DISCO_HISTORIES", "1"))  # of each architecture; 40 are the full measure


@pytest.fixture(scope="module", params=STATEFUL)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def abort(kind: str) -> AbortedAfter:
    return AbortedAfter()


@pytest.fixture(scope="module")
def llama(kind: str, abort: AbortedAfter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = tiny_model(tmp_path_factory.mktemp("states") / "m.gguf", STATEFUL[kind])
    load = wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CELLS, exact=True)
    model = Llama(load, abort, warm=False)
    yield model
    model.close()


def test_its_texts_are_varied_and_depend_on_all_before_them(llama: Llama) -> None:
    prompt = llama.vocabulary.tokenize(TEXT)
    answer = said(llama, prompt, 24)
    assert len(set(answer)) > 12, "a text that repeats itself hides what is wrong with it"
    for at in (len(prompt) // 4, len(prompt) // 2, len(prompt) - 2):
        other = [*prompt[:at], prompt[0], *prompt[at + 1 :]]
        assert said(llama, other, 24) != answer, f"the token {at} of {len(prompt)} makes no difference"


def test_chats_with_any_history_are_answered_as_if_each_prompt_came_first(
    llama: Llama, abort: AbortedAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_thread(llama, monkeypatch)
    assert_histories_change_no_answer(llama, abort, N_HISTORIES)


def test_prompts_that_are_read_beside_each_other_are_answered_as_if_each_were_alone(llama: Llama) -> None:
    prompts = [TEXT[at : at + 90] for at in (0, 40, 100)]
    alone = []
    for prompt in prompts:
        core = Core(llama)
        core.ask("alone", prompt, max_tokens=8)
        core.finish()
        alone.append(core.said["alone"])
    core = Core(llama)
    for i, prompt in enumerate(prompts):
        core.ask(f"{i}", prompt, max_tokens=8)
    core.finish()
    assert [core.said[f"{i}"] for i in range(len(prompts))] == alone


def test_llama_cpp_keeps_snapshots_of_the_states_that_it_is_asked_for(llama: Llama, kind: str) -> None:
    assert (llama.n_snapshots == max(SNAPSHOTS)) is (llama.resumes and STATEFUL[kind].architecture in GOING_BACK)
    assert llama.n_retractable == (N_BATCH if llama.divisible else llama.n_snapshots)


class AnySize(Guessing):
    """Computes guesses of any length, and none now and then."""

    _rng = random.Random(5)

    def _best(self, options: list[Option], rate: float) -> Option | None:
        del rate
        return self._rng.choice([one for one in options if one.of_model] or [None])


@pytest.mark.parametrize("seed", range(N_HISTORIES))
def test_guesses_of_any_length_change_no_answer(llama: Llama, seed: int) -> None:
    assert_guesses_change_no_answer(llama, random.Random(seed), AnySize, n_tokens=40)


def test_a_state_goes_back_to_what_it_was_before_any_guess(llama: Llama) -> None:
    """Also beside other texts, and with others between."""
    if not llama.n_snapshots:
        pytest.skip("llama.cpp keeps no snapshots of its states")
    rng, texts = random.Random(3), [llama.vocabulary.tokenize(TEXT * 4)[i : i + 240] for i in range(3)]
    llama.clear()
    assert llama.decode([(text[i], i, seq, False) for seq, text in enumerate(texts) for i in range(8)]) == 0
    lengths = [8] * 3
    for _ in range(40):
        rows, n_wrong = list[Row](), dict[int, int]()
        some = rng.sample(range(3), rng.choice((1, 1, 2, 3)))
        for seq in some:
            n_right, n_wrong[seq] = rng.randint(1, 4), rng.randint(0, llama.n_snapshots) if len(some) == 1 else 0
            tokens = [*texts[seq][lengths[seq] :][:n_right], *rng.choices(range(100, 1000), k=n_wrong[seq])]
            rows += [(token, lengths[seq] + i, seq, False) for i, token in enumerate(tokens)]
            lengths[seq] += n_right
        assert llama.decode(rows) == 0
        assert not any(llama.can_cut(seq, lengths[seq] - 4) for seq in n_wrong), "there is no snapshot before it"
        for seq, n in n_wrong.items():
            assert llama.can_cut(seq, lengths[seq]) is (n > 0)
            assert len(some) == 1 or not llama.can_cut(seq, lengths[seq] - 1), "llama.cpp moves states of several"
            llama.truncate(seq, lengths[seq], lambda: pytest.fail("it has no snapshot"))
            assert n == 0 or not llama.can_cut(seq, lengths[seq] - 1), "a snapshot is of the latest decode"
    found = []
    for seq, text in enumerate(texts):
        assert llama.decode([(text[lengths[seq]], lengths[seq], seq, True)]) == 0
        found.append(llama.logits(0).copy())
    for seq, text in enumerate(texts):
        llama.clear()
        whole = [(token, i, seq, i == lengths[seq]) for i, token in enumerate(text[: lengths[seq] + 1])]
        assert llama.decode(whole) == 0
        assert np.array_equal(llama.logits(lengths[seq]), found[seq])


async def test_an_engine_answers_the_same_with_guesses_and_without(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", STATEFUL["qwen35"])
    load = wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=1, draft_path=str(default_model_path()))
    plain, stats = await answers(msgspec.structs.replace(load, draft_path="", speculate=False))
    assert stats.drafted == 0
    texts, stats = await answers(load)
    assert texts == plain
    assert 0 <= stats.accepted <= stats.drafted


def test_snapshots_are_kept_where_they_leave_room_for_sequences() -> None:
    state = 2**20
    assert snapshots_fitting(state, 16 * 8 * SNAPSHOT_SEQS * state) == 7
    assert snapshots_fitting(state, 16 * 4 * SNAPSHOT_SEQS * state) == 3
    assert snapshots_fitting(state, 15 * 4 * SNAPSHOT_SEQS * state) == 0
