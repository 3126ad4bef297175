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

from ..arrays import BoolArray, FloatArray, IntArray
from .candidates import Candidates

# Stock of text below which an answer is served again, s: it has to come back, and decisions are some iterations apart.
GUARD_S = 3.0
STAYS_S = 1.0  # by which a waiting answer has to have less than a running one to take its place: a swap costs both
N_NEXT = 3  # newcomers, the smallest ones, for which room is made at a time


@dataclass(frozen=True, slots=True, eq=False)
class BegunJobs:
    """One decision's jobs: `given_up` may stand still.

    Jobs that are `new` [n] wait at the door: `room` cells are left for them beside all begun answers, whether these run
    or not; what `stays` [n] is begun and not given up.
    """

    given_up: list[int]
    new: BoolArray
    stays: BoolArray
    room: float

    def first(self, candidates: Candidates, now: float) -> list[int]:
        """Return what is prefilled, and then the begun answers whose readers have little left, by how much that is."""
        readers, since = candidates.readers, candidates.since
        ends_s = readers.free + readers.arrived
        indices = (self.stays & (ends_s < now + GUARD_S)).nonzero()[0]
        first, by_stock = list[int](), list[tuple[float, int]]()
        for i, end, n in zip(
            indices.tolist(), ends_s[indices].tolist(), readers.n_tokens[indices].tolist(), strict=True
        ):
            if n:
                by_stock.append((end - (STAYS_S if since[i] is None else 0.0), i))
            else:
                first.append(i)
        return [*first, *(i for _, i in sorted(by_stock))]

    def may_enter(self, candidates: Candidates, gains: FloatArray, others: IntArray) -> IntArray:
        """Return those of `others` that may be chosen: begun ones, and the newcomers that are admitted."""
        may = self.stays.copy()
        if self.room > 0:
            may[self.admit(candidates, gains, others[self.new[others]])] = True
        entering: IntArray = others[may[others]]
        return entering

    def admit(self, candidates: Candidates, gains: FloatArray, new: IntArray) -> list[int]:
        """Return the newcomers for which there is room, by gain and price.

        The price is their cells, and what is known of the tokens that they will come to.
        """
        prices = candidates.cells if candidates.prices is None else candidates.prices
        left, admitted = self.room, list[int]()
        order = new[(prices[new] / gains[new]).argsort()]
        for need, i in zip(candidates.cells[order].tolist(), order.tolist(), strict=True):
            if need <= left:
                left -= need
                admitted.append(i)
        return admitted

    def fill(self, candidates: Candidates, chosen: list[int]) -> list[int]:
        """Return `chosen` with those that were given up and fit beside, running ones first, then the smallest."""
        needs, since, n_seqs = candidates.needs, candidates.since, candidates.capacity.n_seqs
        if not self.given_up:
            return chosen
        left = candidates.room - candidates.used(chosen)
        fit = [(since[i] is not None, needs[i], i) for i in self.given_up if needs[i] <= left and i not in chosen]
        for _, need, i in sorted(fit):
            if need <= left and len(chosen) < n_seqs:
                chosen = [*chosen, i]
                left -= need
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

    def sort(self, candidates: Candidates, n_seen: int) -> BegunJobs:
        """Say what each job is, and give up further ones if newcomers find no room and the share allows it."""
        readers, cells, waits = candidates.readers, candidates.cells, candidates.waits
        begun = readers.n_tokens > 0.0
        stays = begun | ~waits  # what runs without a token is prefilled
        new = ~stays
        given_up = self._still_here(candidates)
        if given_up:
            stays[given_up] = False
        held = float(cells.dot(stays))
        if self._n_given_up + 1 <= self._share * n_seen and (newcomers := sorted(cells[new].tolist())[:N_NEXT]):
            excess = held + sum(newcomers) / len(newcomers) - candidates.room
            if excess > 0:
                more = self._give_up(candidates, (begun & stays).nonzero()[0], excess, n_seen)
                stays[more] = False
                held -= candidates.used(more)
                given_up += more
        return BegunJobs(given_up, new, stays, candidates.room - held)

    def _still_here(self, candidates: Candidates) -> list[int]:
        """Return the jobs that were given up before, and forget those that have ended."""
        if not self._given_up:
            return []
        keys, given_up = candidates.keys, self._given_up
        found = [i for i, key in enumerate(keys) if key in given_up]
        if len(found) < len(given_up):
            self._given_up = {keys[i] for i in found}
        return found

    def _give_up(self, candidates: Candidates, begun: IntArray, excess: float, n_seen: int) -> list[int]:
        """Give up the answers that take most, until `excess` cells are free or the share is used up; return them."""
        more = list[int]()
        for i in begun[(-candidates.cells[begun]).argsort(kind="stable")].tolist():
            if excess <= 0 or self._n_given_up + 1 > self._share * n_seen:
                break
            self._given_up.add(candidates.keys[i])
            self._n_given_up += 1
            more.append(i)
            excess -= candidates.needs[i]
        return more
