"""Whether the rows of drafts are judged together or one after the other, as measured. Pure.

Together the weights are read once for all rows, but all of them are computed, those behind a wrong draft as well. One
after the other each row waits for the token before it, and nothing is computed in vain. Where a row is bound by
arithmetic, as a small model's is on a CPU, that is quicker, and takes less of the partner from its other machines.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

TRIES, NEWEST = 3, 9  # iterations of so many rows before their time is known, and the newest that count
OTHER_EVERY = 31  # decisions; one of them goes the other way: either may have changed
FAR = 1.5  # a way that takes this many times as long is not tried again
WEIGHT = 0.1  # of the newest verdict, in the share of drafts that have to be computed


class RunJudging:
    """The newest times of a row by itself and of some rows together, and the share of drafts that are right."""

    __slots__ = ("_n_asked", "_row_s", "_share", "_together_s")

    def __init__(self) -> None:
        self._together_s: dict[int, deque[float]] = {}
        self._row_s: deque[float] = deque(maxlen=NEWEST)
        self._share = 1.0  # of the drafts of a run, those that are right
        self._n_asked = 0

    def in_steps(self, runs: Sequence[int]) -> bool:
        """Whether the runs of the coming iteration, of so many rows each, are to be computed a row at a time."""
        n = sum(runs)
        if n == len(runs):
            return True
        together_s = self._together_s.get(n, ())
        if len(together_s) < TRIES:
            return False
        if len(self._row_s) < TRIES:
            return True
        n_steps = len(runs) + self._share * (n - len(runs))
        ratio = n_steps * statistics.median(self._row_s) / statistics.median(together_s)
        self._n_asked += 1
        other = self._n_asked % OTHER_EVERY == 0 and 1 / FAR < ratio < FAR
        return (ratio < 1) is not other

    def observe(self, n: int, took_s: float, *, together: bool) -> None:
        """Record how long an iteration with `n` rows took: those of drafts `together`, or one of each run."""
        if together:
            self._together_s.setdefault(n, deque(maxlen=NEWEST)).append(took_s)
        elif n:
            self._row_s.append(took_s / n)

    def observe_verdict(self, n_drawn: int, n_asked: int) -> None:
        """Record that of `n_asked` rows to be judged the first `n_drawn` were drawn from."""
        if n_asked > 1:
            self._share += WEIGHT * ((n_drawn - 1) / (n_asked - 1) - self._share)
