"""`python -m disco_daemon.engine.measure.exit_training`: train an exit of a model, in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...exits.calibrate import LEAST, Calibration, Doubles, calibrate, calibration_error, coverage, signals
from ...exits.fit import RidgeSums, best_map
from ...exits.head import ExitHead, FfnBlock, Floats
from ...exits.packing import PackedTensor, tensors_of
from ...exits.prompts import PromptPart
from ...exits.quality import tokens_per_round_trip
from ...exits.training import train
from ...models.gguf import Header, with_shards
from ...models.gguf_file import read_file_header
from ...system.confine import Access, Confinement, confine
from ...system.job import JobSocket
from ...types import LayerRange
from ..llama import gpu
from ..llama.model import quiet
from ..llama.refusals import ModelError
from ..llama.teacher import LowerRange, Teacher, UpperRange
from ..llama.template import TemplateError
from ..llama.weights import find_weights, read_output, read_packed, read_weights
from ..wire import Load
from .exit_alone import write_alone
from .exit_messages import ExitFigures, ExitJob, ExitTrained
from .exit_rows import CELLS, ExitRows, RowCollector

SHARE = 12  # of the tokens to train on, one part each to calibrate and to judge
AT_ONCE = 512  # rows whose logits are in memory at a time
THETAS = (0.8, 0.9, 0.95)
# Whose layers are a norm, SwiGLU and a sum: only then does the tail of a segment compute a trained block.
WITH_BLOCK = frozenset({"llama", "mistral3", "qwen2", "qwen3"})
FFN = ("norm", "gate", "up", "down")


class Trainer:
    """One training: collects, fits, calibrates and judges."""

    def __init__(self, job: ExitJob, say: Callable[[str], None]) -> None:
        """Load the model; `say` what is computed. Raises ModelError, TemplateError."""
        self._job, self._say = job, say
        self._whole = Path(job.whole)
        self._cut = job.ranges[0].last
        with self._whole.open("rb") as file:
            _, self._header = read_file_header(file)
        self._say(f"loading {self._whole.name}")
        lower, upper = ((_load(job, r.path), LayerRange(r.first, r.last, job.n_layers)) for r in job.ranges)
        self._teacher = Teacher(LowerRange(*lower), UpperRange(*upper, attended=self._attends()))
        self._output = read_output(self._whole, self._header)
        self._rows = RowCollector(self._teacher, Path(job.folder), job.patterns, say)

    def run(self) -> ExitTrained:
        """Carry out the job. Raises ModelError, and ValueError if there is too little text."""
        job, d = self._job, len(self._output[0])
        n_other = max(2 * LEAST, job.tokens // SHARE)
        self._rows.collect(PromptPart.TRAIN, job.tokens, job.texts)
        rows = self._rows.load(PromptPart.TRAIN)
        _require(rows, d, "to train an exit")
        self._rows.collect(PromptPart.CALIBRATE, n_other, ())
        self._rows.collect(PromptPart.JUDGE, n_other, ())
        began = time.monotonic()
        kept, judged = self._rows.load(PromptPart.CALIBRATE), self._rows.load(PromptPart.JUDGE)
        _require(kept, LEAST, "to calibrate it")
        _require(judged, LEAST, "to judge it")
        name, head = self._best(rows, kept)
        calibration = calibrate(*self._verdicts(head, kept))
        found, agrees = self._verdicts(head, judged)
        confidence = calibration.confidence(found)
        self._say("letting the exit write alone")
        alone = write_alone(
            self._teacher, self._rows, head, calibration, self._output, job.patterns, len(judged.labels)
        )
        self._say(f"done in {time.process_time():.0f} s of processor time since the latest start")
        file = f"{self._cut}-{name}.npz"
        self._save(Path(job.folder) / file, head, calibration)
        figures = ExitFigures(
            self._whole.name, self._cut, name, len(rows.labels), self._rows.seconds() + time.monotonic() - began,
            float(agrees.mean()), alone.perplexity, calibration_error(confidence, agrees),
            {str(theta): coverage(confidence, theta) for theta in THETAS},
            tokens_per_round_trip(agrees, confidence, judged.answers), alone.rouge_l, alone.rouge_l_confident,
        )  # fmt: skip
        return ExitTrained(figures, file)

    def _best(self, rows: ExitRows, kept: ExitRows) -> tuple[str, ExitHead]:
        """Return the head that was asked for, or the one that agrees most on tokens kept apart. Raises ModelError."""
        wanted, block = self._job.head, self._block()
        if wanted == "mlp" and block is None:
            msg = (
                f"a block of an exit cannot be trained for the architecture {self._header.architecture or 'unknown'}: "
                "take --head linear"
            )
            raise ModelError(msg)
        found = []
        if wanted != "mlp":
            linear = self._start(rows, kept, None)
            if wanted == "linear" or block is None:
                linear = self._trained(linear, rows, "a linear map")
            found.append(("linear", linear))
        if wanted != "linear" and block is not None:
            found.append(("mlp", self._trained(self._start(rows, kept, block), rows, "a block")))
        return max(found, key=lambda one: float(self._verdicts(one[1], kept)[1].mean()))

    def _attends(self) -> bool:
        """Say whether the exit has the attention of the layer behind the cut, whose weights then are in the tail."""
        return self._header.architecture in WITH_BLOCK

    def _block(self) -> FfnBlock | None:
        """Return the FFN of the layer behind the cut, from which a trained block starts; None if there can be none."""
        names = [f"blk.{self._cut}.ffn_{name}.weight" for name in FFN]
        has_all = all(find_weights(self._header, name) is not None for name in names)
        if self._header.architecture not in WITH_BLOCK or not has_all:
            return None
        return FfnBlock(*(read_weights(self._whole, self._header, name) for name in names))

    def _start(self, rows: ExitRows, kept: ExitRows, block: FfnBlock | None) -> ExitHead:
        """Return a head whose map is the one in closed form."""
        self._say("fitting a map in closed form")
        d = len(self._output[0])
        plain = ExitHead(np.ones(d, np.float32), np.eye(d, dtype=np.float32), _eps(self._header), block)
        sample = plain.features(rows.rows[:: max(1, len(rows.rows) // 4096)])
        # Numbers of about one size lose least when they are packed.
        scale = (1 / np.maximum(sample.std(0), 1e-3)).astype(np.float32)
        head = ExitHead(scale, plain.map, plain.eps, block)
        sums = RidgeSums.empty(d)
        for at in range(0, len(rows.rows), AT_ONCE):
            sums.add(head.features(rows.rows[at : at + AT_ONCE]), rows.finals[at : at + AT_ONCE])
        some = slice(0, 2 * AT_ONCE)
        found, _ = best_map(sums, head.features(kept.rows[some]), kept.labels[some], self._output)
        return ExitHead(scale, found, plain.eps, block)

    def _trained(self, head: ExitHead, rows: ExitRows, what: str) -> ExitHead:
        def report(epoch: int, of: int, loss: float) -> None:
            self._say(f"training {what}: {epoch} of {of} times through the text, loss {loss:.3f}")

        return train(head, rows.rows, rows.finals, rows.labels, self._output, report)

    def _verdicts(self, head: ExitHead, kept: ExitRows) -> tuple[Doubles, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Return the signals of an exit on kept rows, n x 3, and whether each of its tokens is the whole model's."""
        found, agrees = [], []
        for at in range(0, len(kept.rows), AT_ONCE):
            logits = head.logits(kept.rows[at : at + AT_ONCE], self._output)
            found.append(signals(logits))
            agrees.append(logits.argmax(1) == kept.labels[at : at + AT_ONCE])
        return np.concatenate(found), np.concatenate(agrees)

    def _save(self, path: Path, head: ExitHead, calibration: Calibration) -> None:
        arrays: dict[str, Floats | Doubles | np.ndarray[tuple[int], np.dtype[np.uint8]]] = {
            "coefficients": calibration.coefficients, "scores": calibration.scores, "shares": calibration.shares,
        }  # fmt: skip
        tensors = tensors_of(head, self._output) | (
            attention_of(self._whole, self._header, self._cut) if self._attends() else {}
        )
        for name, tensor in tensors.items():
            # The first number is the packing, then comes the shape.
            arrays[f"shape {name}"] = np.array([tensor.packing, *tensor.shape], np.float64)
            arrays[f"data {name}"] = np.frombuffer(tensor.data, np.uint8)
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for its own options

    def close(self) -> None:
        """Free the model."""
        self._teacher.close()


