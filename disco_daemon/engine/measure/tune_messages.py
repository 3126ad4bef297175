"""The messages of a tune: a job and its result (`system.job`)."""

from __future__ import annotations

import msgspec


class Knobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings that decide how fast a model is on a CPU.

    `n_threads` compute when answers are written, `n_threads_batch` when prompts are read, `n_ubatch` tokens at a time.
    `flash_attn`: None = as llama.cpp says, which is on for a CPU. `repack`: as in `wire.Load`.
    """

    n_threads: int
    n_threads_batch: int
    n_ubatch: int
    flash_attn: bool | None = None
    repack: bool = True


class TuneJob(msgspec.Struct, frozen=True):
    """Find the fastest knobs for a model, from `start` on and within `budget_s`; with no budget, only measure `start`.

    `exact`, `kv_type`, `n_gpu_layers` and `n_cpu_moe` as in `wire.Load`. With `compare`, a second model is measured at
    `start` too, and how often both have the same next token. With `layouts`, weights as they are in the file are tried.
    Up to `n_cores` threads are tried; `nice` is added to the process's niceness.
    """

    model_path: str
    n_cores: int
    start: Knobs
    exact: bool = True
    kv_type: str = "auto"
    n_gpu_layers: int | None = 0
    budget_s: float = 0.0
    compare: str = ""
    nice: int = 5
    layouts: bool = False
    n_cpu_moe: int | None = None


class Speed(msgspec.Struct, frozen=True):
    """Measured, token/s: reading a prompt, writing one answer, and writing eight at a time in all (medians)."""

    prefill_tps: float
    decode_tps: float
    decode8_tps: float


class TuneRow(msgspec.Struct, frozen=True):
    """One line of the table: knobs, the work they were judged by, and its time, s; `busy` beside another process."""

    knobs: Knobs
    work: str
    seconds: float
    n: int
    busy: bool = False


class Tuned(msgspec.Struct, tag=True, frozen=True):
    """The fastest knobs, their speed and that of `start`; `complete` is False if the time ran out before the end.

    `file_type` is llama.cpp's number of the file's quantisation. With `TuneJob.compare`, `other` is that file's speed,
    and `agreement` the share of next tokens in common.
    """

    knobs: Knobs
    speed: Speed
    start: Speed
    rows: list[TuneRow]
    took_s: float
    complete: bool
    file_type: int
    other: Speed | None = None
    agreement: float | None = None


class RequantizeJob(msgspec.Struct, frozen=True):
    """Write a copy of `source` with 8 bits a weight to `target`; until then it is the file `unfinished` beside that."""

    source: str
    target: str
    unfinished: str


class Requantized(msgspec.Struct, tag=True, frozen=True):
    """The copy is there, whole."""
