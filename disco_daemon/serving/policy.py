"""Who runs until the next quantum: first come first served, round robin, and Andes. Pure.

Andes (Liu et al. 2024, arXiv 2404.16283, §4) asks for each request what its reader's QoE will be at a horizon if it is
served in a batch of B, Q_serve(B), and if it waits, Q_wait, and packs the batch with the largest sum of gains. Written
down as a decision, in the order of the code:

1. Selective triggering: if all fit and the iteration with all of them keeps every reader's pace, all run.
2. B goes from B_min, the largest batch that keeps the most stringent pace, to B_max, the most that fit. In between the
   value is smooth and flat at its top, so N_SIZES sizes in equal ratios are looked at, not all.
3. Gains for each B; who runs keeps its place against an equal gain (hysteresis).
4. Packing (`packing`).
5. Preemption cap P: so many preemptions for each request seen, and no more; else who runs goes on running.
6. Starvation: who waited longer than `max_wait_s` comes first, within a share of the room, and runs to its end.

Room. A newcomer finds room up to the high-water mark; those who run may grow on into the rest, and are taken off only
when all cells are used up. One that fits nowhere else is served alone. The caller takes the growth of one quantum off
the capacity it tells. A scheduler's mutable state: requests and preemptions counted, and the keys that rule 6 let in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .jobs import Capacity, Job
from .latency import IterationLatency
from .packing import FloatArray, IntArray, pack
from .timeline import Readers

HIGH_WATER = 0.9  # share of the cells filled by newcomers; Andes triggers at high memory use, too
HORIZON_S = 20.0  # how far ahead QoE is predicted: an answer's typical length; see `disco bench qoe --simulate`
MAX_WAIT_S = 120.0  # somebody who waited two minutes is served, whatever it does to the average
AGED_SHARE = 1 / 16  # of cells and sequences, at least one: for those who waited too long
N_SIZES = 5  # batch sizes looked at
HYSTERESIS = 0.03  # QoE: what a challenger must bring more than one who runs, besides the time it needs to begin
WANTED_SHARE = 0.95  # of the preemptions under the cap; the rest is for those that growing answers force
PERFECT = 1.0 - 1e-3  # a QoE that counts as perfect: discrete tokens miss 1 by a rounding
TIE = 0.02  # share of the average objective in the others, which are indifferent to most choices


LARGE = 1e9  # beyond any gain
NEVER_S = 1e9  # a time between tokens beyond all horizons

BoolArray = NDArray[np.bool_]


class Objective(StrEnum):
    """What is made as large as possible (Andes §4.1)."""

    AVERAGE = "average"
    MAX_MIN = "max-min"
    PERFECT = "perfect"


class TokenScheduler(Protocol):
    """A rule that says who runs."""

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """Who runs until the next call, in the order of admission; `now` in s by the jobs' clock.

        `jobs` are all that want tokens now, in any order; what is not among them any more has ended.
        """


class Fcfs:
    """First come, first served: who runs goes on, then by arrival, until one does not fit."""

    def __init__(self, high_water: float = HIGH_WATER) -> None:
        self._high_water = _checked_share(high_water)

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`. Who has to be taken off, as cells run out, came last, and comes back first."""
        running = sorted((job for job in jobs if job.running), key=_arrived)
        waiting = sorted((job for job in jobs if not job.running), key=_arrived)
        return _in_turn(running, waiting, capacity, self._high_water)


