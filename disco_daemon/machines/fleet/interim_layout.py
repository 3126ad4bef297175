"""Where layers lie meanwhile, if a host has no room for the ranges it has and for those that are to come. Pure.

llama.cpp loads a range as a whole: a host that is to have a part of its layers gets that part loaded beside all of
them. One that is short of memory would need most just when it is to have less. So home has such layers meanwhile: they
leave as they are, and what the host is to have then comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...fleet.forecast import FleetModel
from ...fleet.layout import FleetLayout
from ...fleet.placement import Placement, free_bytes
from ...types import LayerRange

HOME = 0


def detour(present: FleetLayout, coming: FleetLayout, fleet: FleetModel, segment_bytes: float) -> FleetLayout | None:
    """Return the layout between two others; None where none is needed, or where home has no room for it.

    `segment_bytes` is what a loaded range takes besides its weights and cells.
    """
    placement = present.placement
    for host in range(1, len(fleet.hosts)):
        leaving = [layers for layers in present.on(host) if layers not in coming.on(host)]
        loaded = [layers for layers in coming.on(host) if layers not in present.on(host)]
        if not leaving or not loaded:
            continue
        modules = [module for layers in loaded for module in _modules(present, layers)]
        beside = sum(fleet.model.weights[module] for module in modules) + segment_bytes * len(loaded)
        if beside <= free_bytes(host, fleet.hosts, present.placement, fleet.model):
            continue
        placement = _without(placement, [module for layers in leaving for module in _modules(present, layers)], host)
    if placement == present.placement or free_bytes(HOME, fleet.hosts, placement, fleet.model) < 0:
        return None
    found = present.after(placement)
    return None if found.inner in (present.inner, coming.inner) else found


def fitting(between: FleetLayout, coming: FleetLayout, fleet: FleetModel) -> FleetLayout:
    """Return as much of a layout as hosts have room for by now: what is at home meanwhile stays there else."""
    placement, weights = coming.placement, fleet.model.weights
    for host in range(1, len(fleet.hosts)):
        excess = -free_bytes(host, fleet.hosts, placement, fleet.model)
        for module in reversed(placement.on(host)):
            if excess <= 0:
                break
            if between.placement.has(module, HOME) and not between.placement.has(module, host):
                placement, excess = _without(placement, [module], host), excess - weights[module]
    return coming.after(placement)


def _modules(layout: FleetLayout, layers: LayerRange) -> range:
    return range(layers.first - layout.first + 1, layers.last - layout.first + 1)


def _without(placement: Placement, modules: Sequence[int], host: int) -> Placement:
    """Return the placement in which a host lacks modules; home has those that would be nowhere."""
    alone = [module for module in modules if placement.masks[module] == 1 << host]
    others = [module for module in modules if placement.masks[module] != 1 << host]
    return placement.move(alone, host, HOME).evict(others, host)
