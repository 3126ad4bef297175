"""Counters of what the engine has computed since its start."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.latency import IterationLoad


@dataclass(slots=True)
class Counters:
    """Tokens, iterations, and times in s.

    `chunks` were iterations with a part of a prompt beside running answers, and took `chunks_s` in all.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    sample_s: float = 0.0
    chunks: int = 0
    chunks_s: float = 0.0

    def count_iteration(self, load: IterationLoad, took_s: float) -> None:
        """Count an iteration that has gone through."""
        self.iterations += 1
        if load.n_prefill and load.n_decode:
            self.chunks += 1
            self.chunks_s += took_s
