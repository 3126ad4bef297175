"""`python -m disco_daemon.engine.measure.split_check`: compare a chain of ranges with the whole model, to the bit.

A process of its own, since a file that llama.cpp does not like can end it. One model is in memory at a time: all of
them compute the same script of batches, and what the one before has given is kept meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...models.gguf import with_shards
from ...system.confine import Access, Confinement, confine
from ...system.job import JobSocket
from ...types import LayerRange
from ..llama import gpu
from ..llama.hidden import FloatRows
from ..llama.memory import N_BATCH
from ..llama.model import build, quiet
from ..llama.refusals import ModelError, refuse_to_cut
from ..llama.rows import Row
from ..llama.segment import SegmentModel
from ..wire import Load
from .split_messages import SplitCompared, SplitJob

N_SHORT = 15  # shorter sequences beside it
N_STEPS = 48  # batches of one to sixteen rows behind the prompts
KEPT_BYTES = 256 << 20  # of logits; a large vocabulary gets fewer steps
SHORT_CELLS = 256 * N_SHORT  # of the KV cache for these, and for what the steps add to all
SEED = 20


@dataclass(frozen=True, slots=True)
class CheckBatch:
    """One batch; before it `forget` frees the cells of (sequence, position) and behind."""

    rows: tuple[Row, ...]
    forget: tuple[tuple[int, int], ...] = ()


def script(n_vocab: int, longest: int) -> list[CheckBatch]:
    """Return the batches that are computed: prompts in uneven chunks, then single rows, runs of drafts, and cuts.

    The tokens are drawn at random: what is compared is arithmetic, and no text is needed for it.
    """
    random = np.random.default_rng(SEED)
    n_steps = min(N_STEPS, KEPT_BYTES // (4 * n_vocab * 17))
    lengths = [longest, *(min(longest, 24 + 16 * i) for i in range(N_SHORT))]
    steps = [step for seq, n in enumerate(lengths) for step in _prompt(random, n_vocab, seq, n)]
    for number in range(n_steps):
        n_rows = 1 + number % 16
        if number % 3 == 0:  # one row of each of several answers
            chosen = [int(seq) for seq in random.permutation(len(lengths))[:n_rows]]
            steps.append(CheckBatch(tuple((_token(random, n_vocab), lengths[seq], seq, True) for seq in chosen)))
            for seq in chosen:
                lengths[seq] += 1
            continue
        seq = int(random.integers(len(lengths)))  # a run of drafts of one answer, of which some turn out wrong
        rows = tuple((_token(random, n_vocab), lengths[seq] + i, seq, True) for i in range(n_rows))
        n_right = int(random.integers(1, n_rows + 1))
        steps.append(CheckBatch(rows))
        lengths[seq] += n_right
        steps.append(CheckBatch(((_token(random, n_vocab), lengths[seq], seq, True),), ((seq, lengths[seq]),)))
        lengths[seq] += 1
    return steps


def _prompt(random: np.random.Generator, n_vocab: int, seq: int, n: int) -> Iterator[CheckBatch]:
    """Yield a prompt in chunks of uneven lengths; the last row of each wants its logits."""
    at = 0
    while at < n:
        size = min(n - at, int(random.integers(1, N_BATCH + 1)))
        yield CheckBatch(tuple((_token(random, n_vocab), at + i, seq, i == size - 1) for i in range(size)))
        at += size


def _token(random: np.random.Generator, n_vocab: int) -> int:
    return int(random.integers(n_vocab))


def play(model: SegmentModel, steps: Sequence[CheckBatch], given: Sequence[FloatRows | None]) -> list[FloatRows]:
    """Compute all steps with a model that is given the rows of each; return what it gives. Raises ModelError."""
    found = []
    for step, hidden in zip(steps, given, strict=True):
        for seq, position in step.forget:
            model.truncate(seq, position, refuse_to_cut)
        found.append(model.run(step.rows, hidden))
    return found


def compare(job: SplitJob, say: Callable[[str], None]) -> SplitCompared:
    """Compute the script with the whole model and with the chain, and `say` so. Raises ModelError, ValueError."""
    whole = LayerRange(0, job.n_layers, job.n_layers)
    say("the whole model")
    began = time.perf_counter()
    steps, wanted = _whole(job, whole)
    whole_s = time.perf_counter() - began
    given: list[FloatRows | None] = [None] * len(steps)
    for part in job.ranges:
        layers = LayerRange(part.first, part.last, job.n_layers)
        say(f"layers {layers} of {job.n_layers}")
        model = SegmentModel(_load(job, part.path), layers)
        try:
            given = list(play(model, steps, given))
        finally:
            model.close()
    chain_s = time.perf_counter() - began - whole_s
    found = [rows for rows in given if rows is not None]
    n_rows = sum(len(rows) for rows in wanted)
    same = sum(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in zip(wanted, found, strict=True))
    # What is no number differs from all numbers, and from itself: it counts as the worst that there is.
    gaps = (np.nan_to_num(np.abs(a - b), nan=np.inf) for a, b in zip(wanted, found, strict=True))
    worst = max(float(gap.max(initial=0.0)) for gap in gaps)
    n_tokens = sum(len(step.rows) for step in steps)
    return SplitCompared(worst, same / n_rows, n_rows, n_tokens, job.longest, whole_s, chain_s, build())


def _whole(job: SplitJob, layers: LayerRange) -> tuple[list[CheckBatch], list[FloatRows]]:
    model = SegmentModel(_load(job, job.whole), layers)
    try:
        steps = script(model.n_vocab, job.longest)
        return steps, play(model, steps, [None] * len(steps))
    finally:
        model.close()


def _load(job: SplitJob, path: str) -> Load:
    return Load(
        model_path=path,
        n_ctx=2 * job.longest + SHORT_CELLS,
        n_threads=job.n_threads,
        n_threads_batch=job.n_threads_batch,
        kv_type=job.kv_type,
        flash_attn=job.flash_attn,
        repack=job.repack,
        exact=True,
        n_gpu_layers=0,
    )


def _confined(job: SplitJob) -> Confinement:
    return confine(
        Access(read=with_shards([Path(job.whole), *(Path(part.path) for part in job.ranges)])), gpu.free_bytes
    )


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, _ = home.job(SplitJob, _confined)
    quiet()
    with home.refusing(ModelError, ValueError):
        home.done(compare(job, home.progress))


if __name__ == "__main__":
    main()
