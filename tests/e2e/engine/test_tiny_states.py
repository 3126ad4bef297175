"""Each architecture that carries a state through a text, or a window: what is used again changes no answer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import Llama
from tests.e2e.engine.test_engine_exact import N_CELLS, Core
from tests.e2e.engine.test_tiny_models import (
    N_CTX,
    TEXT,
    AbortedAfter,
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
