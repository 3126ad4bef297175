"""The stats that the engine sends of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .. import wire
from .batch import Batcher

EVERY_S = 1.0  # between two messages with stats, while the engine computes


@dataclass(slots=True)
class EngineStats:
    """A context around each iteration, which measures it. State: what has been measured since the last Stats."""

    batcher: Batcher
    clock: Callable[[], float] = time.perf_counter
    n_iterations: int = 0
    _began: float = 0.0
    _wall_s: float = 0.0  # of the iterations since the last Stats
    _llama_s: float = 0.0  # llama.cpp's share of all time up to the last Stats
    _n_sent: int = 0  # iterations up to the last Stats
    _n_active: int = 0  # answers that the last Stats told of
    _sent_at: float = 0.0
    _disk_sent: tuple[int, int, str] = (0, 0, "")
    _last: wire.Stats | None = None

    def __enter__(self) -> None:
        self._began = self.clock()

    def __exit__(self, *exc_info: object) -> None:
        self._wall_s += self.clock() - self._began

    @property
    def _disk(self) -> tuple[int, int, str]:
        spill = self.batcher.admission.cells.spill
        return (len(spill), spill.n_bytes, spill.error) if spill is not None else (0, 0, "")

    def stats_if_due(self, *, busy: bool) -> wire.Stats | None:
        """Return the stats once a second while busy, once when idle, and then whenever the disk's change.

        An answer may also end without an iteration, by a cancellation: that is told, too.
        """
        self.n_iterations += busy
        now = self.clock()
        is_stale = self._n_sent < self.n_iterations or self._n_active != len(self.batcher.admission.sequences)
        rests = not busy and is_stale
        if rests or (busy and now - self._sent_at >= EVERY_S):
            self._last = self._stats(now)
        elif busy or self._disk_sent == self._disk:
            return None
        self._disk_sent = texts, n_bytes, error = self._disk
        last = self._last or self._stats(now)
        return msgspec.structs.replace(last, disk_texts=texts, disk_bytes=n_bytes, disk_error=error)

    def _stats(self, now: float) -> wire.Stats:
        counters, admission = self.batcher.counters, self.batcher.admission
        usage = self.batcher.remote.usage()
        in_all_s, n = counters.busy_s + counters.sample_s, self.n_iterations - self._n_sent
        share = max(0.0, 1 - (in_all_s - self._llama_s) / self._wall_s) if self._wall_s and n else 0.0
        iteration_s = self._wall_s / n if n else 0.0
        if not n and self._last is not None:  # nothing was computed since
            share, iteration_s = self._last.python_share, self._last.iteration_s
        self._llama_s, self._wall_s, self._n_sent, self._sent_at = in_all_s, 0.0, self.n_iterations, now
        active = list(admission.sequences.values())
        self._n_active = len(active)
        n_resident, n_running = len(admission.resident), sum(s.is_running or s.is_away for s in active)
        n_swapped = sum(s.saved is not None for s in active)
        return wire.Stats(
            running=n_running,
            paused=n_resident - n_running,
            swapped=n_swapped,
            waiting=len(active) - n_resident - n_swapped,
            cells_used=admission.cells.n_used,
            saved_bytes=admission.cells.saved_bytes,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=admission.cells.n_reused,
            completion_tokens=counters.completion_tokens,
            busy_s=counters.busy_s,
            python_share=share,
            iteration_s=iteration_s,
            iterations=self.n_iterations,
            preemptions=admission.n_preempted,
            chunks=counters.chunks,
            chunks_s=counters.chunks_s,
            drafted=usage.n_drafted,
            accepted=usage.n_accepted,
            split=usage.split,
            fleet=usage.fleet,
        )
