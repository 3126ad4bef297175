"""The grid of times at which tokens are due at the reader's pace. Pure: the clock's value is passed in."""

from __future__ import annotations

import math


class PaceGrid:
    """Scheduled times, a `step_s` apart. A token that goes late leaves them as they are: it delays one release only."""

    def __init__(self, pace_tps: float) -> None:
        """Raises ValueError for a pace that is not finite and positive."""
        self.step_s = _step_s(pace_tps)
        self.due = -math.inf  # when the next token is, s
        # The last scheduled time, and the tokens let go then.
        self._last, self._n_last = -math.inf, 0
        self.is_fresh = False  # it was not kept up to now: what lies in the past on it is not to be caught up with

    def begin_after(self, released: float) -> None:
        """Begin anew: the next token is due a step after the last one was `released`."""
        self._last, self._n_last = released, 1
        self.due = released + self.step_s

    def begin_at(self, now: float) -> None:
        """Begin anew from now on, if nothing is due later."""
        self.due, self.is_fresh = max(self.due, now), False

    def let_go(self, n: int) -> None:
        """Let `n` tokens go at the time that is due: the next one is due as many steps later."""
        self._last, self._n_last = self.due, n
        self.due = self._last + n * self.step_s

    def let_go_too(self, n: int) -> None:
        """Let `n` more tokens go at the last scheduled time."""
        self._n_last += n
        self.due = self._last + self._n_last * self.step_s

    def set_pace(self, pace_tps: float, now: float) -> None:
        """Another pace from the next token on; the past is not caught up with. Raises ValueError."""
        self.step_s = _step_s(pace_tps)
        self.due = max(self._last + self._n_last * self.step_s, min(self.due, now))


def _step_s(pace_tps: float) -> float:
    if not 0 < pace_tps < math.inf:
        msg = f"a pace is finite and positive: {pace_tps} token/s"
        raise ValueError(msg)
    return 1.0 / pace_tps
