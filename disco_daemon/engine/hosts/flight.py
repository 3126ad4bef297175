"""A batch on its way through the legs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..llama.hidden import FloatRows
from ..llama.rows import Row


@dataclass(eq=False, slots=True)
class Flight:
    """A batch under way: its rows as tokens, the leg that computes it, and in the end its rows for the last range."""

    number: int
    rows: Sequence[Row]
    places: list[tuple[int, int]]
    leg: int = 0
    arrived: FloatRows | None = None
    has_failed: bool = False
