"""Prompts for filling in the middle have the token ids of those of llama-server's `/infill`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import pytest

from disco_daemon.engine.llama.infill import BATCH, ROOM
from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.engine.wire import Count
from disco_daemon.models.default import default_model_path
from disco_daemon.types import ExtraText, Infill
from tests.fixtures.gguf import FIM_TOKENS, fim_model
from tests.fixtures.llama_servers import told_by

CODE = "def area(width, height):\n    '''Return it in m².'''\n    return width * height\n\n\n"
LONG = "".join(
    f"def f_{i}(x):\n    if x > {i}:\n        return f_{i - 1}(x) + {i}\n    return 'Ünïcode {i}'\n\n"
    for i in range(36)
)
N_CTX = 768
CASES: list[dict[str, Any]] = [
    {"input_prefix": "def f():\n    ", "input_suffix": "\n    return x\n"},
    {"input_prefix": "", "input_suffix": "b"},
    {"input_prefix": "a", "input_suffix": ""},
    {"input_prefix": CODE, "input_suffix": CODE, "prompt": "    wid"},
    {"input_prefix": "    x = ", "input_suffix": "\n\ty = 2", "prompt": "foo(", "n_indent": 4},
    {"input_prefix": "# <|im_end|><gh_stars>", "input_suffix": "<issue_comment> ends"},
    {"input_prefix": CODE, "input_suffix": CODE, "input_extra": [{"text": "a = 1\n", "filename": "src/a.py"}]},
    {
        "input_prefix": CODE, "input_suffix": "\r\n",
        "input_extra": [{"text": "a = 1\n"}, {"text": "", "filename": "e.c"}, {"text": "日本語🙂", "filename": "ü.c"}],
    },
    {"input_prefix": LONG, "input_suffix": "x"},
    {"input_prefix": "x", "input_suffix": LONG, "prompt": "if"},
    {"input_prefix": LONG, "input_suffix": LONG},
    {"input_prefix": LONG, "input_suffix": LONG, "input_extra": [{"text": CODE, "filename": "b.py"}] * 9},
    {"input_prefix": CODE, "input_suffix": CODE, "input_extra": [{"text": LONG, "filename": "long.py"}]},
    {"input_prefix": CODE, "input_suffix": "", "input_extra": [{"text": CODE}, {"text": LONG}, {"text": "z"}]},
]  # fmt: skip
FEW = {"pre": 7, "suf": 8, "mid": 9}  # a model that has no token for files

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


def gap_of(body: dict[str, Any]) -> Infill:
    extra = tuple(msgspec.convert(one, ExtraText) for one in body.get("input_extra", ()))
    return Infill(
        prefix=body["input_prefix"], suffix=body["input_suffix"], begun=body.get("prompt", ""), extra=extra
    )  # fmt: skip


def vocabulary_of(model: Path) -> Iterator[Vocabulary]:
    quiet()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    try:
        yield Vocabulary(loaded)
    finally:
        llama_cpp.llama_model_free(loaded)


@pytest.fixture(scope="module", params=[FIM_TOKENS, FEW], ids=["all tokens", "three tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fim_model(tmp_path_factory.mktemp("fim") / "fim.gguf", request.param)


@pytest.fixture
def vocabulary(model: Path) -> Iterator[Vocabulary]:
    yield from vocabulary_of(model)


def tokens(vocabulary: Vocabulary, prompt: Any) -> list[int]:
    return vocabulary.prompt_tokens(Count(id="c", messages=[], prompt=prompt))


async def test_the_ids_are_those_of_llama_server(vocabulary: Vocabulary, model: Path, tmp_path: Path) -> None:
    cases = CASES if vocabulary.infill.sep >= 0 else [body for body in CASES if "input_extra" in body]
    asked = {
        "model": str(model), "folder": str(tmp_path), "cases": cases,
        "n_ctx": N_CTX, "n_batch": N_CTX // 2, "n_predict": ROOM // 2,
    }  # fmt: skip
    told = await told_by("llama_server_infill", asked)
    vocabulary.n_ctx = N_CTX
    for body, ids in zip(cases, told, strict=True):
        assert tokens(vocabulary, gap_of(body)) == ids, body
    assert max(map(len, told)) > N_CTX - ROOM - 8, "some were cut in all three places"


def test_marks_that_a_raw_prompt_spells_are_tokens_and_other_control_tokens_are_not(vocabulary: Vocabulary) -> None:
    pre, suf, mid = FIM_TOKENS["pre"], FIM_TOKENS["suf"], FIM_TOKENS["mid"]
    found = tokens(vocabulary, "<gh_stars>a<issue_start>b<|im_end|><issue_comment>")
    plain = vocabulary.tokenize
    assert found == [pre, *plain("a"), suf, *plain("b<|im_end|>"), mid]
    assert tokens(vocabulary, "a<|im_start|>") == plain("a<|im_start|>")
    assert tokens(vocabulary, gap_of({"input_prefix": "a", "input_suffix": "b"}))[-4:] == [
        *plain("a"),
        suf,
        *plain("b"),
        mid,
    ]


def test_a_huge_text_is_read_only_where_it_is_needed(vocabulary: Vocabulary) -> None:
    vocabulary.n_ctx = 2 * BATCH
    read = 0
    before = vocabulary.infill._tokenize

    def count(text: str) -> list[int]:
        nonlocal read
        read += len(text)
        return before(text)

    vocabulary.infill._tokenize = count
    huge = "x = 1\n" * 1_000_000
    found = tokens(vocabulary, Infill(prefix=huge, suffix=huge, extra=(ExtraText(huge), ExtraText(huge))))
    assert len(found) < vocabulary.n_ctx
    assert read < len(huge) / 20


def test_a_model_without_such_tokens_spells_no_marks_and_fills_no_gap() -> None:
    for vocabulary in vocabulary_of(default_model_path()):
        assert not vocabulary.infill.is_there
        assert tokens(vocabulary, "<gh_stars>") == vocabulary.tokenize("<gh_stars>")
        assert len(tokens(vocabulary, "<reponame>")) > 1, "of its FIM tokens the model has that one"
        with pytest.raises(ValueError, match=r"no tokens for filling in the middle; Qwen2\.5-Coder"):
            tokens(vocabulary, Infill(prefix="a", suffix="b"))
