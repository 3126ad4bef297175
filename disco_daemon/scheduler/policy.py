"""Who runs until the next quantum: first come first served, round robin, and Andes. Pure.

Andes (Liu et al. 2024, arXiv 2404.16283, §4) asks for each request what its reader's QoE will be at a horizon if it is
served in a batch of B, Q_serve(B), and if it waits, Q_wait, and packs the batch with the largest sum of gains. Written
down as a decision, in the order of the code:

1. Selective triggering: if all fit and the iteration with all of them keeps every reader's pace, all run. Who is in a
   hurry names no pace, and is content as one of SIDE_BY_SIDE: fewer get no more tokens in all, and some get none.
2. B goes from B_min, the largest batch that keeps the most stringent pace, to B_max, the most that fit. In between the
   value is smooth and flat at its top, so N_SIZES sizes in equal ratios are looked at, not all.
3. Gains for each B, at a horizon: twice as far ahead as those here have been here, who is here as long as the queue
   is. Who runs keeps its place unless a challenger gains half as much again (hysteresis).
4. Packing (`packing`).
5. Preemption cap P: so many preemptions for each request seen, and no more; else who runs goes on running.
6. Starvation: who waited longer than `max_wait_s` comes first, within a share of the room, and runs to its end.

Room. A newcomer finds room up to the high-water mark; those who run may grow on into the rest, and are taken off only
when all cells are used up. One that fits nowhere else is served alone. The caller takes the growth of one quantum off
the capacity it tells. A scheduler's mutable state: requests and preemptions counted, and the keys that rule 6 let in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from .candidates import Batch, fitting, n_fitting
from .jobs import Capacity, Job
from .latency import LEAST_S, IterationLatency
from .packing import FloatArray, IntArray, pack
from .timeline import Readers

SIDE_BY_SIDE = 16  # clients in a hurry all run; only if there are more do some of them have to wait
HIGH_WATER = 0.9  # share of the cells filled by newcomers; Andes triggers at high memory use, too
HORIZON_S = 20.0  # how far ahead QoE is predicted, at least: an answer's typical length
AGES = 2.0  # how far in times the mean age of all jobs: who is behind is given up only if that helps for long
MAX_WAIT_S = 120.0  # somebody who waited two minutes is served, whatever it does to the average
AGED_SHARE = 1 / 16  # of cells and sequences, at least one: for those who waited too long
N_SIZES = 5  # batch sizes looked at
HYSTERESIS = 0.5  # share by which a challenger must bring more than one who runs: a swap costs all of them time
EVEN = 1e-6  # QoE, on top of each gain: without one, too, who runs stays
WANTED_SHARE = 0.8  # of the preemptions under the cap; the rest is for those that growing answers force
PERFECT = 1.0 - 1e-3  # a QoE that counts as perfect: discrete tokens miss 1 by a rounding
TIE = 0.02  # share of the average objective in the others, which are indifferent to most choices


TRIFLE_S = 1e-12  # s per sequence: less is none


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

    `horizon_s` is how far QoE is predicted at least, `preemption_cap` is P, in preemptions per request; `max_wait_s` of
    inf turns the starvation bound off. Raises ValueError on a horizon or a bound that is not positive, a negative cap,
    and a high-water mark outside (0, 1].
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
        batch = Batch(jobs, capacity, self._high_water)
        if self._all_may_run(batch):
            return self._in_order(batch, list(range(len(jobs))), batch.cells)
        allowed = max(int(WANTED_SHARE * self._cap * self.n_seen) - self.n_preempted, 0)
        n_running = len(batch.running)
        starved = self._starved(batch, now)
        first = starved if allowed else batch.kept(starved)
        offers = self._offers(batch, now, first)
        if 0 < allowed < n_running:
            first = batch.kept(starved, offers.least(batch, allowed))
        # Where most of the batch is given, the last few percent are not looked for.
        chosen, gains = offers.best(batch, first, rough=allowed < n_running)
        return self._in_order(batch, chosen or batch.alone(gains), gains)

    def _in_order(self, batch: Batch, chosen: list[int], gains: FloatArray) -> list[Job]:
        """Who goes on, then the others by what they gain for their cells; the rest of those who ran is preempted."""
        stays = [i for i in chosen if batch.since[i] is None]
        self.n_preempted += len(batch.running) - len(stays)
        others = [i for i in chosen if batch.since[i] is not None]
        if len(others) > 1:
            worth = (gains[others] / batch.cells[others]).tolist()
            others = [i for _, i in sorted(zip(worth, others, strict=True), reverse=True)]
        return [batch.jobs[i] for i in (*stays, *others)]

    def _count(self, jobs: Sequence[Job]) -> None:
        keys = {job.key for job in jobs}
        self.n_seen += len(keys - self._keys)
        self._keys = keys

    # --- 1. to 4.: whether there is anything to decide, batch sizes, gains, packing -------------------------------

    def _all_may_run(self, batch: Batch) -> bool:
        n = len(batch.jobs)
        if n > batch.capacity.n_seqs or batch.n_context > batch.room:
            return False
        if batch.hurried and n > SIDE_BY_SIDE:
            return False
        return self._latency.predict(n, 0, batch.n_context) <= batch.least_tbt_s

    def _offers(self, batch: Batch, now: float, first: list[int]) -> _Offers:
        """What those gain who may be chosen: `first`, and who fits beside them."""
        others = batch.beside(first)
        if not len(others):
            return _Offers([], np.zeros((1, len(batch.jobs))), others)
        n_more = n_fitting(batch.cells[others].tolist(), batch.room - batch.used(first))
        sizes = self._sizes(batch, len(first), len(first) + n_more)
        near = np.concatenate((first, others)) if first else others
        return _Offers(sizes, self._gains(batch, near, now, self._tbt_s(batch, sizes)), others)

    def _sizes(self, batch: Batch, n_first: int, largest: int) -> list[int]:
        """Batch sizes to be looked at, ascending, from B_min to B_max."""
        largest = max(min(largest, batch.capacity.n_seqs), 1)
        calm = self._within(batch, batch.least_tbt_s)
        smallest = min(max(min(calm, SIDE_BY_SIDE) if batch.hurried else calm, n_first, 1), largest)
        if smallest == largest:
            return [largest]
        growth = (largest / smallest) ** (1.0 / (N_SIZES - 1))
        return sorted({round(smallest * growth**i) for i in range(N_SIZES)})

    def _within(self, batch: Batch, tbt_s: float) -> int:
        """The largest batch of jobs of mean context with at most `tbt_s` between tokens: `_tbt_s` the other way round.

        Two lines: as long as there is room each job brings its cells, from then on the cells are all read.
        """
        base, sequence, _, cell = self._latency.coefficients
        growing = (tbt_s - base) / max(sequence + cell * batch.mean_cells, TRIFLE_S)
        full = (tbt_s - base - cell * batch.room) / max(sequence, TRIFLE_S)
        return int(min(max(growing, full), len(batch.jobs)))

    def _tbt_s(self, batch: Batch, sizes: Sequence[int]) -> list[float]:
        """Time between tokens in batches of these sizes, of jobs of mean context."""
        base, sequence, _, cell = self._latency.coefficients
        mean, room = batch.mean_cells, batch.room
        return [max(base + sequence * size + cell * min(size * mean, room), LEAST_S) for size in sizes]

    def _gains(self, batch: Batch, near: IntArray, now: float, tbt_s: list[float]) -> FloatArray:
        """What each job [n] gains by running in a batch of each tbt [k], >= 0; 0 of those that are not in `near`."""
        everyone, jobs, readers = len(near) == len(batch.jobs), batch.jobs, batch.readers
        stays = np.ones(len(jobs))
        stays[batch.running] = 1.0 + HYSTERESIS
        if not everyone:
            jobs, readers, stays = [jobs[i] for i in near.tolist()], readers.only(near), stays[near]
        per_token = self._latency.coefficients[2]
        delay_s = np.frombuffer(array("d", [job.resume_s + per_token * job.n_missing for job in jobs]))
        until = now + horizon_s(batch.readers, now, self._horizon_s)
        served, waits = readers.predicted(now, until, delay_s, tbt_s), readers.qoe(until)
        found = self._worth(served, waits, readers, now, stays)
        if everyone:
            return found
        gains = np.zeros((len(tbt_s), len(batch.jobs)))
        gains[:, near] = found
        return gains

    def _worth(
        self, served: FloatArray, waits: FloatArray, readers: Readers, now: float, stays: FloatArray
    ) -> FloatArray:
        """The objective's gain [k, n] of being served instead of waiting (Andes §4.1); `stays` [n] are factors."""
        gains: FloatArray = served - waits
        for row in gains:  # at once is slower: of two shapes
            np.maximum(row, 0.0, out=row)
            row += EVEN
            row *= stays
        if self._objective is Objective.AVERAGE:
            return gains
        current = readers.qoe(now)
        if self._objective is Objective.MAX_MIN:
            below: FloatArray = np.maximum(current.min() - waits, 0.0)
            return below + TIE * gains
        kept: FloatArray = ((served >= PERFECT) & (waits < PERFECT) & (current >= PERFECT)).astype(float)
        return kept + TIE * gains

    # --- 5. and 6.: the two bounds --------------------------------------------------------------------------------

    def _starved(self, batch: Batch, now: float) -> list[int]:
        """Who is served first for having waited too long: those let in before, then by time waited."""
        self._aged &= self._keys
        since, aged = now - self._max_wait_s, self._aged
        if not aged and not [waited for waited in batch.since if waited is not None and waited < since]:
            return []
        late = [
            (batch.jobs[i].key not in aged, now if waited is None else waited, i)
            for i, waited in enumerate(batch.since)
            if (waited is not None and waited < since) or (aged and batch.jobs[i].key in aged)
        ]
        if not late:
            return []
        share = Capacity(int(AGED_SHARE * batch.capacity.n_cells), int(AGED_SHARE * batch.capacity.n_seqs))
        order = [i for _, _, i in sorted(late)]
        first = fitting(order, batch.cells, share) or fitting(order, batch.cells, batch.capacity)[:1]
        self._aged = {batch.jobs[i].key for i in first}
        return first