class RoundRobin:
    """Everybody in turn, for `slice_s` at a time; who waits longest is next."""

    def __init__(self, slice_s: float = 2.0, high_water: float = HIGH_WATER) -> None:
        if not slice_s > 0:
            raise ValueError("a slice of time must be positive")
        self._slice_s = slice_s
        self._high_water = _checked_share(high_water)
        self._since: dict[Hashable, float] = {}  # when who runs began to

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`."""
        running = [job for job in jobs if job.running]
        fresh = [job for job in running if now - self._since.get(job.key, now) < self._slice_s]
        tired = [job for job in running if now - self._since.get(job.key, now) >= self._slice_s]
        waiting = sorted((job for job in jobs if not job.running), key=_waited_from)
        chosen = _in_turn(sorted(fresh, key=self._began), [*waiting, *sorted(tired, key=self._began)], capacity,
                       self._high_water)  # fmt: skip
        self._since = {job.key: self._since.get(job.key, now) if job.running else now for job in chosen}
        return chosen

    def _began(self, job: Job) -> float:
        return self._since.get(job.key, 0.0)


class Andes:
    """The QoE-aware scheduler; the module says how it decides.

    `horizon_s` is how far QoE is predicted, `preemption_cap` is P, in preemptions per request; `max_wait_s` = inf turns
    the starvation bound off. Raises ValueError on a horizon or a bound that is not positive, a negative cap, and a
    high-water mark outside (0, 1].
    """

    def __init__(
        self,
        latency: IterationLatency,
        *,
        objective: Objective = Objective.AVERAGE,
        horizon_s: float = HORIZON_S,
        preemption_cap: float = 1.0,
        max_wait_s: float = MAX_WAIT_S,
        high_water: float = HIGH_WATER,
    ) -> None:
        if not (0 < horizon_s < np.inf and preemption_cap >= 0 and max_wait_s > 0):
            msg = f"no scheduler: horizon {horizon_s!r} s, cap {preemption_cap!r}, longest wait {max_wait_s!r} s"
            raise ValueError(msg)
        self.n_seen = 0  # requests
        self.n_preempted = 0  # times that somebody who ran was not chosen
        self._latency = latency
        self._objective = objective
        self._bonus = HYSTERESIS if objective is Objective.AVERAGE else HYSTERESIS * TIE
        self._horizon_s = horizon_s
        self._cap = preemption_cap
        self._max_wait_s = max_wait_s
        self._high_water = _checked_share(high_water)
        self._keys: set[Hashable] = set()
        self._aged: set[Hashable] = set()

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`. Who runs comes first, then by how much its reader gains."""
        if not jobs:
            return []
        self._count(jobs)
        batch = _Batch(jobs, capacity, self._high_water)
        gains = np.zeros(len(jobs))
        if self._all_may_run(batch):
            chosen = list(range(len(jobs)))
        else:
            allowed = max(int(WANTED_SHARE * self._cap * self.n_seen) - self.n_preempted, 0)
            starved = self._starved(batch, now)
            first = starved if allowed else batch.kept(starved)
            offers = self._offers(batch, now, first)
            if 0 < allowed < batch.n_running:
                first = batch.kept(starved, offers.least(batch, allowed))
            # Where most of the batch is given, the last few percent are not looked for.
            chosen, gains = offers.best(batch, first, rough=allowed < batch.n_running)
            chosen = chosen or batch.alone(gains)
        stays = batch.running[chosen]
        self.n_preempted += batch.n_running - int(np.count_nonzero(stays))
        worth = gains[chosen] / batch.cells[chosen]
        return [jobs[chosen[i]] for i in (worth + LARGE * stays).argsort()[::-1].tolist()]

    def _count(self, jobs: Sequence[Job]) -> None:
        keys = {job.key for job in jobs}
        self.n_seen += len(keys - self._keys)
        self._keys = keys

    # --- 1. to 4.: whether there is anything to decide, batch sizes, gains, packing -------------------------------

    def _all_may_run(self, batch: _Batch) -> bool:
        n, n_context = len(batch.jobs), batch.mean_cells * len(batch.jobs)
        if n > batch.capacity.n_seqs or n_context > batch.room:
            return False
        return self._latency.predict(n, 0, n_context) <= 1.0 / batch.pace

    def _offers(self, batch: _Batch, now: float, first: list[int]) -> _Offers:
        """What those gain who may be chosen: `first`, and who fits beside them."""
        others = batch.beside(first)
        if not len(others):
            return _Offers([], np.zeros((1, len(batch.jobs))), others)
        filled = np.sort(batch.cells[others]).cumsum()
        fitting = int(filled.searchsorted(batch.room - batch.used(first), "right"))
        sizes = self._sizes(batch, len(first), len(first) + fitting)
        near = np.concatenate((first, others)) if first else others
        return _Offers(sizes, self._gains(batch, near, now, self._tbt_s(batch, sizes)), others)

    def _sizes(self, batch: _Batch, n_first: int, largest: int) -> list[int]:
        """Batch sizes to be looked at, ascending, from B_min to B_max."""
        largest = max(min(largest, batch.capacity.n_seqs), 1)
        within = 1.0 / batch.pace
        smallest = bisect_right(range(1, largest + 1), within, key=lambda size: self._tbt_s(batch, [size])[0])
        smallest = max(smallest, n_first, 1)
        growth = (largest / smallest) ** (1.0 / (N_SIZES - 1))
        return sorted({round(smallest * growth**i) for i in range(N_SIZES)})

    def _tbt_s(self, batch: _Batch, sizes: Sequence[int]) -> list[float]:
        """Time between tokens in batches of these sizes, of jobs of mean context."""
        mean, room = batch.mean_cells, batch.room
        return [self._latency.predict(size, 0, min(size * mean, room)) for size in sizes]

    def _gains(self, batch: _Batch, near: IntArray, now: float, tbt_s: list[float]) -> FloatArray:
        """What each job [n] gains by running in a batch of each tbt [k], >= 0; 0 of those that are not in `near`."""
        everyone, jobs = len(near) == len(batch.jobs), batch.jobs
        if not everyone:
            jobs = [jobs[i] for i in near.tolist()]
        readers = batch.readers if everyone else batch.readers.only(near)
        per_token = self._latency.coefficients[2]
        delay_s = np.array([job.resume_s + per_token * job.n_missing for job in jobs])
        # The last row is that no token comes.
        predicted = readers.predicted(now, now + self._horizon_s, delay_s, np.array([*tbt_s, NEVER_S]))
        found = self._worth(predicted[:-1], predicted[-1], readers, now)
        if everyone:
            return found + self._bonus * batch.running
        gains = np.zeros((len(tbt_s), len(batch.jobs)))
        gains[:, near] = found + self._bonus * batch.running[near]
        return gains

    def _worth(self, served: FloatArray, waits: FloatArray, readers: Readers, now: float) -> FloatArray:
        """The objective's gain [k, n] of being served instead of waiting (Andes §4.1)."""
        gains: FloatArray = np.maximum(served - waits, 0.0)
        if self._objective is Objective.AVERAGE:
            return gains
        current = readers.qoe(now)
        if self._objective is Objective.MAX_MIN:
            below: FloatArray = np.maximum(current.min() - waits, 0.0)
            return below + TIE * gains
        kept: FloatArray = ((served >= PERFECT) & (waits < PERFECT) & (current >= PERFECT)).astype(float)
        return kept + TIE * gains

    # --- 5. and 6.: the two bounds --------------------------------------------------------------------------------

    def _starved(self, batch: _Batch, now: float) -> list[int]:
        """Who is served first for having waited too long: those let in before, then by time waited."""
        self._aged &= self._keys
        since = now - self._max_wait_s
        late = [
            (batch.jobs[i].key not in self._aged, now if waited is None else waited, i)
            for i, waited in enumerate(batch.since)
            if (waited is not None and waited < since) or (self._aged and batch.jobs[i].key in self._aged)
        ]
        if not late:
            return []
        share = Capacity(int(AGED_SHARE * batch.capacity.n_cells), int(AGED_SHARE * batch.capacity.n_seqs))
        order = [i for _, _, i in sorted(late)]
        first = _fitting(order, batch.cells, share) or _fitting(order, batch.cells, batch.capacity)[:1]
        self._aged = {batch.jobs[i].key for i in first}
        return first


