"""What llama.cpp cannot make of a model leaves nothing behind: whoever loads it again has all of the memory."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.llama.embedder import EmbeddingContext
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.mtp import MTP_CONTEXT, OwnLayer
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.llama.sequences import Sequences
from disco_daemon.engine.llama.text_model import load_either
from disco_daemon.engine.supervisor import Engine
from disco_daemon.system import supervised
from disco_daemon.types import LayerRange
from tests.e2e.engine.test_speculate import Hurried
from tests.e2e.engine.test_tiny_models import TEXT
from tests.fixtures.tiny_bert import MEAN, tiny_bert
from tests.fixtures.tiny_models import tiny_model


class Made:
    """The models and contexts that llama.cpp has made; each is freed once, and a model behind its contexts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: Callable[[Any], bool] = lambda params: False
        self.n_contexts = 0
        self.models, self.contexts = set[int](), dict[int, int]()
        load, free_model = llama_cpp.llama_model_load_from_file, llama_cpp.llama_model_free
        make, free = llama_cpp.llama_init_from_model, llama_cpp.llama_free

        def loaded(*given: Any) -> Any:
            self.models.add(model := load(*given))
            return model

        def freed_model(model: int) -> None:
            assert model not in self.contexts.values(), "a context of it is left"
            self.models.remove(model)
            free_model(model)

        def made(model: int, params: Any) -> Any:
            if self.refuses(params):
                return None
            self.contexts[context := make(model, params)] = model
            self.n_contexts += 1
            return context

        def freed(context: int | None) -> None:
            if context is not None:
                del self.contexts[context]
                free(context)

        for name, function in {
            "llama_model_load_from_file": loaded,
            "llama_model_free": freed_model,
            "llama_init_from_model": made,
            "llama_free": freed,
        }.items():
            monkeypatch.setattr(llama_cpp, name, function)

    def assert_all_freed(self) -> None:
        assert self.n_contexts
        assert (self.models, self.contexts) == (set(), {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def load_of(path: Path, **more: Any) -> wire.Load:
    return wire.Load(model_path=str(path), n_ctx=256, n_threads=1, n_gpu_layers=0, n_cells=512, **more)


def is_layer(params: Any) -> bool:
    return bool(params.ctx_type == MTP_CONTEXT)


def fail(*_: Any, **__: Any) -> Any:
    raise ModelError("it cannot")


@pytest.mark.parametrize("what", ["its context", "a token"])
def test_a_layer_that_cannot_be_used_guesses_nothing_and_the_model_answers(
    what: str, made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "m.gguf", "nextn", depth=0.0)
    plain = Llama(load_of(path, speculate=False), AbortFlag())
    expected = Hurried(plain, None).told(TEXT, max_tokens=24)
    plain.close()
    if what == "its context":
        made.refuses = is_layer
    else:
        monkeypatch.setattr(OwnLayer, "_decode", lambda *_: -3)
    found = Llama(load_of(path), AbortFlag())
    assert found.own_layer is None
    assert found.layer_failure.startswith("llama.cpp cannot ")
    assert len(made.contexts) == 1, "the layer's is not left"
    assert Hurried(found, None).told(TEXT, max_tokens=24) == expected
    found.close()
    made.assert_all_freed()


def whole(folder: Path) -> Llama:
    return Llama(load_of(tiny_model(folder / "m.gguf", "nextn")), AbortFlag())


def texts(folder: Path) -> object:
    return load_either(load_of(tiny_bert(folder / "m.gguf", MEAN).path), AbortFlag(), warm=False)


def segment(folder: Path) -> SegmentModel:
    return SegmentModel(load_of(tiny_model(folder / "m.gguf", "moe")), LayerRange(0, 2, 2))


@pytest.mark.parametrize(
    ("make", "of", "name"),
    [
        (whole, OwnLayer, "_warm_up"),
        (whole, Llama, "warm_up"),
        (whole, Sequences, "_attach"),
        (texts, EmbeddingContext, "decode"),
        (segment, Sequences, "_attach"),
    ],
)
def test_a_load_that_fails_behind_a_context_leaves_none(
    make: Callable[[Path], object],
    of: type,
    name: str,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before = getattr(of, name)

    def attached(*given: Any) -> None:
        before(*given)
        fail()

    monkeypatch.setattr(of, name, attached if name == "_attach" else fail)
    with pytest.raises(ModelError, match="it cannot"):
        make(tmp_path)
    made.assert_all_freed()


@pytest.mark.parametrize("fails", [lambda params: True, lambda params: not is_layer(params)])
def test_a_model_whose_new_context_cannot_be_made_is_closed_once(
    fails: Callable[[Any], bool], made: Made, tmp_path: Path
) -> None:
    found = whole(tmp_path)
    load = load_of(tmp_path / "m.gguf")
    found.renew(load)
    assert len(made.contexts) == 2
    made.refuses = is_layer
    found.renew(load)
    assert len(made.contexts) == 1
    assert found.own_layer is None
    made.refuses = fails
    with pytest.raises(ModelError, match="cannot make a context"):
        found.renew(load)
    found.close()
    made.assert_all_freed()


# The worker, where there is no memory for the layer's context.
WITHOUT_MEMORY = """
from disco_daemon.engine import worker
from disco_daemon.engine.llama.mtp import OwnLayer
def without(self, *_):
    raise MemoryError("there is none")
OwnLayer.__init__ = without
worker.main()
"""


async def test_a_daemon_goes_on_without_the_layer_and_its_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def without_memory(_: str, fd: str, **options: Any) -> Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", WITHOUT_MEMORY, fd, **options)

    monkeypatch.setattr(supervised, "spawn", without_memory)
    engine = Engine(load_of(tiny_model(tmp_path / "m.gguf", "nextn")), SystemClock())
    engine.start()
    try:
        assert not (await engine.ready(60)).own_layer
    finally:
        await engine.close()
    assert "goes on without guesses of the model's own layer: there is none: lower device.n_ctx" in caplog.text
