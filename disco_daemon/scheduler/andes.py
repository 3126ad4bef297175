"""The QoE-aware scheduler of Andes (Liu et al. 2024, arXiv 2404.16283, §4). Pure.

For each job it asks what its reader's QoE will be at a horizon if it is served in a batch of B, Q_serve(B), and if it
waits, Q_wait; it packs the batch with the largest sum of gains. `Andes.choose` has the decision step by step. Why the
steps are as they are:

Selective triggering. A hurried reader names no pace, and is content as one of SIDE_BY_SIDE: fewer answers at a time get
no more tokens in all, and some get none.

Batch sizes. B goes from B_min, the largest batch that keeps the most stringent pace, to B_max, the most that fit. In
between the value is smooth and flat at its top, so N_SIZES sizes in equal ratios are looked at, not all.

Gains. The horizon is twice as far ahead as the jobs have been here on average: they are here as long as the queue is. A
running job keeps its place unless a challenger gains half as much again (hysteresis).

Preemption cap. There are P preemptions for each request seen, and no more.

Begun answers. Unless all readers may be made to stand still, as in the paper, a begun answer is served before its
reader has read all there is, and newcomers wait at the door (`begun_answers`).

Starvation. A job that has waited longer than `max_wait_s` is let in, within a share of the room, and runs to its end.

Room. A newcomer finds room up to the high-water mark; running jobs may grow on into the rest, and are preempted only
when all cells are used up. The caller subtracts the growth of one quantum from the capacity it passes. A scheduler's
mutable state: requests and preemptions counted, and the keys of the starved jobs it has let in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray, IntArray
from .begun_answers import BegunAnswers, BegunJobs
from .candidates import Candidates, fitting, n_fitting
from .jobs import HIGH_WATER, Capacity, Job, checked_high_water
from .latency import LEAST_S, IterationLatency
from .packing import pack
from .timeline import Readers

SIDE_BY_SIDE = 16  # hurried readers all run; only if there are more do some of them have to wait
HORIZON_S = 20.0  # how far ahead QoE is predicted, at least: an answer's typical length
AGES = 2.0  # how far in times the mean age of all jobs: a late job is given up only if that helps for long
MAX_WAIT_S = 120.0  # a job that has waited two minutes is served, whatever it does to the average
AGED_SHARE = 1 / 16  # of cells and sequences, at least one: for starved jobs
N_SIZES = 5  # batch sizes looked at
HYSTERESIS = 0.5  # share by which a challenger must gain more than a running job: a swap costs all of them time
EVEN = 1e-6  # QoE, on top of each gain: without any gain, too, a running job stays
# Of the readers, those whose begun answer may stand still. At twice the capacity 0.15 costs a tenth of the mean QoE,
# and less than half as many readers stand still for over 10 s as with 1, the paper's (docs/lab/serving.md).
STALL_SHARE = 0.15
WANTED_SHARE = 0.8  # of the preemptions under the cap; the rest is for those that growing answers force
ONE_BY_ONE = 8  # jobs, whose gains are computed sooner one by one than by numpy for all
FEW = 256  # jobs, of which it is quicker to look at all than to pick some out
TRIFLE_S = 1e-12  # s per sequence: less is none
STAYS = np.array([1.0 + HYSTERESIS, 1.0])  # factors of gains: of a job that runs, and of one that waits


class Andes:
    """The QoE-aware scheduler; see `choose` for how it decides.

    `horizon_s` is how far QoE is predicted at least, `preemption_cap` is P, in preemptions per request; `max_wait_s` of
    inf turns the starvation bound off. `stall_share` of the readers may be made to stand still; 1, as in the paper, is
    anybody. Raises ValueError on a horizon or a bound that is not positive, a negative cap, a share that is none, and a
    high-water mark outside (0, 1].
    """

    def __init__(
        self,
        latency: IterationLatency,
        *,
        horizon_s: float = HORIZON_S,
        preemption_cap: float = 1.0,
        max_wait_s: float = MAX_WAIT_S,
        high_water: float = HIGH_WATER,
        stall_share: float = STALL_SHARE,
    ) -> None:
        if not (0 < horizon_s < np.inf and preemption_cap >= 0 and max_wait_s > 0 and 0 <= stall_share <= 1):
            msg = (
                f"no scheduler: horizon {horizon_s!r} s, cap {preemption_cap!r}, longest wait {max_wait_s!r} s, "
                f"share that may stand still {stall_share!r}"
            )
            raise ValueError(msg)
        self.n_seen = 0  # requests
        self.n_preempted = 0  # times that a running job was not chosen
        self._latency = latency
        self._horizon_s = horizon_s
        self._cap = preemption_cap
        self._max_wait_s = max_wait_s
        self._high_water = checked_high_water(high_water)
        self._begun = BegunAnswers(stall_share) if stall_share < 1 else None
        self._keys: set[Hashable] = set()
        self._aged: set[Hashable] = set()

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`. Running jobs come first, then the others by what their readers gain for their cells.

        1. If all jobs fit, and an iteration with all of them keeps every reader's pace, all run.
        2. Starved jobs come first. If no preemption is left under the cap, all running jobs come first, too. So do
           begun answers whose readers have little left to read, unless they may stand still.
        3. If all begun answers that may not stand still fit, beside newcomers as far as the door is open, and the pace
           of all is kept, they run.
        4. For several batch sizes, compute what each job that fits beside the first ones gains at the horizon.
        5. If only some preemptions are left, running jobs come first but for those whose place is worth least.
        6. Pack the room that the first ones leave with the largest sum of gains, newcomers as far as the door is open.
        7. If nothing fits, the job that gains most runs alone.
        """
        if not jobs:
            return []
        candidates = Candidates(jobs, capacity, self._high_water)
        self._count(candidates.keys)
        # 1. Selective triggering.
        if self._all_may_run(candidates):
            return self._in_order(candidates, list(range(len(jobs))), candidates.cells)
        # 2. Starvation, and a preemption cap that is used up.
        allowed = max(int(WANTED_SHARE * self._cap * self.n_seen) - self.n_preempted, 0)
        starved = self._starved(candidates, now)
        begun = self._begun.sort(candidates, self.n_seen) if self._begun is not None else None
        # 3. Nothing to choose.
        if begun is not None and not starved and (undisputed := self._undisputed(candidates, begun, now, allowed)):
            return self._in_order(candidates, *undisputed)
        if begun is not None:
            starved = [*starved, *(i for i in begun.first(candidates, now) if i not in starved)]
        first = fitting(starved, candidates.needs, capacity) if allowed else candidates.keep(starved)
        # 4. Batch sizes and gains.
        offers = self._offers(candidates, now, first)
        # 5. A preemption cap that is nearly used up.
        n_running = len(candidates.running)
        if 0 < allowed < n_running:
            first = candidates.keep(starved, offers.least(candidates, allowed))
        # 6. Packing; where most of the batch is fixed, the last few percent are not looked for.
        chosen, gains = offers.best(candidates, first, rough=allowed < n_running, begun=begun)
        # 7. One alone.
        return self._in_order(candidates, chosen or candidates.alone(gains), gains)

    def _in_order(self, candidates: Candidates, chosen: list[int], gains: FloatArray | None) -> list[Job]:
        """Return the chosen jobs, running ones first, then by gain per cell; count the others that ran as preempted.

        Without gains they stay in their order.
        """
        stays = [i for i in chosen if candidates.since[i] is None]
        self.n_preempted += len(candidates.running) - len(stays)
        others = [i for i in chosen if candidates.since[i] is not None]
        if len(others) > 1 and gains is not None:
            worth = (gains[others] / candidates.cells[others]).tolist()
            others = [i for _, i in sorted(zip(worth, others, strict=True), reverse=True)]
        return [candidates.jobs[i] for i in (*stays, *others)]

    def _count(self, present: Sequence[Hashable]) -> None:
        keys = set(present)
        self.n_seen += len(keys - self._keys)
        self._keys = keys

    # --- triggering, batch sizes, gains ---------------------------------------------------------------------------

    def _all_may_run(self, candidates: Candidates) -> bool:
        n = len(candidates.jobs)
        if n > candidates.capacity.n_seqs or candidates.n_context > candidates.room:
            return False
        if candidates.hurried and n > SIDE_BY_SIDE:
            return False
        return self._latency.predict(n, 0, candidates.n_context) <= candidates.least_tbt_s

    def _undisputed(
        self, candidates: Candidates, begun: BegunJobs, now: float, allowed: int
    ) -> tuple[list[int], FloatArray | None] | None:
        """Return all that stay, the newcomers that enter and those given up that fit beside, and gains to order them.

        None if they do not all fit or keep the pace, if the cap on preemptions might keep others, or if readers have no
        pace: then there is something to choose. Gains are computed only where more than one order is possible.
        """
        n_running, n_seqs = len(candidates.running), candidates.capacity.n_seqs
        if begun.room < 0 or candidates.hurried:
            return None
        if allowed < n_running and not all(candidates.waits[begun.given_up].tolist()):
            return None
        entering = (begun.new & (candidates.cells <= begun.room)).nonzero()[0]
        chosen: list[int] = begun.stays.nonzero()[0].tolist()
        ordered = [*entering.tolist(), *(begun.stays & candidates.waits).nonzero()[0].tolist()]
        tbt_s = self._tbt_s(candidates, [len(chosen) + len(entering)])
        if len(ordered) <= 1:
            gains = None
            chosen += entering.tolist()
        else:
            gains = self._gains_of(candidates, ordered, now, tbt_s)
            chosen += begun.admit(candidates, gains, entering)
        n, used = len(chosen), candidates.used(chosen)
        if not 0 < n <= n_seqs or self._latency.predict(n, 0, used) > candidates.least_tbt_s:
            return None
        chosen = begun.fill(candidates, chosen)
        more = [i for i in chosen[n:] if candidates.since[i] is not None]
        if more and gains is not None and len(ordered) <= ONE_BY_ONE:
            gains += self._gains_of(candidates, more[:ONE_BY_ONE], now, tbt_s)
        return chosen, gains

    def _offers(self, candidates: Candidates, now: float, first: list[int]) -> _Offers:
        """Compute what the jobs gain that may be chosen: `first`, and those that fit beside them."""
        others = candidates.beside(first)
        if not len(others):
            return _Offers([], np.zeros((1, len(candidates.jobs))), others, first)
        n_more = n_fitting(candidates.cells[others].tolist(), candidates.room - candidates.used(first))
        sizes = self._sizes(candidates, len(first), len(first) + n_more)
        near = None
        if len(first) + len(others) < len(candidates.jobs):
            near = np.concatenate((first, others)) if first else others
        return _Offers(sizes, self._gains(candidates, near, now, self._tbt_s(candidates, sizes)), others, first)

    def _sizes(self, candidates: Candidates, n_first: int, largest: int) -> list[int]:
        """Return the batch sizes to look at, ascending, from B_min to B_max."""
        largest = max(min(largest, candidates.capacity.n_seqs), 1)
        calm = self._within(candidates, candidates.least_tbt_s)
        smallest = min(max(min(calm, SIDE_BY_SIDE) if candidates.hurried else calm, n_first, 1), largest)
        if smallest == largest:
            return [largest]
        growth = (largest / smallest) ** (1.0 / (N_SIZES - 1))
        return sorted({round(smallest * growth**i) for i in range(N_SIZES)})

    def _within(self, candidates: Candidates, tbt_s: float) -> int:
        """Return the largest batch of jobs of mean context with at most `tbt_s` between tokens: `_tbt_s` inverted.

        Two lines: as long as there is room each job brings its cells, from then on the cells are all read.
        """
        base, sequence, _, cell = self._latency.coefficients
        growing = (tbt_s - base) / max(sequence + cell * candidates.mean_cells, TRIFLE_S)
        full = (tbt_s - base - cell * candidates.room) / max(sequence, TRIFLE_S)
        return int(min(max(growing, full), len(candidates.jobs)))

    def _tbt_s(self, candidates: Candidates, sizes: Sequence[int]) -> list[float]:
        """Predict the time between tokens in batches of these sizes, of jobs of mean context, s."""
        base, sequence, _, cell = self._latency.coefficients
        mean, room = candidates.mean_cells, candidates.room
        return [max(base + sequence * size + cell * min(size * mean, room), LEAST_S) for size in sizes]

    def _gains_of(self, candidates: Candidates, waiting: list[int], now: float, tbt_s: list[float]) -> FloatArray:
        """Compute `_gains` in one batch, [n], for some jobs that wait: one by one where they are few, else for all."""
        gains: FloatArray
        if len(waiting) > ONE_BY_ONE:
            gains = self._gains(candidates, None, now, tbt_s)[0]
            return gains
        gains, per_token = np.zeros(len(candidates.jobs)), self._latency.coefficients[2]
        until, (step_s,) = now + horizon_s(candidates.readers, now, self._horizon_s), tbt_s
        for i in waiting:
            job = candidates.jobs[i]
            delay_s = job.resume_s + per_token * job.n_missing
            served = job.timeline.predicted(now, until, now + delay_s + step_s, step_s)
            gains[i] = max(served - job.timeline.qoe(until), 0.0) + EVEN
        return gains

    def _gains(self, candidates: Candidates, near: IntArray | None, now: float, tbt_s: list[float]) -> FloatArray:
        """Compute what average QoE gains by serving instead of waiting, for each job in a batch of each `tbt_s` [k].

        [k, n], >= 0 (Andes §4.1); 0 for jobs that are not `near`, which None says all are.
        """
        jobs, readers, n = candidates.jobs, candidates.readers, len(candidates.jobs)
        stays = STAYS[candidates.waits.view(np.int8)]
        picked = near if n > FEW else None
        if picked is not None:
            jobs, readers, stays = [jobs[i] for i in picked.tolist()], readers.only(picked), stays[picked]
        elif near is not None:
            stays *= _mask(n, near)
        per_token = self._latency.coefficients[2]
        delay_s = np.frombuffer(array("d", [job.resume_s + per_token * job.n_missing for job in jobs]))
        until = now + horizon_s(candidates.readers, now, self._horizon_s)
        gains = readers.predicted(now, until, delay_s, tbt_s)
        gains -= readers.qoe(until)
        np.maximum(gains, 0.0, out=gains)
        gains += EVEN
        gains *= stays
        if picked is None:
            return gains
        all_gains = np.zeros((len(tbt_s), n))
        all_gains[:, picked] = gains
        return all_gains

    # --- starvation -----------------------------------------------------------------------------------------------

    def _starved(self, candidates: Candidates, now: float) -> list[int]:
        """Return the jobs served first because they have waited too long: those let in before, then by time waited."""
        self._aged &= self._keys
        since, aged, keys = now - self._max_wait_s, self._aged, candidates.keys
        if not aged and not candidates.longest_wait < since:
            return []
        late = [
            (keys[i] not in aged, now if waited is None else waited, i)
            for i, waited in enumerate(candidates.since)
            if (waited is not None and waited < since) or (aged and keys[i] in aged)
        ]
        if not late:
            return []
        cells, capacity = candidates.needs, candidates.capacity
        share = Capacity(int(AGED_SHARE * capacity.n_cells), int(AGED_SHARE * capacity.n_seqs))
        order = [i for _, _, i in sorted(late)]
        first = fitting(order, cells, share) or fitting(order, cells, capacity)[:1]
        self._aged = {keys[i] for i in first}
        return first


