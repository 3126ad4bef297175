"""Round robin over LoRA adapters: answers of different adapters cannot be in one llama_decode. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .sequence import Sequence

TURN_S = 0.03  # to change the adapter takes 3 ms (30 layers, measured), so a tenth of the time at most


@dataclass(slots=True)
class AdapterRoundRobin:
    """`adapter` has its turn, "" being the model without one; the turn began at `since`, s.

    After TURN_S the turn goes to the adapter whose last turn is longest ago, of those with something to compute.
    """

    adapter: str = ""
    since: float = -math.inf
    _left: dict[str, float] = field(default_factory=dict)

    def select(self, resident: list[Sequence], now: float) -> list[Sequence]:
        """Return the sequences that may be in the next llama_decode; end the turn if that is due."""
        wanting = {s.request.adapter for s in resident if s.is_running or (s.is_held and s.is_prefilling)}
        self._pass_on(wanting - {self.adapter}, now, due=self.adapter not in wanting)
        return [s for s in resident if s.request.adapter == self.adapter]

    def _pass_on(self, others: set[str], now: float, *, due: bool) -> None:
        if not others or not (due or now - self.since >= TURN_S):
            return
        self._left[self.adapter] = now
        self.adapter = min(sorted(others), key=lambda name: self._left.get(name, -math.inf))
        self.since = now
