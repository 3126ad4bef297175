"""An exit in a segment of the real model: llama.cpp computes it, and what the range hands on stays the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from disco_daemon.engine.llama.hidden import FloatRows
from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.llama.teacher import LowerRange, Teacher, UpperRange
from disco_daemon.engine.llama.weights import read_output, read_weights
from disco_daemon.engine.measure.exit_training import attention_of
from disco_daemon.engine.wire import ExitCalibration, Load
from disco_daemon.errors import ConfigError
from disco_daemon.exits.head import ExitHead, FfnBlock
from disco_daemon.exits.packing import tensors_of
from disco_daemon.machines.split.trained_exits import read_calibration
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles, read_head
from disco_daemon.models.segments import ExitTensor
from disco_daemon.types import LayerRange

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

N, CUT, EPS = 30, 20, 1e-5
TEXT: list[Row] = [
    (int(token), i, 0, i % 3 == 0) for i, token in enumerate(np.random.default_rng(7).integers(100, 40_000, 60))
]
FIRST = LayerRange(0, CUT, N)


def run(path: Path, *, with_exit: bool) -> tuple[FloatRows, FloatRows | None]:
    quiet()
    model = SegmentModel(Load(model_path=str(path), n_ctx=256, n_threads=1, n_gpu_layers=0), FIRST)
    try:
        return model.run_with_exit(TEXT) if with_exit else (model.run(TEXT), None)
    finally:
        model.close()


def head(*, block: bool) -> tuple[ExitHead, FloatRows]:
    """A head with weights of the real model, and a map near to nothing but itself."""
    model = default_model_path()
    _, header = read_head(model)
    output = read_output(model, header)
    d = output.shape[1]
    names = [f"blk.{CUT}.ffn_{name}.weight" for name in ("norm", "gate", "up", "down")]
    ffn = FfnBlock(*(read_weights(model, header, name) for name in names)) if block else None
    random = np.random.default_rng(1)
    mapped = np.eye(d, dtype=np.float32) + 0.02 * random.normal(size=(d, d)).astype(np.float32)
    return ExitHead(read_weights(model, header, "output_norm.weight"), mapped, EPS, ffn), output


@pytest.mark.parametrize("block", [False, True])
def test_llama_cpp_computes_the_logits_of_an_exit_and_hands_on_the_very_rows(block: bool, tmp_path: Path) -> None:
    found, output = head(block=block)
    files = SegmentFiles(tmp_path, 1 << 30)
    [plain] = files.write(default_model_path(), [FIRST])
    tensors = {name: ExitTensor(t.shape, t.packing, t.data) for name, t in tensors_of(found, output).items()}
    path = files.write_exit(default_model_path(), FIRST, tensors)
    assert files.write_exit(default_model_path(), FIRST, tensors) == path != plain
    wanted, _ = run(plain, with_exit=False)
    rows, logits = run(path, with_exit=True)
    assert np.array_equal(rows, wanted)
    assert logits is not None
    ours = found.logits(wanted[::3], output)
    assert logits.shape == ours.shape
    gap = np.sqrt(np.mean(np.square(logits - ours)) / np.mean(np.square(ours - ours.mean(1, keepdims=True))))
    assert gap < 0.03  # of 8 bits a number, for weights and for what they are multiplied with


def test_an_exit_has_the_attention_of_the_layer_behind_the_cut(tmp_path: Path) -> None:
    found, output = head(block=True)
    files, last = SegmentFiles(tmp_path, 1 << 30), LayerRange(CUT, N, N)
    _, header = read_head(default_model_path())
    tensors = tensors_of(found, output) | attention_of(default_model_path(), header, CUT)
    given = {name: ExitTensor(t.shape, t.packing, t.data) for name, t in tensors.items()}
    rows, logits = run(files.write_exit(default_model_path(), FIRST, given), with_exit=True)
    assert logits is not None
    paths = files.write(default_model_path(), [FIRST, last])
    loads = [Load(model_path=str(path), n_ctx=256, n_threads=1, n_gpu_layers=0) for path in paths]
    teacher = Teacher(LowerRange(loads[0], FIRST), UpperRange(loads[1], last, attended=True))
    try:
        attended, _, _ = teacher.run(TEXT)
    finally:
        teacher.close()
    assert attended.shape == rows[::3].shape
    assert not np.allclose(attended, rows[::3], rtol=0.01)
    ours = found.logits(attended, output)
    gap = np.sqrt(np.mean(np.square(logits - ours)) / np.mean(np.square(ours - ours.mean(1, keepdims=True))))
    assert gap < 0.03


def test_an_exit_of_another_model_is_refused(tmp_path: Path) -> None:
    wrong = {name: ExitTensor((64, 100), 0, bytes(25_600)) for name in ("output.weight", "output_norm.weight")}
    with pytest.raises(ConfigError, match="another vocabulary"):
        SegmentFiles(tmp_path, 1 << 30).write_exit(default_model_path(), FIRST, wrong)


def test_a_segment_says_how_sure_its_exit_may_be(tmp_path: Path) -> None:
    found, output = head(block=False)
    tensors = {name: ExitTensor(t.shape, t.packing, t.data) for name, t in tensors_of(found, output).items()}
    files, told = SegmentFiles(tmp_path, 1 << 30), ExitCalibration(
        coefficients=(1.0, 0.5, -0.25, 0.125), scores=(-1.0, 1.0), shares=(0.25, 0.75)
    )  # fmt: skip
    path = files.write_exit(default_model_path(), FIRST, tensors, msgspec.json.encode(told).decode())
    assert read_calibration(path) == told
    assert files.write_exit(default_model_path(), FIRST, tensors) != path, "another calibration is another file"
    [plain] = files.write(default_model_path(), [FIRST])
    assert read_calibration(plain) is None
