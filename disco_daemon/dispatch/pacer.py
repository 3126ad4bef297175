"""Keeps the realised budget ratio where the user put it, whatever the estimates get wrong.

Two loops. The *trim* hands the policies a budget a little above or below b, in proportion to what has been saved or
overspent; it makes the long-run ratio exact, also where F has drifted since the fit. The *window* looks at the last
200 requests: as their ratio nears b + 2 points the budget handed out shrinks to `FLOOR`, which still rescues the
slowest requests, and what would cross the line is refused. The early starts are given up first: refusing rescues at the
line instead would cost half of what the policy gains in the tail.

All quantities are arrays over `lanes` (independent streams of requests), so that the simulator runs the same code on
many at once; the daemon has one lane.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import BoolArray, FloatArray

Amount = FloatArray | float  # one, or one per lane

WINDOW = 200  # requests: the promise is at most b + 2 points over any 200 of them
SLACK = 0.02  # over the budget in any WINDOW of requests: 2 points
MARGIN = 0.005  # kept off the slack for what cannot be foreseen: a long prompt leaving the window
CAUTION = 2.5  # standard deviations by which the prompts to come may be shorter than expected, together
SOFT = 4.0  # mean prompts of headroom from which the handed-out budget shrinks
FLOOR = 0.02  # budget for rescues while the window is nearly full
MAX_DEBT = 2.0  # horizons: what an outage of the other side made us spend is not paid back for days
MAX_TRIM = 1.0  # of the budget, either way: where all requests meet one context, the fit may be off by all of it


@dataclass(frozen=True, slots=True)
class Gains:
    """The speed of the trim: `horizon` requests to pay a debt back, `integral` per request squared."""

    horizon: float
    integral: float


QUICK = Gains(10.0, 1 / 40_000)  # with the window: the ratio must not wander by more than 2 points in 200 requests
SLOW = Gains(400.0, 1 / 90_000)  # without: steers by the long-run ratio only, and disturbs the policy least


class Pacer:
    """`budget` in [0, 1], one per lane; `mean_length` in tokens. `windowed=False` leaves the 200-request promise out.

    All that changes: `mean_length` (set by its owner), the running sums of tokens offered, spent and pending, and the
    integral of the trim.
    """

    def __init__(self, budget: Amount, mean_length: float, *, windowed: bool = True) -> None:
        self.budget = budget
        self._mean_length = mean_length
        self._windowed = windowed
        self._gains = QUICK if windowed else SLOW
        self._limit = budget + (SLACK - MARGIN)
        self._floor = _least(budget, FLOOR)
        zero = 0.0 * budget  # of the lanes' shape
        self._offered, self._squared, self._spent = zero, zero, zero
        self._saved, self._integral = zero, zero  # tokens of the budget that were left, within bounds; its trim
        self._pending, self._pending_length = zero, zero  # tokens held by answers under way, and of their prompts
        self._n = 0
        # Two windows long, so that the last WINDOW entries always lie side by side: `_lack[i]` is spent minus limit
        # times offered, before the i-th of these requests; `_then` are the sums themselves.
        self._lack = np.zeros((2 * WINDOW, *np.shape(budget)))
        self._then: deque[tuple[Amount, Amount, Amount]] = deque(maxlen=WINDOW)
        self._end = 0
        self._room = self._headroom()

    @property
    def mean_length(self) -> float:
        """Mean prompt length that its owner expects, tokens."""
        return self._mean_length

    @mean_length.setter
    def mean_length(self, tokens: float) -> None:
        self._mean_length = tokens
        self._room = self._headroom()

    def handed_out(self) -> Amount:
        """The budget to plan the next request with; [lanes]."""
        saved = (self._saved + self.budget * self._pending_length - self._pending) / self._mean_length
        budget = _least(_most(self.budget + saved / self._gains.horizon + self._integral, 0.0), 1.0)
        if not self._windowed:
            return budget
        soft = (self._free() / self._mean_length - 1) / SOFT
        return _most(_least(budget, soft), self._floor)

    def allows(self, length: Amount, tokens: Amount | None = None) -> BoolArray | bool:
        """Whether the constrained side may process `tokens` of a prompt of `length` within the window's promise.

        By default all of them.
        """
        if not self._windowed:
            return np.ones(np.broadcast(length, self.budget).shape, dtype=np.bool_)
        room = self._free() + self._limit * (length - self._mean_length)
        return room >= (length if tokens is None else tokens)

    def _free(self) -> Amount:
        """Return the headroom without the reservations of answers under way, whose prompts it already expects."""
        free: Amount = self._room - self._pending
        return free

    def reserve(self, length: Amount, tokens: Amount) -> None:
        """Reserve for an answer under way, a prompt of `length` tokens: `tokens` are for the constrained side."""
        self._pending, self._pending_length = self._pending + tokens, self._pending_length + length

    def release(self, length: Amount, tokens: Amount) -> None:
        """Release the reservation of an answer that has ended; `settle` follows."""
        self.reserve(-length, -tokens)

    def settle(self, length: Amount, spent: Amount) -> None:
        """Book a request of `length` tokens, `spent` of which the constrained side has processed."""
        self._remember()
        self._spent, self._offered = self._spent + spent, self._offered + length
        self._squared = self._squared + length * length
        self._n += 1
        most = MAX_DEBT * self._gains.horizon * self._mean_length
        self._saved = _least(_most(self._saved + self.budget * length - spent, -most), most)
        integral = self._integral + self._gains.integral * self._saved / self._mean_length
        self._integral = _least(_most(integral, -MAX_TRIM), MAX_TRIM)
        if self._windowed:
            self._room = self._headroom()

    def realised(self) -> dict[str, Any]:
        """The ratio since the start and over the last requests, for people; None before the first. One lane only."""
        if self._n == 0:
            return {"requests": 0, "ratio": None, "last_200": None}
        spent, offered, _ = self._then[0]
        last = (self._spent - spent) / (self._offered - offered)
        ratio = self._spent / self._offered
        return {"requests": self._n, "ratio": round(float(ratio), 4), "last_200": round(float(last), 4)}

    def _remember(self) -> None:
        """Keep the sums as they are before the next request."""
        if self._end == 2 * WINDOW:
            self._lack[:WINDOW] = self._lack[WINDOW:]
            self._end = WINDOW
        self._lack[self._end] = self._spent - self._limit * self._offered
        self._end += 1
        self._then.append((self._spent, self._offered, self._squared))

    def _expected(self) -> tuple[Amount, Amount]:
        """Mean and standard deviation of the lengths to count on, tokens; of what was said and seen the lower mean."""
        n = len(self._then)
        seen = (self._offered - self._then[0][1]) / n
        squared = (self._squared - self._then[0][2]) / n
        return _least(self._mean_length, seen), _most(squared - seen * seen, 0.0) ** 0.5

    def _headroom(self) -> Amount:
        """Tokens that may be spent now; the least over the window that ends here and those it is a part of later.

        Requests yet to come are taken to spend nothing and to be of mean length, cautiously; so are those before the
        first one.
        """
        n = min(self._n, WINDOW - 1)
        if n == 0:
            return self._limit * self._mean_length * WINDOW
        mean, deviation = self._expected()
        # The entry of a requests ago begins a window with WINDOW - a requests missing.
        begin = self._lack[self._end - n : self._end]
        missing, spread = (x[-n:].reshape((-1,) + (1,) * (begin.ndim - 1)) for x in (_MISSING, _SPREAD))
        room = (begin + self._limit * np.maximum(mean * missing - deviation * spread, 0.0)).min(axis=0)
        room = (room if np.ndim(room) else float(room)) - (self._spent - self._limit * self._offered)
        return _least(room, self._limit * mean * WINDOW)


_MISSING = np.arange(1.0, WINDOW)  # of the entries 199 … 1 requests ago, oldest first
_SPREAD = CAUTION * np.sqrt(_MISSING)


def _least(x: Amount, y: Amount) -> Amount:
    """The lower of both, lane by lane; numpy's own takes five times as long on two numbers."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        lower: Amount = np.minimum(x, y)
        return lower
    return min(x, y)


def _most(x: Amount, y: Amount) -> Amount:
    """The higher of both, lane by lane."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        higher: Amount = np.maximum(x, y)
        return higher
    return max(x, y)
