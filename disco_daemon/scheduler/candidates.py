"""The jobs of one decision as arrays, the room for them, and which of them fit. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..arrays import BoolArray, FloatArray, IntArray
from .jobs import Capacity, Job
from .timeline import Readers

# What a token that is still to come counts for beside a cell that is needed now, where it is known how many these are:
# it holds all of them for one iteration more. With 1 half as much is gained in simulation.
REST_PRICE = 3.0


class Candidates:
    """The jobs of one decision as arrays [n], and the room for them; `running` has the indices of running jobs.

    `needs` has the cells as a list, and `waits` [n] is False where a job runs. `prices` [n] is what a job takes by what
    is expected of it: its cells, and the tokens that are still to come; None where nothing is known of these.
    `longest_wait` is since when the one waits that has waited longest, s by the clock; inf if all run. `least_tbt_s` is
    the time between tokens that keeps the most stringent pace, s; inf if all are `hurried`. Jobs are named by their
    indices.
    """

    __slots__ = (
        "capacity", "cells", "hurried", "jobs", "keys", "least_tbt_s", "longest_wait", "mean_cells", "n_context",
        "needs", "prices", "readers", "room", "running", "since", "waits",
    )  # fmt: skip

    def __init__(self, jobs: Sequence[Job], capacity: Capacity, high_water: float) -> None:
        self.jobs = jobs
        self.capacity = capacity
        self.keys = [job.key for job in jobs]
        self.needs = cells = [job.n_context or 1 for job in jobs]
        self.cells: FloatArray = np.frombuffer(array("d", cells))
        self.since = since = [job.waiting_since for job in jobs]
        self.running = running = list[int]()
        self.longest_wait = math.inf
        for i, waited in enumerate(since):
            if waited is None:
                running.append(i)
            elif waited < self.longest_wait:
                self.longest_wait = waited
        self.waits: BoolArray = np.frombuffer(bytes([waited is not None for waited in since]), np.bool_)
        rests = [job.expected_rest for job in jobs]
        self.prices: FloatArray | None = None
        if any(rests):
            rest = np.frombuffer(array("d", rests))
            if not all(rests):  # of which nothing is known, the mean of the others is expected
                rest = np.where(rest > 0, rest, rest.sum() / np.count_nonzero(rest))
            self.prices = self.cells + REST_PRICE * rest
        # Running jobs may have grown above the high-water mark.
        grown = min(sum([cells[i] for i in running]), capacity.n_cells)
        self.room = max(high_water * capacity.n_cells, float(grown))
        self.n_context = sum(cells)
        self.mean_cells = self.n_context / len(jobs)
        self.readers = Readers([job.timeline for job in jobs])
        self.hurried = True in [job.hurried for job in jobs]
        fastest = self.readers.fastest
        if self.hurried:
            fastest = max([job.timeline.pace_tps for job in jobs if not job.hurried], default=0.0)
        self.least_tbt_s = 1.0 / fastest if fastest else math.inf

    def used(self, chosen: list[int]) -> float:
        """Return the number of cells of the chosen jobs."""
        needs = self.needs
        return float(sum([needs[i] for i in chosen]))

    def keep(self, starved: list[int], leaving: Collection[int] = ()) -> list[int]:
        """Return running jobs without `leaving`, then starved ones, as many as fit, by remaining stock."""
        order = [i for i in self.running if i not in leaving] if leaving else self.running
        fits = len(order) <= self.capacity.n_seqs and self.used(order) <= self.capacity.n_cells
        if fits and not starved:
            return order
        if not fits:
            order = [order[i] for i in (self.readers.arrived + self.readers.free)[order].argsort().tolist()]
        return fitting([*order, *(i for i in starved if self.since[i] is not None)], self.needs, self.capacity)

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


def fitting(order: Iterable[int], needs: Sequence[int], capacity: Capacity) -> list[int]:
    """Return jobs by `order`, without those whose cells do not fit."""
    left, chosen = capacity.n_cells, list[int]()
    for i in order:
        if len(chosen) < capacity.n_seqs and needs[i] <= left:
            left -= needs[i]
            chosen.append(i)
    return chosen


def n_fitting(cells: Sequence[float], room: float) -> int:
    """Count how many fit, the smallest first."""
    for n, need in enumerate(sorted(cells)):
        room -= need
        if room < 0:
            return n
    return len(cells)
