"""What the engine tells about itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .. import wire
from .batch import Batcher

EVERY_S = 1.0  # between two messages with stats, while the engine computes


@dataclass(slots=True)
class Gauge:
    """A context around each iteration, which measures it; `told` says now and then what was measured."""

    batcher: Batcher
    clock: Callable[[], float] = time.perf_counter
    n_iterations: int = 0
    _began: float = 0.0
    _wall_s: float = 0.0  # of the iterations since the last Stats
    _llama_s: float = 0.0  # of this, as it was at the last Stats: llama.cpp's share in all
    _n_told: int = 0
    _told_at: float = 0.0
    _disk_told: tuple[int, int, str] = (0, 0, "")
    _last: wire.Stats | None = None

    def __enter__(self) -> None:
        self._began = self.clock()

    def __exit__(self, *exc_info: object) -> None:
        self._wall_s += self.clock() - self._began

    @property
    def _disk(self) -> tuple[int, int, str]:
        spill = self.batcher.admission.cells.spill
        return (len(spill), spill.n_bytes, spill.error) if spill is not None else (0, 0, "")

    def told(self, *, busy: bool) -> wire.Stats | None:
        """Stats, if they are due: each second, once when nothing is left to compute, then when the disk changes."""
        self.n_iterations += busy
        now = self.clock()
        rests = not busy and self._n_told < self.n_iterations
        if rests or (busy and now - self._told_at >= EVERY_S):
            self._last = self._stats(now)
        elif busy or self._disk_told == self._disk:
            return None
        self._disk_told = texts, n_bytes, error = self._disk
        last = self._last or self._stats(now)
        return msgspec.structs.replace(last, disk_texts=texts, disk_bytes=n_bytes, disk_error=error)

    def _stats(self, now: float) -> wire.Stats:
        totals, admission, guesses = self.batcher.totals, self.batcher.admission, self.batcher.speculator
        llama_s, n = totals.busy_s + totals.sample_s - self._llama_s, self.n_iterations - self._n_told
        share = max(0.0, 1 - llama_s / self._wall_s) if self._wall_s and n else 0.0
        iteration_s = self._wall_s / n if n else 0.0
        self._llama_s, self._wall_s, self._n_told, self._told_at = (
            totals.busy_s + totals.sample_s,
            0.0,
            self.n_iterations,
            now,
        )
        active = list(admission.sequences.values())
        resident = [s for s in active if s.slot >= 0]
        n_swapped = sum(s.saved is not None for s in active)
        return wire.Stats(
            running=sum(s.chosen for s in resident),
            paused=sum(not s.chosen for s in resident),
            swapped=n_swapped,
            waiting=len(active) - len(resident) - n_swapped,
            cells_used=admission.cells.n_used,
            saved_bytes=admission.cells.saved_bytes,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=admission.cells.n_reused,
            completion_tokens=totals.completion_tokens,
            busy_s=totals.busy_s,
            python_share=share,
            iteration_s=iteration_s,
            iterations=self.n_iterations,
            preemptions=admission.n_preempted,
            chunks=totals.chunks,
            chunks_s=totals.chunks_s,
            drafted=guesses.n_drafted if guesses is not None else 0,
            accepted=guesses.n_accepted if guesses is not None else 0,
        )
