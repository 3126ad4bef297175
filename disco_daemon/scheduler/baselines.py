"""Schedulers to compare with: first come, first served, and round robin. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .jobs import HIGH_WATER, Capacity, Job, checked_high_water


class Fcfs:
    """First come, first served: running jobs go on, then jobs by arrival, until one does not fit."""

    def __init__(self, high_water: float = HIGH_WATER) -> None:
        self._high_water = checked_high_water(high_water)

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`. When cells run out, the job that came last is preempted, and comes back first."""
        running = sorted((job for job in jobs if job.running), key=_arrived)
        waiting = sorted((job for job in jobs if not job.running), key=_arrived)
        return _admitted(running, waiting, capacity, self._high_water)


class RoundRobin:
    """Each job in turn, for `slice_s` at a time; the one that has waited longest is next."""

    def __init__(self, slice_s: float = 2.0, high_water: float = HIGH_WATER) -> None:
        if not slice_s > 0:
            raise ValueError("a slice of time must be positive")
        self._slice_s = slice_s
        self._high_water = checked_high_water(high_water)
        self._since: dict[Hashable, float] = {}  # when each running job began its slice

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """See `TokenScheduler`."""
        running = [job for job in jobs if job.running]
        fresh = [job for job in running if now - self._since.get(job.key, now) < self._slice_s]
        tired = [job for job in running if now - self._since.get(job.key, now) >= self._slice_s]
        waiting = sorted((job for job in jobs if not job.running), key=_waited_from)
        queue = [*waiting, *sorted(tired, key=self._began)]
        chosen = _admitted(sorted(fresh, key=self._began), queue, capacity, self._high_water)
        self._since = {job.key: self._since.get(job.key, now) if job.running else now for job in chosen}
        return chosen

    def _began(self, job: Job) -> float:
        return self._since.get(job.key, 0.0)


def _admitted(running: Sequence[Job], queue: Sequence[Job], capacity: Capacity, high_water: float) -> list[Job]:
    """Return the running jobs as long as all cells last, then the queue up to the high-water mark.

    The first job that does not fit ends it. One that is larger than all cells is passed over: it would wait, and keep
    the others waiting, for ever.
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
