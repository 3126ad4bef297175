"""The jobs of one decision as arrays, the room for them, and which of them fit. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..arrays import FloatArray, IntArray
from .jobs import Capacity, Job
from .timeline import Readers


class Candidates:
    """The jobs of one decision as arrays [n], and the room for them; `running` has the indices of running jobs.

    `least_tbt_s` is the time between tokens that keeps the most stringent pace, s; inf if all are `hurried`. Jobs are
    named by their indices.
    """

    __slots__ = (
        "capacity", "cells", "hurried", "jobs", "least_tbt_s", "mean_cells", "n_context", "readers", "room", "running",
        "since",
    )  # fmt: skip

    def __init__(self, jobs: Sequence[Job], capacity: Capacity, high_water: float) -> None:
        self.jobs = jobs
        self.capacity = capacity
        cells = [job.n_context or 1 for job in jobs]
        self.cells: FloatArray = np.frombuffer(array("d", cells))
        self.since = [job.waiting_since for job in jobs]
        self.running = [i for i, since in enumerate(self.since) if since is None]
        # Running jobs may have grown above the high-water mark.
        grown = min(sum([cells[i] for i in self.running]), capacity.n_cells)
        self.room = max(high_water * capacity.n_cells, float(grown))
        self.n_context = sum(cells)
        self.mean_cells = self.n_context / len(jobs)
        self.readers = Readers([job.timeline for job in jobs])
        self.hurried = any(job.hurried for job in jobs)
        fastest = self.readers.fastest
        if self.hurried:
            fastest = max([job.timeline.pace_tps for job in jobs if not job.hurried], default=0.0)
        self.least_tbt_s = 1.0 / fastest if fastest else math.inf

    def used(self, chosen: list[int]) -> float:
        """Return the number of cells of the chosen jobs."""
        return float(self.cells[chosen].sum()) if chosen else 0.0

    def keep(self, starved: list[int], leaving: Collection[int] = ()) -> list[int]:
        """Return running jobs without `leaving`, then starved ones, as many as fit, by remaining stock."""
        order = [i for i in self.running if i not in leaving] if leaving else self.running
        fits = len(order) <= self.capacity.n_seqs and self.used(order) <= self.capacity.n_cells
        if fits and not starved:
            return order
        if not fits:
            order = [order[i] for i in (self.readers.arrived + self.readers.free)[order].argsort().tolist()]
        return fitting([*order, *(i for i in starved if self.since[i] is not None)], self.cells, self.capacity)

    def beside(self, first: list[int]) -> IntArray:
        """Return the jobs of which each would fit beside `first`."""
        if len(first) >= self.capacity.n_seqs:
            return np.zeros(0, int)
        fits = self.cells <= self.room - self.used(first)
        if first:
            fits[first] = False
        others: IntArray = fits.nonzero()[0]
        return others

    def alone(self, gains: FloatArray) -> list[int]:
        """Return the job that gains most and fits all the cells, be it above the high-water mark; none if none does."""
        fits = np.flatnonzero(self.cells <= self.capacity.n_cells)
        return [int(fits[gains[fits].argmax()])] if len(fits) and self.capacity.n_seqs else []


def fitting(order: Iterable[int], cells: FloatArray, capacity: Capacity) -> list[int]:
    """Return jobs by `order`, without those that do not fit."""
    left, chosen = float(capacity.n_cells), list[int]()
    for i in order:
        if len(chosen) < capacity.n_seqs and cells[i] <= left:
            left -= cells[i]
            chosen.append(i)
    return chosen


def n_fitting(cells: list[float], room: float) -> int:
    """Count how many fit, the smallest first."""
    for n, need in enumerate(sorted(cells)):
        room -= need
        if room < 0:
            return n
    return len(cells)
