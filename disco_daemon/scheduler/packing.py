"""Packing: a knapsack with two limits, cells and sequences (Andes, arXiv 2404.16283, §4.2, Algorithm 1). Pure.

For each batch size B the readers' gains differ, since a larger batch is slower for all. Algorithm 1 packs by
priority, gain / context, and stops at the first job that does not fit. Here such a job is skipped; where that is
not good enough by proof, orders by other prices of a place are tried as well, and one or two are exchanged for one or
two while it pays. The result is within 2 % of the exact optimum, which a dynamic programme over jobs x cells x batch
size finds (`benchmarks.qoe.scheduling.exact`; on 1,000 random instances).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray, IntArray

# What a place in the batch costs in cells, as a multiple of the mean room for one. 0 is Algorithm 1's priority; inf,
# the order by gain alone, is right when places are what is short.
PLACE_PRICES = (1.0, np.inf)
MAX_EXCHANGES = 16  # each raises the total; a bound on the time, reached on none of the instances tried
REACH, REACH_PAIRS = 24, 12  # in and out: jobs looked at for an exchange, alone and two at a time
LEAST_GAIN = 1e-12  # less is a rounding error
GOOD = 0.985  # of what no selection can surpass: then nothing better is looked for
# The same once no exchange pays any more: then it is rather the bound that is loose. With 1, the choices on 1,000
# instances are better by 1e-5 on average, and exchanges take twice as long.
FAIR = 0.97
# Of two batch sizes as good as that, the larger is taken: the same readers are served, and more tokens come out.
FLAT = 0.002


def pack(
    gains: FloatArray,
    cells: FloatArray,
    sizes: Sequence[int],
    room: float,
    base: FloatArray | float = 0.0,
    *,
    rough: bool = False,
    prices: FloatArray | None = None,
) -> tuple[int, list[int]]:
    """Choose a row of `gains` [k, n] and which of the n jobs run: at most sizes[row], with `cells` <= `room` in all.

    Gains >= 0 of job i in a batch of sizes[j], `cells` [n] > 0; `sizes` >= 0 ascend; `base` [k] is what each row is
    worth without any of these jobs. A job without a gain is packed too where there is room. `rough`: by priority only.
    `prices` [n] > 0 is what the jobs take in all, where more is known of that than the cells: priority is the gain over
    the price then, and nothing but priority counts, since exchanges would look for the largest gain now.
    """
    if rough or prices is not None:
        densities = gains / (cells if prices is None else prices)
        row = _best_row(gains, densities, cells, sizes, room, base) if len(sizes) > 1 else 0
        return row, greedy(densities[row].argsort(kind="stable")[::-1], cells, sizes[row], room)
    bases = base.tolist() if isinstance(base, np.ndarray) else [base] * len(sizes)
    best, found, highest = 0, list[int](), -np.inf
    for row in reversed(range(len(sizes))):
        worth, size = gains[row], sizes[row]
        chosen, total, limit = by_density(worth, cells, size, room)
        if bases[row] + limit <= highest * (1.0 + FLAT):
            continue
        if total < GOOD * limit and len(chosen) < len(cells):
            chosen, total = _better(worth, cells, size, room, chosen, limit)
        total += bases[row]
        if total > highest * (1.0 + FLAT):
            best, found, highest = row, chosen, total
    return best, found


def _best_row(
    gains: FloatArray,
    densities: FloatArray,
    cells: FloatArray,
    sizes: Sequence[int],
    room: float,
    base: FloatArray | float,
) -> int:
    """Return the size worth most by Algorithm 1, with the prefix that fits; of sizes as good, the largest."""
    orders = densities.argsort(axis=1, kind="stable")[:, ::-1]
    rows = np.arange(len(sizes))
    worths = gains[rows[:, None], orders].cumsum(axis=1)
    counts = np.minimum((cells[orders].cumsum(axis=1) <= room).sum(axis=1), sizes)
    totals: list[float] = (base + worths[rows, counts - 1] * (counts > 0)).tolist()
    least = max(totals) * (1.0 - FLAT)
    return max(i for i, total in enumerate(totals) if total >= least)


def by_density(gains: FloatArray, cells: FloatArray, size: int, room: float) -> tuple[list[int], float, float]:
    """Run Algorithm 1, but skip jobs that do not fit; return the jobs, their worth, and a bound for any selection.

    The bound if only cells are short: of the jobs by density the first that does not fit is left out, and its room is
    worth as much as the next one makes of it; or it is taken, and the room it lacks costs what the one before makes of
    that (Martello & Toth, Knapsack Problems, 1990, §2.3.1). And if only places are short.
    """
    order = (gains / cells).argsort(kind="stable")[::-1]
    turns, worth, needs = order.tolist(), gains.tolist(), cells.tolist()
    n, left, taken = 0, room, 0.0
    for i in turns:
        if needs[i] > left:
            break
        left -= needs[i]
        taken += worth[i]
        n += 1
    limit = taken
    if n + 1 < len(turns):
        after = turns[n + 1]
        limit += left * worth[after] / needs[after]
    if 0 < n < len(turns):
        cut, before = turns[n], turns[n - 1]
        limit = max(limit, taken + worth[cut] - (needs[cut] - left) * worth[before] / needs[before])
    if n >= size:
        return turns[:size], sum([worth[i] for i in turns[:size]]), min(limit, _largest(gains, size))
    more = _fill_up(order[n:], cells, size - n, left)
    return turns[:n] + more, taken + sum([worth[i] for i in more]), limit


def _largest(gains: FloatArray, n: int) -> float:
    """Sum the n largest."""
    return float(np.partition(gains, -n)[-n:].sum()) if n else 0.0


def _better(
    gains: FloatArray, cells: FloatArray, size: int, room: float, chosen: list[int], limit: float
) -> tuple[list[int], float]:
    """Return the best selection that exchanges make of several orders, and its worth."""
    best, total = chosen, -np.inf
    for price in (None, *PLACE_PRICES):
        start = chosen
        if price is not None:
            cost = cells + price * (room / size) if price < np.inf else 1.0
            start = greedy((gains / cost).argsort(kind="stable")[::-1], cells, size, room)
        other = _exchange(gains, cells, size, room, start, GOOD * limit)
        worth = float(gains[other].sum())
        if worth > total:
            best, total = other, worth
        if total >= FAIR * limit or len(best) == len(cells):
            break
    return best, total


def greedy(order: IntArray, cells: FloatArray, size: int, room: float) -> list[int]:
    """Select up to `size` jobs by `order` into `room` cells, skipping those that do not fit."""
    filled = cells[order].cumsum()
    n = min(int(filled.searchsorted(room, "right")), size)
    chosen: list[int] = order[:n].tolist()
    return chosen + _fill_up(order[n:], cells, size - n, room - (float(filled[n - 1]) if n else 0.0))


def _fill_up(order: IntArray, cells: FloatArray, places: int, left: float) -> list[int]:
    """Select jobs by `order` into `left` cells, skipping those that do not fit."""
    chosen = list[int]()
    if not places:
        return chosen
    needs = cells[order]
    fits = (needs <= left).nonzero()[0]
    for i, need in zip(order[fits].tolist(), needs[fits].tolist(), strict=True):
        if need <= left:
            left -= need
            chosen.append(i)
            if len(chosen) == places:
                break
    return chosen


def _exchange(
    gains: FloatArray, cells: FloatArray, size: int, room: float, chosen: list[int], good: float
) -> list[int]:
    """Swap one or two for one or two, and fill up, while the total rises and is not good yet."""
    inside = np.zeros(len(cells), bool)
    inside[chosen] = True
    density = gains / (cells / max(room, 1.0) + 1.0 / size)
    for _ in range(MAX_EXCHANGES):
        left, places = room - float(cells[inside].sum()), size - int(np.count_nonzero(inside))
        swap = _best_swap(gains, cells, density, inside, left, places)
        if swap is None:
            break
        out, into = swap
        inside[out], inside[into] = False, True
        _fill(gains, cells, size, room, inside)
        if gains[inside].sum() >= good:
            break
    exchanged: list[int] = np.flatnonzero(inside).tolist()
    return exchanged


def _best_swap(
    gains: FloatArray, cells: FloatArray, density: FloatArray, inside: NDArray[np.bool_], left: float, places: int
) -> tuple[IntArray, IntArray] | None:
    """Return the jobs to take off and the jobs to put in; None if no exchange looked at pays."""
    ins, outs = inside.nonzero()[0], (~inside).nonzero()[0]
    if not len(ins) or not len(outs):
        return None
    off, on = _groups(ins, gains, density), _groups(outs, -gains, -density)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if j - i > places or not len(off[i]) or not len(on[j]):
            continue
        change = _sums(gains, on[j]) - _sums(gains, off[i])[:, None]
        change[_sums(cells, on[j]) - _sums(cells, off[i])[:, None] > left] = -1.0
        one, other = divmod(int(change.argmax()), len(on[j]))
        if change[one, other] > LEAST_GAIN:
            return off[i][one], on[j][other]
    return None


def _groups(jobs: IntArray, key: FloatArray, pair_key: FloatArray) -> tuple[IntArray, IntArray]:
    """Return the likeliest jobs alone [., 1], and in pairs [., 2]."""
    likely = _nearest(jobs, pair_key, REACH_PAIRS)
    return _nearest(jobs, key, REACH)[:, None], likely[_pairs(len(likely))]


def _sums(values: FloatArray, groups: IntArray) -> FloatArray:
    """Sum each group of one or two."""
    first: FloatArray = values[groups[:, 0]]
    return first if groups.shape[1] == 1 else first + values[groups[:, 1]]


@lru_cache(maxsize=REACH_PAIRS + 1)
def _pairs(n: int) -> IntArray:
    """Return all pairs [., 2] of 0 .. n - 1."""
    return np.stack(np.triu_indices(n, 1), 1)


def _nearest(jobs: IntArray, key: FloatArray, n: int) -> IntArray:
    return jobs if len(jobs) <= n else jobs[key[jobs].argsort()[:n]]


def _fill(gains: FloatArray, cells: FloatArray, size: int, room: float, inside: NDArray[np.bool_]) -> None:
    """Add the jobs that fit now."""
    left, places = room - float(cells[inside].sum()), size - int(inside.sum())
    outs = np.flatnonzero(~inside & (cells <= left))
    for i in outs[gains[outs].argsort()[::-1]].tolist():
        if places > 0 and cells[i] <= left:
            inside[i] = True
            left -= cells[i]
            places -= 1