class _Batch:
    """The jobs of one decision as arrays [n], and the room for them."""

    __slots__ = ("capacity", "cells", "jobs", "mean_cells", "n_running", "pace", "readers", "room", "running", "since")

    def __init__(self, jobs: Sequence[Job], capacity: Capacity, high_water: float) -> None:
        self.jobs = jobs
        self.capacity = capacity
        self.cells: FloatArray = np.array([job.n_context or 1 for job in jobs], float)
        self.since = [job.waiting_since for job in jobs]
        self.running: BoolArray = np.array([since is None for since in self.since])
        # Who runs may have grown above the high-water mark.
        self.n_running = int(np.count_nonzero(self.running))
        grown = min(float(self.cells[self.running].sum()), float(capacity.n_cells))
        self.room = max(high_water * capacity.n_cells, grown)
        self.mean_cells = float(self.cells.sum()) / len(jobs)
        self.readers = Readers([job.timeline for job in jobs])
        self.pace = float(self.readers.pace.max())  # the most stringent

    def used(self, chosen: list[int]) -> float:
        """Cells of the chosen."""
        return float(self.cells[chosen].sum()) if chosen else 0.0

    def kept(self, starved: list[int], leaving: IntArray | None = None) -> list[int]:
        """Who runs but for those `leaving`, then the starved, as they fit; whose stock ends first, comes first."""
        stays = self.running
        if leaving is not None:
            stays = stays.copy()
            stays[leaving] = False
        order = stays.nonzero()[0]
        if len(order) > self.capacity.n_seqs or self.cells[order].sum() > self.capacity.n_cells:
            order = order[(self.readers.arrived + self.readers.free)[order].argsort()]
        return _fitting([*order.tolist(), *(i for i in starved if not self.running[i])], self.cells, self.capacity)

    def beside(self, first: list[int]) -> IntArray:
        """Who would fit beside `first`."""
        if len(first) >= self.capacity.n_seqs:
            return np.zeros(0, int)
        fits = self.cells <= self.room - self.used(first)
        fits[first] = False
        others: IntArray = fits.nonzero()[0]
        return others

    def alone(self, gains: FloatArray) -> list[int]:
        """The best one that fits all the cells, though not below the high-water mark."""
        fitting = np.flatnonzero(self.cells <= self.capacity.n_cells)
        return [int(fitting[gains[fitting].argmax()])] if len(fitting) and self.capacity.n_seqs else []


