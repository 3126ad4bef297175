"""A batch on its way through the legs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..llama.hidden import FloatRows
from ..llama.rows import Row


@dataclass(eq=False, slots=True)
class Flight:
    """A batch under way: its rows as tokens, the leg that computes it, and in the end its rows for the last range.

    One that is `held` has its rows for the first leg here, until the legs have been moved.
    """

    number: int
    rows: Sequence[Row]
    places: list[tuple[int, int]]
    leg: int = 0
    held: FloatRows | None = None
    arrived: FloatRows | None = None
    has_failed: bool = False

    def spans(self) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield the cells that its rows have."""
        at = 0
        while at < len(self.places):
            start, seq = self.places[at]
            n = 1
            while at + n < len(self.places) and self.places[at + n] == (start + n, seq):
                n += 1
            yield start, start + n, frozenset({seq})
            at += n
