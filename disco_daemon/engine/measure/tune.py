"""`python -m disco_daemon.engine.measure.tune`: measures a model on this machine, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from ...models.gguf import with_shards
from ...system.confine import Access, Confinement, confine
from ...system.job import JobSocket
from ..llama import gpu
from ..llama.memory import N_BATCH
from ..llama.model import AbortFlag, load_model
from ..llama.refusals import ModelError
from ..llama.rows import Row
from ..llama.template import TemplateError
from ..wire import Generate, Load
from .search import N_SAMPLES, Search
from .tune_messages import Knobs, Speed, Tuned, TuneJob

N_ANSWERS = 8  # written at a time, beside one alone: the engine does both
N_PROMPT = 64  # tokens that an answer has in front of it while it is measured
N_CTX = 1024  # tokens: a long prompt, or eight answers
SHARE = 1 / 60  # of the budget for one sample
LONG_SHARE = 0.3  # of the budget for the micro-batches
LEAST_S = 0.03  # of a sample: shorter ones drown in what else the machine does
SWITCH_S = 1e-4  # the busy thread gives way to us so soon, and is as busy as another process all the same
TEXT = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a thick grey book. In winter few "
    "came. He mended nets, read the same three novels, and listened to the wind in the chimney. One night a "
    "light answered his from the sea: two short flashes, a pause, and two again. He had never seen that. To make "
    "bread, mix 500 g of flour with 10 g of salt, 7 g of yeast and 320 ml of warm water; knead for ten minutes, let it "
    "rise for an hour, shape it, bake it at 230 degrees until the crust is dark. def mean(values): return "
    "sum(values) / len(values) if values else 0.0 # an empty list has no mean, and zero is what callers expect here. "
)


class TuneBench:
    """Does the works of `Search` on one model, and keeps their times."""

    def __init__(self, job: TuneJob) -> None:
        """Load the model. Raises ModelError."""
        self._job = job
        self._load = Load(
            model_path=job.model_path,
            n_ctx=N_CTX,
            n_threads=job.start.n_threads,
            n_gpu_layers=job.n_gpu_layers,
            n_cpu_moe=job.n_cpu_moe,
            n_cells=N_CTX,
            exact=job.exact,
            kv_type=job.kv_type,
            speculate=False,
        )
        self.llama = load_model(_with(self._load, job.start), AbortFlag())
        self._now = job.start
        n = self.llama.n_ctx // 2
        self._tokens = (self.llama.vocabulary.tokenize(TEXT) * n)[:n]
        self.seen: dict[tuple[Knobs, str], list[float]] = defaultdict(list)
        prefill_s = N_BATCH / self.llama.prefill_tps
        budget_s = job.budget_s or 30.0
        self._enough_s = SHARE * budget_s
        self.n_prefill = next((n for n in (512, 256, 128, 64) if n * prefill_s / N_BATCH <= self._enough_s), 32)
        self.n_prefill = min(self.n_prefill, len(self._tokens))
        self.n_decode = 1
        self.n_decode = max(1, min(32, int(LEAST_S / self._decode_s(1))))
        # Three micro-batches, three times each.
        self.long = 9 * prefill_s <= LONG_SHARE * budget_s and len(self._tokens) == N_BATCH

    def measure(self, knobs: Knobs, work: str, busy: bool) -> float:
        """Measure a work, as `search.Measure`."""
        self._use(knobs)
        with _busy() if busy else contextlib.nullcontext():
            if work == "decode":
                one, eight = self._decode_s(1), self._decode_s(N_ANSWERS)
                if not busy:
                    self.seen[knobs, "one"].append(one)
                    self.seen[knobs, "eight"].append(eight)
                return sqrt(one * eight)
            n = self.n_prefill if work == "prefill" else N_BATCH
            took = self._prefill_s(n)
        if not busy and work == "prefill":
            self.seen[knobs, "prefill"].append(took / n)
        return took

    def speed(self, knobs: Knobs) -> Speed:
        """Return medians of the measurements; missing ones are made now."""
        for work, kind in (("decode", "one"), ("prefill", "prefill")):
            while len(self.seen[knobs, kind]) < N_SAMPLES:
                self.measure(knobs, work, False)
        one, eight, prefill = (median(self.seen[knobs, kind]) for kind in ("one", "eight", "prefill"))
        return Speed(1 / prefill, 1 / one, N_ANSWERS / eight)

    def next_tokens(self) -> list[int]:
        """Return the model's next token after each beginning of a text, greedily."""
        self.llama.clear()
        tokens = self.llama.vocabulary.tokenize(TEXT)[: self.llama.n_ctx // 2]
        self._decode([(token, i, 0, True) for i, token in enumerate(tokens)])
        sampler = self.llama.sampler(Generate(id="tune", messages=[], temperature=0.0))
        found = [self.llama.sample(sampler, i) for i in range(len(tokens))]
        sampler.close()
        return found

    def _use(self, knobs: Knobs) -> None:
        if knobs.repack != self._now.repack:
            self.llama.close()  # there may not be memory for two
            self.llama = load_model(_with(self._load, knobs), AbortFlag())
            self._prefill_s(32)
            self._now = knobs
        if (knobs.n_ubatch, knobs.flash_attn) != (self._now.n_ubatch, self._now.flash_attn):
            self.llama.renew(_with(self._load, knobs, self.llama.n_gpu_layers))
            self._prefill_s(32)  # the first batch of a context is slow
        self.llama.n_threads, self.llama.n_threads_batch = knobs.n_threads, knobs.n_threads_batch
        self._now = knobs

    def _prefill_s(self, n: int) -> float:
        self.llama.clear()
        return self._decode([(token, i, 0, i == n - 1) for i, token in enumerate(self._tokens[:n])])

    def _decode_s(self, n: int) -> float:
        """Time one token each of `n` answers, s."""
        self.llama.clear()
        self._decode([(token, i, 0, False) for i, token in enumerate(self._tokens[:N_PROMPT])])
        for seq in range(1, n):
            self.llama.share(0, seq, N_PROMPT)
        took: list[float] = []
        while len(took) < 1 + self.n_decode and sum(took) < self._enough_s:
            i = len(took)
            took.append(self._decode([(self._tokens[i + seq], N_PROMPT + i, seq, True) for seq in range(n)]))
        return median(took[1:] or took)  # the first one wakes the threads

    def _decode(self, rows: list[Row]) -> float:
        started = time.perf_counter()
        if self.llama.decode(rows) != 0:
            raise ModelError("llama.cpp failed in the measurement")
        return time.perf_counter() - started


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keep a core busy as another process would: by a thread of ours, which ends with us whatever happens."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def _with(load: Load, knobs: Knobs, n_gpu_layers: int | None = None) -> Load:
    return replace(
        load, n_threads=knobs.n_threads, n_threads_batch=knobs.n_threads_batch, n_ubatch=knobs.n_ubatch,
        flash_attn=knobs.flash_attn, repack=knobs.repack,
        n_gpu_layers=load.n_gpu_layers if n_gpu_layers is None else n_gpu_layers,
    )  # fmt: skip


def tune(job: TuneJob, say: Callable[[str], None]) -> Tuned:
    """Carry out a job; `say` what is measured. Raises ModelError."""
    started = time.perf_counter()
    say(f"loading {os.path.basename(job.model_path)}")  # noqa: PTH119
    bench = TuneBench(job)
    loaded = time.perf_counter()  # the budget is for what is measured, or a slow disk would leave nothing of it
    last = [""]

    def measure(knobs: Knobs, work: str, busy: bool) -> float:
        seconds = bench.measure(knobs, work, busy)
        if (text := _line(knobs, work, busy)) != last[0]:
            last[0] = text
            say(text)
        return seconds

    search = Search(measure, lambda: time.perf_counter() - loaded > job.budget_s)
    # Exactness needs flash attention, and so do keys and values of one byte.
    flash = not job.exact and job.kv_type != "q8_0"
    knobs = job.start
    if job.budget_s:
        knobs = search.layout(knobs) if job.layouts and not bench.llama.n_gpu_layers else knobs
        knobs = search.best(knobs, job.n_cores, flash=flash, long=bench.long)
    speed, start = bench.speed(knobs), bench.speed(job.start)
    file_type = int(bench.llama.file_type or -1)
    other, agreement = _compare(job, bench, say) if job.compare else (None, None)
    took_s = time.perf_counter() - started
    return Tuned(knobs, speed, start, search.rows(), took_s, search.complete, file_type, other, agreement)


def _compare(job: TuneJob, bench: TuneBench, say: Callable[[str], None]) -> tuple[Speed, float | None]:
    """Measure another file at `job.start`, and its share of next tokens in common; None for another vocabulary."""
    say(f"measuring {os.path.basename(job.compare)}")  # noqa: PTH119
    ours, n_vocab = bench.next_tokens(), bench.llama.vocabulary.n_tokens
    bench.llama.close()  # there may not be memory for two
    start = replace(job.start, repack=True)  # how the other file is packed is another matter
    other = TuneBench(replace(job, model_path=job.compare, start=start))
    speed = other.speed(start)
    if other.llama.vocabulary.n_tokens != n_vocab:
        return speed, None
    theirs = other.next_tokens()
    return speed, sum(a == b for a, b in zip(ours, theirs, strict=False)) / max(1, len(ours))


def _line(knobs: Knobs, work: str, busy: bool) -> str:
    shown = {
        "decode": f"writing answers: {knobs.n_threads} threads",
        "prefill": f"reading prompts: {knobs.n_threads_batch} threads",
        "long": f"reading prompts: {knobs.n_ubatch} tokens at a time",
    }[work]
    flash = ", without flash attention" if knobs.flash_attn is False else ""
    layout = "" if knobs.repack else ", weights as in the file"
    return f"{shown}{flash}{layout}{', beside a busy process' if busy else ''}"


def _confined(job: TuneJob) -> Confinement:
    return confine(
        Access(read=with_shards(Path(path) for path in (job.model_path, job.compare) if path)), gpu.free_bytes
    )


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, _ = home.job(TuneJob, _confined)
    os.nice(job.nice)
    with home.refusing(ModelError, TemplateError):
        home.done(tune(job, home.progress))


if __name__ == "__main__":
    main()
