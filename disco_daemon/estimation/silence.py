"""The longest silence of a server that its past makes likely. Pure; times in s.

A wait is chosen where samples lie. Beyond the last of them there is only the prior, so that neither a policy nor a
spent budget expects anything there: a server that answered in 50 ms for an hour, and then says nothing, would be waited
for. The bound is three times the 99.9 % quantile of what was seen, which of 200 samples is the longest, and at least
half a second. A few samples far beyond all others do not move it: they are of a new kind, until ten of them have come.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

REMEMBERED = 200  # first tokens
ENOUGH = 20  # of them before anything can be called unusual
BEYOND = 3.0  # times the longest that was seen
LEAST_S = 0.5  # a shorter silence is no cause for alarm, however quick the server
NEW_KIND = 10  # samples beyond a gap of BEYOND are a kind of its own that has been seen; fewer are not


class Silences:
    """The first tokens lately seen; what was only known to take longer is none of them."""

    __slots__ = ("_bound_s", "_ordered", "_seen")

    def __init__(self, seen_s: Iterable[float] = ()) -> None:
        self._seen = deque(seen_s, maxlen=REMEMBERED)
        self._ordered = sorted(self._seen)  # kept so, since a plan that sorts them takes twice as long
        self._bound_s: float | None = None

    def add(self, ttft_s: float) -> None:
        """Take one more."""
        if len(self._seen) == REMEMBERED:
            del self._ordered[bisect_left(self._ordered, self._seen[0])]
        self._seen.append(ttft_s)
        insort(self._ordered, ttft_s)
        self._bound_s = None

    @property
    def bound_s(self) -> float:
        """A silence longer than this is unlike anything seen; infinite while too little was."""
        if self._bound_s is None:
            self._bound_s = self._bound() if len(self._seen) >= ENOUGH else math.inf
        return self._bound_s

    def to_json(self) -> list[float]:
        """The samples, oldest first."""
        return list(self._seen)

    def _bound(self) -> float:
        longest = self._ordered[: -NEW_KIND - 1 : -1]
        known = longest[0]
        if known <= BEYOND * longest[-1]:  # so that no two of them lie that far apart
            return max(LEAST_S, BEYOND * known)
        for above, below in pairwise(longest):
            if above > LEAST_S and above > BEYOND * below:
                known = below
        return max(LEAST_S, BEYOND * known)
