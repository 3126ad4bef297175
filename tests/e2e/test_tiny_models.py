"""Models of the kinds that the default model is not: hybrid, of experts, with a sliding window, compressed, recurrent.

Tiny ones with random weights, so that a text depends on all that is before it; see tests/fixtures/tiny_models.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama
from tests.fixtures.tiny_models import MODELS, tiny_model

N_CTX = 512
TEXT = "The quick brown fox jumps over the lazy dog and finds a river in the winter, behind the old garden wall. " * 3


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def llama(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = tiny_model(tmp_path_factory.mktemp("tiny") / f"{kind}.gguf", kind)
    load = wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CTX, exact=True)
    model = Llama(load, AbortFlag(), warm=False)
    yield model
    model.close()


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
    assert llama.divisible is MODELS[kind].divisible


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
