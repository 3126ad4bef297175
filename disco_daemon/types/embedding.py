"""What an endpoint computes of a text that it does not answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a text of `n_tokens` means: little-endian float32 numbers, of length 1; it took `busy_s` to compute, s."""

    vector: bytes
    n_tokens: int
    busy_s: float
