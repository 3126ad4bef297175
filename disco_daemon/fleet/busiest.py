"""How busy the busiest host has to be, and which shares of the work make it so: a fractional min-max, exactly.

Work that several hosts can do is split among them. The least load of the busiest host is the largest, over all sets of
hosts, of the work that only hosts of the set can do by the set's speed: no split does better, and one does as well (a
flow, by max-flow and min-cut).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from ..arrays import FloatArray, IntArray
from .placement import MAX_HOSTS

TOLERANCE = 1e-9  # of the work: less is a rounding error
EMPTY = 1e-300  # speed of a set without any, so that work for it takes for ever


@lru_cache(maxsize=8)
def speeds_of_sets(speeds: tuple[float, ...]) -> FloatArray:
    """Return the speed of every set of hosts, [2^n]; bit h of an index says that host h is in. Raises ValueError."""
    if len(speeds) > MAX_HOSTS:
        raise ValueError(f"a fleet has {MAX_HOSTS} hosts at most")
    sets = np.zeros(1)
    for speed in speeds:
        sets = np.concatenate([sets, sets + speed])
    return sets


def sums_by_set(work: Mapping[int, float], n_hosts: int) -> tuple[IntArray, FloatArray]:
    """Return sets of hosts, and for each an amount of work that only its hosts can do, both [k].

    The sets are the unions of masks where those are fewer than all sets. A set may come more than once, with less than
    all of its work: the largest sum is right, and only that is asked for.
    """
    if len(work) <= n_hosts:
        sets, sums = np.zeros(1, np.int64), np.zeros(1)
        for mask, amount in work.items():
            sets, sums = np.concatenate([sets, sets | mask]), np.concatenate([sums, sums + amount])
        return sets[1:], sums[1:]
    sums = np.zeros(1 << n_hosts)
    for mask, amount in work.items():
        sums[mask] += amount
    for host in range(n_hosts):
        with_host = sums.reshape(-1, 2, 1 << host)
        with_host[:, 1] += with_host[:, 0]
    return np.arange(1, 1 << n_hosts), sums[1:]


def least_load(work: Mapping[int, float], speeds: Sequence[float]) -> float:
    """Return the load of the busiest host under the best split; `work` of a mask can be done by each of its hosts."""
    work = {mask: amount for mask, amount in work.items() if amount > 0}
    if not work:
        return 0.0
    sets, sums = sums_by_set(work, len(speeds))
    return float(np.max(sums / np.maximum(speeds_of_sets(tuple(speeds))[sets], EMPTY)))


def best_shares(work: Mapping[int, float], speeds: Sequence[float]) -> dict[int, FloatArray]:
    """Return for each mask which share of its work each host does, [n], so that the busiest host is least busy.

    Raises ValueError if some work can be done by no host with any speed.
    """
    limit = least_load(work, speeds)
    total = sum(work.values())
    if not limit < 1 / EMPTY * TOLERANCE:
        raise ValueError("no host can do some of the work")
    masks = sorted((mask for mask in work if work[mask] > 0), key=lambda mask: (mask.bit_count(), mask))
    left = [limit * speed for speed in speeds]
    done = {mask: np.zeros(len(speeds)) for mask in masks}
    for mask in masks:
        there = [host for host in range(len(speeds)) if mask >> host & 1]
        room = sum(left[host] for host in there)
        for host in there:  # in proportion to what is left, so that a part of every layer lies on the same host
            amount = min(left[host], work[mask] * left[host] / room) if room else 0.0
            done[mask][host] += amount
            left[host] -= amount
        missing = work[mask] - float(done[mask].sum())
        while missing > TOLERANCE * total:
            sent = _push(mask, missing, masks, done, left, TOLERANCE * total / 16)
            if not sent:
                break  # what is left is a rounding error
            missing -= sent
    return {mask: amounts / float(amounts.sum()) for mask, amounts in done.items()}


def _push(
    mask: int, most: float, masks: Sequence[int], done: dict[int, FloatArray], left: list[float], least: float
) -> float:
    """Do up to `most` more of a mask's work: find a way to a host with room, over work that others can take over."""
    came: dict[int, tuple[int, int]] = {}  # a host: the mask whose work would move to it, and from which host
    queue = deque((host, mask, -1) for host in range(len(left)) if mask >> host & 1)
    while queue:
        host, moved, source = queue.popleft()
        if host in came:
            continue
        came[host] = moved, source
        if left[host] > least:
            return _move_along(host, most, came, done, left)
        for other in masks:
            if done[other][host] > least:
                queue.extend((h, other, host) for h in range(len(left)) if other >> h & 1 and h not in came)
    return 0.0


def _move_along(
    end: int, most: float, came: Mapping[int, tuple[int, int]], done: dict[int, FloatArray], left: list[float]
) -> float:
    amount, host = min(most, left[end]), end
    while came[host][1] >= 0:
        moved, source = came[host]
        amount, host = min(amount, float(done[moved][source])), source
    left[end] -= amount
    host = end
    while True:
        moved, source = came[host]
        done[moved][host] += amount
        if source < 0:
            return amount
        done[moved][source] -= amount
        host = source
