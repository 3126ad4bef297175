"""Ranges of the real model: what a sequence has in each range's KV cache can be cut, shared, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from disco_daemon.engine.llama.hidden import FloatRows
from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.refusals import refuse_to_cut
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.wire import Load
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.types import LayerRange

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

TEXT = [int(token) for token in np.random.default_rng(7).integers(100, 40_000, 60)]
N = 30


class Chain:
    """Some ranges, one behind the other."""

    def __init__(self, models: Sequence[SegmentModel]) -> None:
        self.models = models

    def logits(self, tokens: Sequence[int], start: int, seq: int) -> FloatRows:
        """The logits behind the last of these tokens, at positions from `start`."""
        rows: list[Row] = [(token, start + i, seq, i == len(tokens) - 1) for i, token in enumerate(tokens)]
        hidden = None
        for model in self.models:
            hidden = model.run(rows, hidden)
        assert hidden is not None
        last: FloatRows = hidden[0]
        return last


def load(path: Path) -> Load:
    return Load(model_path=str(path), n_ctx=1024, n_threads=1, n_gpu_layers=0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    quiet()
    ranges = [LayerRange(0, 12, N), LayerRange(12, 20, N), LayerRange(20, N, N)]
    paths = SegmentFiles(tmp_path_factory.mktemp("segments"), 1 << 30).write(default_model_path(), ranges)
    models = [SegmentModel(load(path), layers) for path, layers in zip(paths, ranges, strict=True)]
    yield Chain(models)
    for model in models:
        model.close()


@pytest.fixture(scope="module")
def expected() -> FloatRows:
    """What the whole model gives for the text, alone in its cache."""
    quiet()
    whole = Chain([SegmentModel(load(default_model_path()), LayerRange(0, N, N))])
    logits = whole.logits(TEXT, 0, 0)
    whole.models[0].close()
    return logits


@pytest.fixture(autouse=True)
def _empty(chain: Chain) -> None:
    for model in chain.models:
        model.clear()


def test_a_text_after_others_gives_the_same(chain: Chain, expected: FloatRows) -> None:
    for seq in range(1, 6):
        chain.logits(TEXT[seq * 3 : 40 + seq], 0, seq)
    assert np.array_equal(chain.logits(TEXT, 0, 0), expected)


def test_drafts_are_cut_in_every_range(chain: Chain, expected: FloatRows) -> None:
    chain.logits(TEXT[:50], 0, 0)
    chain.logits([11, 12, 13, 14], 50, 0)  # drafts, all of them wrong
    for model in chain.models:
        model.truncate(0, 50, refuse_to_cut)
    assert np.array_equal(chain.logits(TEXT[50:], 50, 0), expected)


def test_a_second_turn_has_the_cells_of_the_first(chain: Chain, expected: FloatRows) -> None:
    chain.logits(TEXT[:45], 0, 3)
    for model in chain.models:
        model.share(3, 0, 45)
    assert np.array_equal(chain.logits(TEXT[45:], 45, 0), expected)


def test_an_idle_answer_goes_to_main_memory_and_comes_back(chain: Chain, expected: FloatRows) -> None:
    chain.logits(TEXT[:30], 0, 0)
    saved = [bytes(model.save(0)) for model in chain.models]
    for model in chain.models:
        model.clear()
    assert all(model.restore(4, data) for model, data in zip(chain.models, saved, strict=True))
    assert np.array_equal(chain.logits(TEXT[30:], 30, 4), expected)
