"""Which of several models stay in memory: those whose presence saves most waiting for the memory they take. Pure.

A model in memory saves its load at each request for it, so a byte of it saves `rate x load time / memory` an hour. When
a model needs room, those leave first that save least by that, never one that answers. A model that left for another
comes back by itself: where nobody answers, if within an hour that will save more waiting than its load takes; beside
answers of models that stay, if within a minute it saves more than the load delays them. One that is expected, and was
not here yet, comes into free memory only. Memory is in bytes, times in s, rates in requests an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COMES_BACK_H = 1.0  # hours within which a load that nobody waits for has to pay
BESIDE_H = 1 / 60  # the same beside answers: they mostly have ended within a minute, and then it costs nobody anything
DELAYS = 0.25  # s by which a second of loading delays answers: it reads a file, and lays weights out in one thread
JUST_USED_S = 4.0  # behind an answer: a program that asks on, as agents do, does so within it


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model as the decision sees it; `is_here`: in memory or loading, `is_busy`: somebody waits for it or reads."""

    name: str
    n_bytes: int
    load_s: float
    per_hour: float
    is_here: bool = False
    is_busy: bool = False
    has_left: bool = False  # it was here, and left for another one
    is_expected: bool = False  # it was not here yet, and is known to be asked for
    is_just_used: bool = False  # it has answered within JUST_USED_S

    @property
    def saves(self) -> float:
        """The waiting that its presence saves, s an hour."""
        return self.per_hour * self.load_s

    @property
    def density(self) -> float:
        """The same for each byte."""
        return self.saves / max(1, self.n_bytes)


@dataclass(frozen=True, slots=True)
class Swap:
    """A model to load, and those that leave for it before."""

    name: str
    leaving: tuple[str, ...]


def leaving_for(n_bytes: int, models: Sequence[ModelUse], limit: int) -> tuple[str, ...] | None:
    """Return which models leave so that `n_bytes` more fit into the limit; None while that cannot be.

    Those with the least density leave first; of these, one stays after all whose place is not needed in the end.
    """
    needed = sum(m.n_bytes for m in models if m.is_here) + n_bytes - limit
    found = list[ModelUse]()
    for model in sorted((m for m in models if m.is_here and not m.is_busy), key=lambda m: (m.density, m.name)):
        if needed <= sum(m.n_bytes for m in found):
            break
        found.append(model)
    spare = sum(m.n_bytes for m in found) - needed
    if spare < 0:
        return None
    for model in sorted(found, key=lambda m: -m.saves):
        if model.n_bytes <= spare:
            spare -= model.n_bytes
            found.remove(model)
    return tuple(m.name for m in found)


def next_to_load(wanted: Sequence[str], models: Sequence[ModelUse], limit: int) -> Swap | None:
    """Return the first of the `wanted` models, in the order in which they were asked for, that can be loaded now.

    None where there is none. A later one may go first: the first one waits for a place that is larger.
    """
    by_name = {m.name: m for m in models}
    for name in wanted:
        leaving = leaving_for(by_name[name].n_bytes, models, limit)
        if leaving is not None:
            return Swap(name, leaving)
    return None


def coming_back(models: Sequence[ModelUse], limit: int, *, beside: bool = False) -> Swap | None:
    """Return the model that comes because that saves most, if it pays; None if none does.

    `beside`: somebody answers. None leaves for it that has answered a moment ago, for its reader may ask on.
    """
    best, gain = None, 0.0
    by_name = {m.name: m for m in models}
    for model in models:
        if model.is_here or not (model.has_left or model.is_expected):
            continue
        leaving = leaving_for(model.n_bytes, models, limit)
        if leaving is None or (leaving and not model.has_left) or any(by_name[name].is_just_used for name in leaving):
            continue
        per_hour = model.saves - sum(by_name[name].saves for name in leaving)
        saved = per_hour * (BESIDE_H if beside else COMES_BACK_H) - model.load_s * (DELAYS if beside else 1.0)
        if saved > gain:
            best, gain = Swap(model.name, leaving), saved
    return best
