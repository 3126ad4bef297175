"""How long runs of ranges of layers took, gathered until somebody asks: what a controller's costs are fitted to."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_KINDS = 128  # ranges and sizes of batches at a time; there are few of each in a second, prompts' chunks aside

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class SegmentRuns(Generic[T]):
    """Times by what was run and the rows in its batch: how many runs, and seconds in all."""

    _found: dict[tuple[T, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, what: T, batch: int, seconds: float) -> None:
        """Add a run, unless there are too many kinds already."""
        key = what, batch
        n, before_s = self._found.get(key, (0, 0.0))
        if n or len(self._found) < MAX_KINDS:
            self._found[key] = n + 1, before_s + seconds

    def take(self) -> list[tuple[T, int, int, float]]:
        """Return what was run, rows, runs and seconds, and begin anew."""
        found = [(what, batch, n, seconds) for (what, batch), (n, seconds) in self._found.items()]
        self._found.clear()
        return found
