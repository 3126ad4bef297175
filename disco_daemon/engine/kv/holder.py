"""Whoever has a sequence of the KV cache, and has to know at once when less of it is left than was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Holder(Protocol):
    """It has the sequence `slot`, and goes by how many of its tokens are computed."""

    slot: int
    n_past: int


@dataclass(slots=True)
class Held:
    """A sequence that no answer has."""

    slot: int
    n_past: int