@dataclass(frozen=True, slots=True)
class _Offers:
    """Batch sizes [k], what each job gains in each of them [k, n], and who `may` be chosen."""

    sizes: list[int]
    gains: FloatArray
    may: IntArray

    def least(self, batch: _Batch, n: int) -> IntArray:
        """The n of those who run whose place is worth least."""
        running: IntArray = batch.running.nonzero()[0]
        order = (self.gains[-1, running] / batch.cells[running]).argsort()
        least: IntArray = running[order[:n]]
        return least

    def best(self, batch: _Batch, first: list[int], *, rough: bool) -> tuple[list[int], FloatArray]:
        """`first`, and who makes the most of the room beside them; and the gains [n] in that batch."""
        left, n = batch.room - batch.used(first), len(first)
        fits = batch.cells <= left
        if first:
            fits[first] = False
        others = self.may[fits[self.may]]
        if not len(others) or n >= batch.capacity.n_seqs:
            return first, self.gains[-1]
        large = bisect_left(self.sizes, n + 1)
        sizes, gains = (self.sizes[large:], self.gains[large:]) if large < len(self.sizes) else ([n], self.gains[-1:])
        base = gains[:, first].sum(axis=1) if first else 0.0
        row, more = pack(gains[:, others], batch.cells[others], [size - n for size in sizes], left, base, rough=rough)
        return [*first, *others[more].tolist()], gains[row]


def _fitting(order: Iterable[int], cells: FloatArray, capacity: Capacity) -> list[int]:
    """Jobs by `order`, skipping what does not fit."""
    left, chosen = float(capacity.n_cells), list[int]()
    for i in order:
        if len(chosen) < capacity.n_seqs and cells[i] <= left:
            left -= cells[i]
            chosen.append(i)
    return chosen


def _in_turn(running: Sequence[Job], queue: Sequence[Job], capacity: Capacity, high_water: float) -> list[Job]:
    """Who runs goes on while all cells last; then the queue up to the high-water mark, until one does not fit.

    One that is larger than all cells is passed over: it would wait, and let wait, for ever.
    """
    chosen: list[Job] = []
    used = 0
    for n, job in enumerate((*running, *queue)):
        if job.n_context > capacity.n_cells:
            continue
        room = high_water * capacity.n_cells if chosen and n >= len(running) else capacity.n_cells
        if len(chosen) == capacity.n_seqs or used + job.n_context > room:
            break
        chosen.append(job)
        used += job.n_context
    return chosen


def _arrived(job: Job) -> float:
    return job.timeline.arrived_s


def _waited_from(job: Job) -> float:
    return job.timeline.arrived_s if job.waiting_since is None else job.waiting_since


def _checked_share(share: float) -> float:
    if not 0 < share <= 1:
        msg = f"the high-water mark is a share of the cells, in (0, 1], not {share!r}"
        raise ValueError(msg)
    return share
