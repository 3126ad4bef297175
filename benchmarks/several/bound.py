"""The least that can be had of a memory by a rule that knows all requests ahead, where loads wait for a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from .days import Model, Request


def least_loads(models: Sequence[Model], requests: Sequence[Request], limit: int, count_from: float) -> int:
    """Return the fewest cold starts from `count_from` on that any rule can have that loads only what is asked for.

    By all contents of the memory, request by request: Belady's rule for models of unlike sizes. It may close a model
    that answers, which no rule here may, so it is a bound and nothing that can be reached.
    """
    size = {m.name: m.n_bytes for m in models}
    best: Mapping[frozenset[str], int] = {frozenset(): 0}
    for one in requests:
        cost = int(one.at >= count_from)
        after = dict[frozenset[str], int]()
        for here, n in best.items():
            for then in [here] if one.model in here else _with(one.model, here, size, limit):
                total = n + (0 if one.model in here else cost)
                after[then] = min(total, after.get(then, total))
        best = after
    return min(best.values())


def _with(model: str, here: frozenset[str], size: Mapping[str, int], limit: int) -> list[frozenset[str]]:
    """Return the largest contents that a memory can have when a model has come into it."""
    room = limit - size[model]
    kept = [set(c) for n in range(len(here), -1, -1) for c in combinations(here, n) if sum(size[m] for m in c) <= room]
    return [frozenset({*c, model}) for i, c in enumerate(kept) if not any(c < other for other in kept[:i])]