def horizon_s(readers: Readers, now: float, least_s: float) -> float:
    """How far ahead QoE is predicted, s."""
    return max(least_s, AGES * (now - float(readers.arrived.sum()) / len(readers.arrived)))


@dataclass(frozen=True, slots=True)
class _Offers:
    """Batch sizes [k], what each job gains in each of them [k, n], and who `may` be chosen."""

    sizes: list[int]
    gains: FloatArray
    may: IntArray

    def least(self, batch: Batch, n: int) -> set[int]:
        """The n of those who run whose place is worth least."""
        worth = (self.gains[-1, batch.running] / batch.cells[batch.running]).tolist()
        return {i for _, i in sorted(zip(worth, batch.running, strict=True))[:n]}

    def best(self, batch: Batch, first: list[int], *, rough: bool) -> tuple[list[int], FloatArray]:
        """`first`, and who makes the most of the room beside them; and the gains [n] in that batch."""
        left, n, others = batch.room - batch.used(first), len(first), self.may
        if first:
            fits = batch.cells <= left
            fits[first] = False
            others = others[fits[others]]
        if not len(others) or n >= batch.capacity.n_seqs:
            return first, self.gains[-1]
        large = bisect_left(self.sizes, n + 1)
        sizes, gains = (self.sizes[large:], self.gains[large:]) if large < len(self.sizes) else ([n], self.gains[-1:])
        if len(others) == len(batch.cells):
            row, more = pack(gains, batch.cells, sizes, left, rough=rough)
            return more, gains[row]
        base = gains[:, first].sum(axis=1) if first else 0.0
        row, more = pack(gains[:, others], batch.cells[others], [size - n for size in sizes], left, base, rough=rough)
        return [*first, *others[more].tolist()], gains[row]


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
