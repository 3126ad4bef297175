"""Where a model's layers lie, as ranges that an engine can have, and as the placement that a policy reasons about.

Home keeps a first and a last range of its own, with embedding and head; between them lie the inner layers. A policy
sees the first range as one module, which is pinned, then each inner layer, then the last range as another: so both
forms say the same, and a step's modules are layers again by one sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..arrays import FloatArray
from ..types import LayerRange
from .costs import CostSample
from .placement import ModelModules, Placement
from .steps import FleetStep


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """Inner layers from `first` up to `last` (exclusive), and the hosts that have them; 0 is home."""

    first: int
    last: int
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """All of a model's layers: those of `inner` in their order, and home's own ranges before and behind them.

    Raises ValueError where these are no ranges one behind the other, or home would have no own one.
    """

    n_layers: int
    inner: tuple[PlacedRange, ...]

    def __post_init__(self) -> None:
        if not self.inner or self.inner[0].first < 1 or self.inner[-1].last >= self.n_layers:
            raise ValueError("home keeps the first and the last layer, and something lies between them")
        if any(one.first >= one.last or not one.hosts for one in self.inner):
            raise ValueError("each range has a layer and a host")
        if any(before.last != after.first for before, after in pairwise(self.inner)):
            raise ValueError("the ranges are not one behind the other")

    @staticmethod
    def of_cuts(cuts: Sequence[int], n_layers: int) -> FleetLayout:
        """Return the layout in which the first host has the layers between the first two cuts, and so on."""
        numbered = enumerate(pairwise(cuts), start=1)
        return FleetLayout(n_layers, tuple(PlacedRange(first, last, (host,)) for host, (first, last) in numbered))

    @property
    def first(self) -> int:
        """The first inner layer."""
        return self.inner[0].first

    @property
    def last(self) -> int:
        """The layer behind the last inner one."""
        return self.inner[-1].last

    @property
    def ranges(self) -> list[tuple[LayerRange, tuple[int, ...]]]:
        """All ranges in their order, each with its hosts."""
        n = self.n_layers
        inner = [(LayerRange(one.first, one.last, n), one.hosts) for one in self.inner]
        return [(LayerRange(0, self.first, n), (0,)), *inner, (LayerRange(self.last, n, n), (0,))]

    @property
    def parallelism(self) -> list[int]:
        """The number of replicas of each layer."""
        return [len(hosts) for layers, hosts in self.ranges for _ in range(layers.n_layers)]

    def on(self, host: int) -> list[LayerRange]:
        """Return the ranges that a host has."""
        return [layers for layers, hosts in self.ranges if host in hosts]

    def n_away(self, hosts: Iterable[int]) -> int:
        """Return how many layers some of these hosts have; home is none of them."""
        there = set(hosts) - {0}
        return sum(layers.n_layers for layers, at in self.ranges if there & set(at))

    # --- as a policy sees it ----------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """The modules' hosts: home's first range, each inner layer, home's last range."""
        masks = [sum(1 << host for host in one.hosts) for one in self.inner for _ in range(one.first, one.last)]
        return Placement((1, *masks, 1))

    @property
    def has_replicas(self) -> bool:
        """Whether some layers are at several hosts."""
        return any(len(one.hosts) > 1 for one in self.inner)

    def shares(self, by_module: FloatArray) -> tuple[tuple[float, ...], ...]:
        """Return for each inner range which share of the sequences each of its hosts is to have.

        `by_module` is as a forecast has it, [modules, hosts]. A range with one host needs none.
        """
        rows = ((one.hosts, by_module[one.first - self.first + 1]) for one in self.inner)
        return tuple(tuple(round(float(row[host]), 3) for host in hosts if len(hosts) > 1) for hosts, row in rows)

    def after(self, placement: Placement) -> FleetLayout:
        """Return the layout in which the inner layers lie as in `placement`, in as few ranges as can be.

        Raises ValueError if that moves one of home's own.
        """
        masks = placement.masks
        if len(masks) != self.last - self.first + 2 or masks[0] != 1 or masks[-1] != 1:
            raise ValueError("home's own ranges stay where they are")
        inner = list[PlacedRange]()
        for layer, mask in enumerate(masks[1:-1], start=self.first):
            hosts = tuple(host for host in range(mask.bit_length()) if mask >> host & 1)
            if inner and inner[-1].hosts == hosts:
                inner[-1] = replace(inner[-1], last=layer + 1)
            else:
                inner.append(PlacedRange(layer, layer + 1, hosts))
        return FleetLayout(self.n_layers, tuple(inner))

    def layers_of(self, step: FleetStep) -> tuple[int, int]:
        """Return the layers that a step is about, from the first up to the last (exclusive)."""
        if not step.modules:
            return 0, 0
        return self.first + step.first - 1, self.first + step.last - 1

    def modules(self, model: ModelModules, n_cells: int) -> ModelModules:
        """Return the modules with what they take of a host once they are loaded: weights, and all cells of the cache.

        The cache has its full size from the start, so no answer takes more of it: a token's own share counts nothing.
        """
        cells = n_cells * model.kv_bytes
        embedding, *layers, head = model.weights
        inner = [weight + cells for weight in layers[self.first : self.last]]
        before = embedding + sum(layers[: self.first]) + self.first * cells
        behind = head + sum(layers[self.last :]) + (self.n_layers - self.last) * cells
        return ModelModules((before, *inner, behind), 0, model.row_bytes)

    def sample(self, layers: LayerRange, batch: int, seconds: float) -> CostSample:
        """Return what a run of a range says of the modules' costs; home's own ranges are one module each."""
        own = layers.first == 0, layers.last == self.n_layers
        return CostSample(own[0], 0 if any(own) else layers.n_layers, own[1], batch, seconds)
