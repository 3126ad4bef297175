"""What ranges of layers take, as the engine measured it: the costs that a controller reckons with. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...engine import wire
from ...fleet.costs import CostCurve, ModuleCosts, fit_costs
from ...fleet.layout import FleetLayout
from ...types import LayerRange

KEEP = 0.8  # of what is known already, for each second with new runs: what changes is seen within some seconds
MAX_RANGES = 512  # ranges and batch sizes that are remembered; the oldest go
EXACT_BATCH = 16  # rows: batches of drawn tokens; larger ones have parts of prompts, and are taken together by size
LEAST_SIZES = 2  # of batches that are known for all modules, before costs are fitted to them


@dataclass(slots=True)
class CostBook:
    """Seconds of a run by range and batch size, of all hosts: those of one machine are alike."""

    _found: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def observe(self, samples: Iterable[wire.RunSample]) -> None:
        """Take what was measured in a second."""
        for one in samples:
            if one.n < 1 or one.batch < 1:
                continue
            key, now_s = (one.first, one.last, _size(one.batch)), one.seconds / one.n
            before_s = self._found.pop(key, None)
            self._found[key] = now_s if before_s is None else KEEP * before_s + (1 - KEEP) * now_s
            if len(self._found) > MAX_RANGES:
                del self._found[next(iter(self._found))]

    def costs(self, layout: FleetLayout) -> ModuleCosts | None:
        """Return the costs of a layout's modules; None while too little of them was seen."""
        samples = defaultdict(list)
        for (first, last, batch), seconds in self._found.items():
            layers = LayerRange(first, last, layout.n_layers)
            if last <= layout.first or first >= layout.last or layout.first <= first < last <= layout.last:
                samples[batch].append(layout.sample(layers, batch, seconds))
        whole = [
            own
            for own in samples.values()
            if any(one.has_embedding for one in own)
            and any(one.has_head for one in own)
            and any(one.n_layers for one in own)
        ]
        return fit_costs([one for own in whole for one in own]) if len(whole) >= LEAST_SIZES else None


def condensed(costs: ModuleCosts, layout: FleetLayout) -> ModuleCosts:
    """Return the costs of a layout's modules, of which home's own ranges are one each, from those of single layers."""
    behind = layout.n_layers - layout.last
    return ModuleCosts(
        _sum(costs.embedding, 1, costs.layer, layout.first),
        costs.layer,
        _sum(costs.head, 1, costs.layer, behind),
        costs.call,
    )


def _sum(one: CostCurve, n: int, other: CostCurve, n_other: int) -> CostCurve:
    batches = tuple(sorted({*one.batches, *other.batches}))
    return CostCurve(batches, tuple(n * one.at(batch) + n_other * other.at(batch) for batch in batches))


def _size(batch: int) -> int:
    """Return the size under which a batch counts: its own, or the next power of two."""
    return batch if batch <= EXACT_BATCH else 1 << (batch - 1).bit_length()
