"""Whose turn it is: answers of different adapters cannot be in one llama_decode. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .sequence import Sequence

TURN_S = 0.03  # to change the adapter takes 3 ms (30 layers, measured), so a tenth of the time at most


@dataclass(slots=True)
class Turns:
    """`adapter` has its turn, "" being the model without one; it began at `since`, s.

    After TURN_S it is the turn of the one whose last turn is longest ago, of those with something to compute.
    """

    adapter: str = ""
    since: float = -math.inf
    _left: dict[str, float] = field(default_factory=dict)

    def among(self, running: list[Sequence], now: float) -> list[Sequence]:
        """Those of the sequences that the next llama_decode may have; it ends a turn where that is due."""
        wanting = {s.request.adapter for s in running if s.chosen or (s.held and s.prefilling)}
        self._pass_on(wanting - {self.adapter}, now, due=self.adapter not in wanting)
        return [s for s in running if s.request.adapter == self.adapter]

    def _pass_on(self, others: set[str], now: float, *, due: bool) -> None:
        if not others or not (due or now - self.since >= TURN_S):
            return
        self._left[self.adapter] = now
        self.adapter = min(sorted(others), key=lambda name: self._left.get(name, -math.inf))
        self.since = now