def horizon_s(readers: Readers, now: float, least_s: float) -> float:
    """Return how far ahead QoE is predicted, s."""
    return max(least_s, AGES * (now - float(np.add.reduce(readers.arrived)) / len(readers.arrived)))


@dataclass(frozen=True, slots=True)
class _Offers:
    """Batch sizes [k], the gains of each job in each of them [k, n], and the jobs that `may` be chosen.

    Each of these fits in `beside` the jobs of that list.
    """

    sizes: list[int]
    gains: FloatArray
    may: IntArray
    beside: list[int]

    def least(self, candidates: Candidates, n: int) -> set[int]:
        """Return the `n` running jobs whose place is worth least."""
        worth = (self.gains[-1, candidates.running] / candidates.cells[candidates.running]).tolist()
        return {i for _, i in sorted(zip(worth, candidates.running, strict=True))[:n]}

    def best(
        self, candidates: Candidates, first: list[int], *, rough: bool, begun: BegunJobs | None
    ) -> tuple[list[int], FloatArray]:
        """Return `first` with the jobs that make the most of the room beside them, and the gains [n] in that batch."""
        if begun is None:
            return self._packed(candidates, first, self.may, rough=rough)
        others = begun.may_enter(candidates, self.gains[-1], self.may)
        chosen, gains = self._packed(candidates, first, others, rough=rough)
        return begun.fill(candidates, chosen), gains

    def _packed(
        self, candidates: Candidates, first: list[int], others: IntArray, *, rough: bool
    ) -> tuple[list[int], FloatArray]:
        left, n = candidates.room - candidates.used(first), len(first)
        if first is not self.beside:
            fits = candidates.cells <= left
            fits[first] = False
            others = others[fits[others]]
        if not len(others) or n >= candidates.capacity.n_seqs:
            return first, self.gains[-1]
        large = bisect_left(self.sizes, n + 1)
        sizes, gains = (self.sizes[large:], self.gains[large:]) if large < len(self.sizes) else ([n], self.gains[-1:])
        prices = candidates.prices
        if len(others) == len(candidates.cells):
            row, more = pack(gains, candidates.cells, sizes, left, rough=rough, prices=prices)
            return more, gains[row]
        base = gains[:, first].sum(axis=1) if first else 0.0
        cells = candidates.cells[others]
        if prices is not None:
            prices = prices[others]
        row, more = pack(gains[:, others], cells, [size - n for size in sizes], left, base, rough=rough, prices=prices)
        return [*first, *others[more].tolist()], gains[row]


def _mask(n: int, near: IntArray) -> FloatArray:
    """Return 1 [n] for some jobs, and 0 for all others."""
    mask = np.zeros(n)
    mask[near] = 1.0
    return mask
