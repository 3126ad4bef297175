"""What the engine has computed so far."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.latency import Load


@dataclass(slots=True)
class Totals:
    """Counters since the start: tokens, iterations, s.

    `chunks` were iterations with a part of a prompt beside running answers.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    sample_s: float = 0.0
    chunks: int = 0
    chunks_s: float = 0.0

    def iteration(self, load: Load, took_s: float) -> None:
        """An iteration of this load has gone through."""
        self.iterations += 1
        if load.n_prefill and load.n_decode:
            self.chunks += 1
            self.chunks_s += took_s
