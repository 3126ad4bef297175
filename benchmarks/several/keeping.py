"""One memory played by several rules of what stays in it: ours, those of others, and the best that can be."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disco_daemon.scheduler.expected_use import ExpectedUse
from disco_daemon.scheduler.residency import JUST_USED_S, ModelUse, coming_back, leaving_for

from .days import Model, Request

LOOK_S = 5.0  # between two looks whether a model comes back, as the daemon does it, beside ends of answers
LOAD_W = (
    15.0  # what a laptop draws above rest while it reads a file and lays its weights out: a guess, the same for all
)
SETTLED_S = 300.0  # where nothing came back, only this long before the next request is looked at again, to save time


class Rule(Protocol):
    """What decides which models leave for one that is asked for."""

    name: str
    brings_back: bool

    def observe(self, model: str, at: float) -> None:
        """Take a request."""
        ...

    def per_hour(self, model: str, at: float) -> float:
        """Return what a model is worth; the least goes first."""
        ...


class Expected:
    """Ours: by expected use."""

    name = "expected use"

    def __init__(self, models: Sequence[Model], *, brings_back: bool = True) -> None:
        self.brings_back = brings_back
        self.name = Expected.name if brings_back else f"{Expected.name}, nothing comes back"
        self._uses = {m.name: ExpectedUse(0.0) for m in models}

    def observe(self, model: str, at: float) -> None:
        self._uses[model].observe(at)

    def per_hour(self, model: str, at: float) -> float:
        return self._uses[model].per_hour(at)


class LeastRecent:
    """The one whose last request is longest ago goes: llama.cpp's router, and Ollama with `keep_alive` -1."""

    name, brings_back = "least recently used", False

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def observe(self, model: str, at: float) -> None:
        self._last[model] = at

    def per_hour(self, model: str, at: float) -> float:
        return self._last.get(model, -1.0) - at


class Count:
    """The one with fewest requests goes; a request counts 1/e after `forgotten_s`."""

    prefix, brings_back = "by count", False

    def __init__(self, forgotten_s: float) -> None:
        self.forgotten_s = forgotten_s
        self.name = self.prefix if math.isinf(forgotten_s) else f"{self.prefix} of {forgotten_s / 3600:.2g} h"
        self._counts: dict[str, tuple[float, float]] = {}

    def observe(self, model: str, at: float) -> None:
        self._counts[model] = self.per_hour(model, at) + 1, at

    def per_hour(self, model: str, at: float) -> float:
        count, since = self._counts.get(model, (0.0, at))
        return count * math.exp(-(at - since) / self.forgotten_s)


class Foresight:
    """The one whose next request is farthest away goes: the fewest loads that can be, if none is made ahead."""

    name, brings_back = "foresight (no rule can know)", False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._at: dict[str, list[float]] = {}
        for one in requests:
            self._at.setdefault(one.model, []).append(one.at)

    def observe(self, model: str, at: float) -> None:
        del model, at

    def per_hour(self, model: str, at: float) -> float:
        times = self._at.get(model, [])
        i = bisect.bisect_right(times, at)
        return at - times[i] if i < len(times) else -math.inf


@dataclass(slots=True)
class Played:
    """What a rule came to: requests, cold starts, s waited for loads, loads that nobody waited for, the most memory.

    `loading_s` is how long it loaded in all, also ahead; at LOAD_W that is its energy. `was_cold` has each request.
    """

    name: str
    requests: int = 0
    cold: int = 0
    waited_s: float = 0.0
    ahead: int = 0
    most_bytes: int = 0
    loading_s: float = 0.0
    was_cold: list[bool] = field(default_factory=list)

    @property
    def load_j(self) -> float:
        """The energy of all loads, J."""
        return self.loading_s * LOAD_W

    def plus(self, other: Played) -> Played:
        """Return both together."""
        sums = (self.requests + other.requests, self.cold + other.cold, self.waited_s + other.waited_s)
        most, loading_s = max(self.most_bytes, other.most_bytes), self.loading_s + other.loading_s
        ahead, was_cold = self.ahead + other.ahead, self.was_cold + other.was_cold
        return Played(self.name, *sums, ahead, most, loading_s, was_cold)