def attention_of(model: Path, header: Header, layer: int) -> dict[str, PackedTensor]:
    """Return the weights of a layer but for its FFN, by their names without `blk.N.`, as they are in the model's file.

    Raises ModelError if they are not there.
    """
    own = f"blk.{layer}."
    return {
        tensor.name.removeprefix(own): PackedTensor(tensor.shape, tensor.packing, read_packed(model, header, tensor))
        for tensor in header.tensors
        if tensor.name.startswith(own) and not tensor.name.startswith(f"{own}ffn_")
    }


def _require(rows: ExitRows, least: int, what: str) -> None:
    """Raise ValueError if the model said too little."""
    if len(rows.labels) < least:
        msg = f"{len(rows.labels)} tokens of the model's answers are too little text {what}: it takes {least}"
        raise ValueError(msg)


def _eps(header: Header) -> float:
    found = header.keys.get(f"{header.architecture}.attention.layer_norm_rms_epsilon")
    return float(found) if isinstance(found, float) else 1e-5


def _load(job: ExitJob, path: str) -> Load:
    return Load(
        model_path=path, n_ctx=CELLS, n_threads=job.n_threads, n_threads_batch=job.n_threads, kv_type=job.kv_type,
        flash_attn=job.flash_attn, repack=job.repack, exact=True, n_gpu_layers=0,
    )  # fmt: skip


def _confined(job: ExitJob) -> Confinement:
    paths = [Path(job.whole), *(Path(part.path) for part in job.ranges)]
    return confine(Access(read=with_shards(paths), write=[Path(job.folder)]), gpu.free_bytes)


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, _ = home.job(ExitJob, _confined)
    os.nice(job.nice)
    os.umask(0o077)
    quiet()
    with home.refusing(ModelError, TemplateError, ValueError):
        try:
            trainer = Trainer(job, home.progress)
            home.done(trainer.run())
            trainer.close()
        except OSError as e:
            raise ValueError(f"the rows cannot be kept in {job.folder}: {e.strerror or e}") from e


if __name__ == "__main__":
    main()
