"""How the layers of a model are cut into ranges, and which hosts have the inner ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...types import LayerRange
from ..llama.refusals import ModelError


class LegPlan(NamedTuple):
    """What a leg is to be: its layers, their file, its hosts by number, and which share of the sequences each has."""

    layers: LayerRange
    path: str
    hosts: tuple[int, ...]
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ends:
    """The files of ranges, one behind the other: the first and the last are home's, each other one is a leg.

    `hosts` has for each leg the hosts by number that have it, home among them (HERE). Without it each leg has its own.
    `shares` has for each leg which share of the sequences each of its hosts is to have; without it, all the same.
    """

    paths: tuple[str, ...]
    ranges: tuple[LayerRange, ...]
    hosts: tuple[tuple[int, ...], ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()

    @property
    def legs(self) -> list[LegPlan]:
        """The legs with their files, hosts and shares. Raises ValueError if they are not as many."""
        hosts = self.hosts or tuple((number,) for number in range(len(self.ranges) - 2))
        shares = self.shares or ((),) * len(hosts)
        return [LegPlan(*one) for one in zip(self.ranges[1:-1], self.paths[1:-1], hosts, shares, strict=True)]

    def require_move(self, ends: Ends) -> None:
        """Check that layers can be moved to be as in `ends`. Raises ModelError if not."""
        if (ends.ranges[0], ends.ranges[-1]) != (self.ranges[0], self.ranges[-1]):
            raise ModelError("home's own ranges cannot be moved")
        bounds = [layers.last for layers in ends.ranges[:-1]]
        if len(ends.ranges) < 3 or bounds != [layers.first for layers in ends.ranges[1:]]:
            raise ModelError("the ranges are not one behind the other")