def play(
    rule: Rule,
    models: Sequence[Model],
    requests: Sequence[Request],
    limit: int,
    count_from: float,
    here: Collection[str] = (),
) -> Played:
    """Return what happened to the requests from `count_from` on; those before fill memory and teach the rule.

    Where no request is before, memory has the models `here` at the beginning.
    """
    memory = _Memory(rule, models, limit, here)
    played, looked_at, loaded_before = Played(rule.name), count_from if here else 0.0, 0.0
    for one in requests:
        if one.at < count_from:
            loaded_before = memory.loading_s
        while rule.brings_back and (then := memory.next_look(looked_at)) < one.at:
            looked_at = max(then, one.at - SETTLED_S if memory.is_settled else 0.0)
            played.ahead += memory.bring_back(looked_at) and looked_at >= count_from
        rule.observe(one.model, one.at)
        is_cold = one.model not in memory.here
        begins = memory.ask(one)
        if one.at >= count_from:
            played.requests += 1
            played.cold += is_cold
            played.was_cold.append(is_cold)
            played.waited_s += begins - one.at
    played.most_bytes, played.loading_s = memory.most_bytes, memory.loading_s - loaded_before
    return played


class _Memory:
    """Which models are here, and until when each answers."""

    def __init__(self, rule: Rule, models: Sequence[Model], limit: int, here: Collection[str] = ()) -> None:
        self._rule, self._models, self._limit = rule, {m.name: m for m in models}, limit
        self._ready_at = dict.fromkeys(here, 0.0)
        self._busy_to: dict[str, float] = {}
        self._left: set[str] = set()
        self.most_bytes, self.loading_s, self.is_settled = 0, 0.0, False

    @property
    def here(self) -> Collection[str]:
        """The models in memory, and the one that loads."""
        return self._ready_at.keys()

    def ask(self, one: Request) -> float:
        """Return when the answer to a request can begin: at once, or behind a load, or behind another's answer."""
        at = one.at
        if one.model not in self._ready_at:
            while (leaving := self._leaving(one.model, at)) is None:  # all that are here answer: it waits for one
                at = min(to for to in self._busy_to.values() if to > at)
            self._swap(one.model, leaving, at)
            self.is_settled = False
        begins = max(at, self._ready_at[one.model])
        self._busy_to[one.model] = max(self._busy_to.get(one.model, 0.0), begins + one.takes_s)
        return begins

    def next_look(self, at: float) -> float:
        """Return when it is looked again whether a model comes back: when an answer ends, and every LOOK_S."""
        return min([at + LOOK_S, *(to for to in self._busy_to.values() if to > at)])

    def bring_back(self, at: float) -> bool:
        """Load a model that pays; return whether one did. One is loaded at a time, as the daemon's one task does it."""
        if any(to > at for to in self._ready_at.values()):
            self.is_settled = False
            return False
        beside = any(to > at for to in self._busy_to.values())
        found = coming_back(self._uses(at), self._limit, beside=beside)
        self.is_settled = found is None and not beside
        if found is not None:
            self._swap(found.name, found.leaving, at)
        return found is not None

    def _swap(self, name: str, leaving: Sequence[str], at: float) -> None:
        for other in leaving:
            del self._ready_at[other]
            self._left.add(other)
        self._ready_at[name] = at + self._models[name].load_s
        self.loading_s += self._models[name].load_s
        self.most_bytes = max(self.most_bytes, sum(self._models[m].n_bytes for m in self._ready_at))

    def _uses(self, at: float) -> list[ModelUse]:
        return [
            ModelUse(
                m.name, m.n_bytes, m.load_s, self._rule.per_hour(m.name, at), m.name in self._ready_at,
                self._busy_to.get(m.name, 0.0) > at, m.name in self._left,
                is_just_used=self._busy_to.get(m.name, -math.inf) > at - JUST_USED_S,
            )
            for m in self._models.values()
        ]  # fmt: skip

    def _leaving(self, name: str, at: float) -> tuple[str, ...] | None:
        uses = self._uses(at)
        if isinstance(self._rule, Expected):
            return leaving_for(self._models[name].n_bytes, uses, self._limit)
        needed = sum(m.n_bytes for m in uses if m.is_here) + self._models[name].n_bytes - self._limit
        found: list[str] = []
        for use in sorted((m for m in uses if m.is_here and not m.is_busy), key=lambda m: m.per_hour):
            if needed <= 0:
                break
            found.append(use.name)
            needed -= use.n_bytes
        return tuple(found) if needed <= 0 else None
