"""Hosts, the modules of a model, and where each module has replicas: frozen values.

Modules are numbered in the order of a pass: the embedding is 0, layer i is i + 1, the output head is last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

MEMORY_SHARE = 0.85  # of a host's memory, for its owner's programs and the model together
CPU_SHARE = 0.8  # of a host's processors, for its owner's programs and the model together
MAX_HOSTS = 16  # of a fleet: the busiest set of hosts is found among all 2^16


@dataclass(frozen=True, slots=True)
class FleetHost:
    """One machine or GPU. Home is the first of a fleet; all others talk to it.

    `compute` is how many times faster it is than the machine whose costs were measured. `cpu_used` (a share) and
    `memory_used_bytes` are what others than the model take; `delay_s` (one way) and `bytes_per_s` are of its link to
    home. A host that does not `accept` keeps what it has and gets nothing new: its owner is back, or its mains is gone.
    Of its processors and memory the shares `cpu_share` and `memory_share` are for its owner's programs and the model
    together.
    """

    name: str
    compute: float
    memory_bytes: float
    memory_used_bytes: float = 0.0
    cpu_used: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    accepts: bool = True
    cpu_share: float = CPU_SHARE
    memory_share: float = MEMORY_SHARE

    @property
    def speed(self) -> float:
        """What of its compute the model may use."""
        return self.compute * max(0.0, self.cpu_share - self.cpu_used)

    @property
    def room_bytes(self) -> float:
        """What of its memory the model may use, weights and KV cache together."""
        return max(0.0, self.memory_share * self.memory_bytes - self.memory_used_bytes)


@dataclass(frozen=True, slots=True)
class ModelModules:
    """What the modules of a model take: weights of each, bytes in the order of a pass, and the KV cache of a layer.

    `kv_bytes` is a token's key and value in one layer, `row_bytes` a hidden row as it crosses a link.
    """

    weights: tuple[int, ...]
    kv_bytes: int
    row_bytes: int

    @property
    def n_layers(self) -> int:
        """The number of its layers, without embedding and head."""
        return len(self.weights) - 2

    @property
    def head(self) -> int:
        """The number of the output head, which is the last module."""
        return len(self.weights) - 1


@dataclass(frozen=True, slots=True)
class Placement:
    """The hosts of each module's replicas, as bits: bit h of `masks[m]` says that host h has module m."""

    masks: tuple[int, ...]

    @staticmethod
    def at_home(n_modules: int) -> Placement:
        """Everything on host 0: P_0 of the paper."""
        return Placement((1,) * n_modules)

    @property
    def parallelism(self) -> tuple[int, ...]:
        """The paper's P: the number of replicas of each module."""
        return tuple(mask.bit_count() for mask in self.masks)

    def has(self, module: int, host: int) -> bool:
        """Whether a host has a module."""
        return bool(self.masks[module] >> host & 1)

    def on(self, host: int) -> list[int]:
        """Return the modules that a host has."""
        return [module for module, mask in enumerate(self.masks) if mask >> host & 1]

    def add(self, modules: Iterable[int], host: int) -> Placement:
        """Return this with replicas of `modules` at a host."""
        masks = list(self.masks)
        for module in modules:
            masks[module] |= 1 << host
        return replace(self, masks=tuple(masks))

    def evict(self, modules: Iterable[int], host: int) -> Placement:
        """Return this without the replicas of `modules` at a host. Raises ValueError if one was the only one."""
        masks = list(self.masks)
        for module in modules:
            masks[module] &= ~(1 << host)
            if not masks[module]:
                raise ValueError(f"module {module} would be nowhere")
        return replace(self, masks=tuple(masks))

    def move(self, modules: Sequence[int], source: int, target: int) -> Placement:
        """Return this with `modules` at `target` instead of `source`."""
        return self.add(modules, target).evict(modules, source)

    def weights_on(self, host: int, model: ModelModules) -> int:
        """Return the bytes of all weights at a host."""
        return sum(model.weights[module] for module in self.on(host))


def runs(modules: Iterable[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers among `modules`, which are sorted."""
    begin = before = None
    for module in modules:
        if before is not None and module != before + 1:
            yield range(begin or 0, before + 1)
            begin = module
        elif before is None:
            begin = module
        before = module
    if before is not None:
        yield range(begin or 0, before + 1)


def free_bytes(host: int, hosts: Sequence[FleetHost], placement: Placement, model: ModelModules) -> float:
    """Return what a host has left for KV cache or more weights, bytes; negative where it holds too much."""
    return hosts[host].room_bytes - placement.weights_on(host, model)
