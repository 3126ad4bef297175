"""An exit of the real model: a training is ended and goes on, and llama.cpp computes what it made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.split.exits import ExitSetup, measure_exit, own_prompts, report
from benchmarks.split.text import SplitPrompt, choose
from disco_daemon.config import layers as config
from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.wire import Load
from disco_daemon.exits.calibrate import signals
from disco_daemon.machines.split.trained_exits import FEWEST, ExitError, KeptExit, KeptExits, train
from disco_daemon.models.default import default_model_path
from disco_daemon.types import LayerRange

pytestmark = [
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.timeout(600),  # a training beside other tests
]
CUT, N = 27, 30


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


async def training(progress: Callable[[str], None]) -> None:
    settings = config.load(flags={"device.n_threads": 1})  # beside other tests
    model, text = default_model_path(), "The harbour wall was built by fishermen who had lost a boat to a storm. " * 3
    await train(settings, model, progress, cut=CUT, head="linear", tokens=FEWEST, texts=[text], nice=0)


async def train_with_a_break(said: list[str]) -> None:
    """Train, end that when the first tokens are kept, and train again; meanwhile nobody else can."""
    started = asyncio.Event()

    def first(text: str) -> None:
        if text.startswith("collecting"):
            started.set()

    task = asyncio.create_task(training(first))
    await started.wait()
    with pytest.raises(ExitError, match="is being trained already"):  # its rows would be lost, or those of the first
        await training(said.append)
    said.clear()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await training(said.append)


def test_a_training_that_was_ended_goes_on_and_its_exit_is_in_the_segment() -> None:
    said: list[str] = []
    asyncio.run(train_with_a_break(said))
    assert not any(line.startswith("collecting to train") for line in said)  # those were kept
    exits = KeptExits(default_model_path())
    [kept] = exits.all()
    figures = kept.figures
    assert (figures.cut, figures.head) == (CUT, "linear")
    assert figures.train_tokens >= FEWEST + 40  # with those of the user's text
    assert 0.3 < figures.agreement < 1
    assert figures.tokens_per_round_trip > 1
    assert 0 < figures.rouge_l_alone <= 1
    assert figures.rouge_l_confident is not None
    assert 0 < figures.rouge_l_confident <= 1
    assert figures.perplexity > 1
    assert [path.name for path in exits.folder.iterdir() if path.is_dir()] == []  # the rows are gone
    quiet()
    load = Load(model_path=str(exits.segment(kept, N)), n_ctx=256, n_threads=1, n_gpu_layers=0)
    model = SegmentModel(load, LayerRange(0, CUT, N))
    try:
        _, logits = model.run_with_exit([(100 + i, i, 0, True) for i in range(20)])
    finally:
        model.close()
    confidence = kept.calibration().confidence(signals(logits))
    assert np.all((confidence > 0) & (confidence < 1))
    check_the_benchmark(exits, kept)


def check_the_benchmark(exits: KeptExits, kept: KeptExit) -> None:
    assert [prompt.data for prompt in choose(own_prompts(), 1)] == ["questions", "texts"]
    asked = [SplitPrompt("questions", "What is a tide?"), SplitPrompt("texts", "Go on: The harbour wall was old, and")]
    few = ExitSetup(asked, lossy=1, tokens=8, n_threads=1)
    found = measure_exit(default_model_path(), exits, kept, few)
    assert [(row["data"], row["answers"]) for row in found["kinds"]] == [("questions", 1), ("texts", 1)]
    for row in found["kinds"]:
        assert 0 <= row["agreement"] <= 1
        assert 0 <= row["ece"] < 1
    alone = [row for row in found["lossy"] if row["theta"] == 0]
    assert [row["left"] for row in alone] == [1.0, 1.0]  # the exit decides all tokens
    assert {(change["from"], change["to"]) for change in found["changes"]} == {
        ("questions", "texts"), ("texts", "questions"),
    }  # fmt: skip
    assert f"behind {CUT} layers, linear" in report({"exits": [found]})


def test_a_model_whose_answers_are_too_few_says_so() -> None:
    async def with_none() -> None:
        await train(config.load(), default_model_path(), lambda _: None, cut=CUT, head="mlp", tokens=0, nice=0)

    with pytest.raises(ExitError, match="too little text to train"):
        asyncio.run(with_none())
