"""Finishing what was begun: which answers must not stand still, which may, and who waits at the door. Pure.

By the QoE alone (Eq. 1 of Andes) it pays to begin every answer at once and to let the longest of them stand still for
minutes: a reader who has most of an answer has lost little by that measure, and much by any other. So an answer that
was begun is served again before its reader has read all there is, and newcomers wait at the door while the begun ones
fill the cells. Only a share of all readers may be made to stand still: those of the answers with the most cells, which
are the longest so far, so that as few as possible make room for as many as possible.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray, IntArray
from .candidates import Candidates

# Stock of text below which an answer is served again, s: it has to come back, and decisions are some iterations apart.
GUARD_S = 3.0
STAYS_S = 1.0  # by which a waiting answer has to have less than a running one to take its place: a swap costs both
N_NEXT = 3  # newcomers, the smallest ones, for which room is made at a time


@dataclass(frozen=True, slots=True)
class BegunJobs:
    """One decision's jobs: `first` are served, in this order, as many as fit; `given_up` may stand still.

    `is_new` [n] wait at the door: `room` cells are left for them beside all begun answers, whether these run or not.
    """

    first: list[int]
    given_up: set[int]
    is_new: list[bool]
    room: float

    def may_enter(self, cells: FloatArray, gains: FloatArray, others: IntArray) -> IntArray:
        """Return those of `others` that may be chosen: begun ones, and newcomers by gain per cell if there is room."""
        names, is_new = others.tolist(), self.is_new
        new = [i for i in names if is_new[i]]
        kept = [i for i in names if not is_new[i] and i not in self.given_up]
        left = self.room
        if new and left > 0:
            needs = cells[new]
            for need, i in [(float(needs[k]), new[k]) for k in (needs / gains[new]).argsort().tolist()]:
                if need <= left:
                    left -= need
                    kept.append(i)
        return np.array(sorted(kept), dtype=np.intp)

    def fill(self, candidates: Candidates, chosen: list[int]) -> list[int]:
        """Return `chosen` with those that were given up and fit beside, running ones first, then the smallest."""
        if not self.given_up:
            return chosen
        cells, since = candidates.cells, candidates.since
        left, n = candidates.room - candidates.used(chosen), candidates.capacity.n_seqs
        for i in sorted(self.given_up, key=lambda i: (since[i] is not None, cells[i])):
            if cells[i] <= left and len(chosen) < n and i not in chosen:
                chosen = [*chosen, i]
                left -= cells[i]
        return chosen


class BegunAnswers:
    """The answers that were given up, which are at most a share of all requests seen.

    All mutable state: their keys, and how many there were.
    """

    __slots__ = ("_given_up", "_n_given_up", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._given_up: set[Hashable] = set()
        self._n_given_up = 0

    def sort(self, candidates: Candidates, now: float, n_seen: int) -> BegunJobs:
        """Say what each job is, and give up further ones if newcomers find no room and the share allows it."""
        readers, jobs, since, cells = candidates.readers, candidates.jobs, candidates.since, candidates.cells.tolist()
        begun = [n > 0 for n in readers.n_tokens.tolist()]
        is_new = [
            not has and waits is not None for has, waits in zip(begun, since, strict=True)
        ]  # else it is prefilled
        given_up = set[int]()
        if self._given_up:
            given_up = {i for i, job in enumerate(jobs) if job.key in self._given_up}
            self._given_up = {jobs[i].key for i in given_up}
        held = sum([need for i, need in enumerate(cells) if not is_new[i] and i not in given_up])
        if self._n_given_up + 1 <= self._share * n_seen:
            next_ones = sorted([need for need, new in zip(cells, is_new, strict=True) if new])[:N_NEXT]
            need = sum(next_ones) / max(1, len(next_ones))
            largest = (
                sorted([(-cells[i], i) for i, has in enumerate(begun) if has and i not in given_up]) if need else []
            )
            for less, i in largest:
                if candidates.room - held >= need or self._n_given_up + 1 > self._share * n_seen:
                    break
                self._given_up.add(jobs[i].key)
                self._n_given_up += 1
                given_up.add(i)
                held += less
        stock_s = (readers.free - (now - readers.arrived)).tolist()
        late = [
            (stock_s[i] - (STAYS_S if since[i] is None else 0.0), i)
            for i, has in enumerate(begun)
            if has and stock_s[i] < GUARD_S and i not in given_up
        ]
        order = [i for i in candidates.running if not begun[i]] + [i for _, i in sorted(late)]
        return BegunJobs(order, given_up, is_new, candidates.room - held)
