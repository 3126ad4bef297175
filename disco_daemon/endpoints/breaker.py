"""A circuit breaker: whether a server is asked, by what became of the requests before. Pure; times in s.

Closed, the server is asked. What fails is weighed against its own record by Page's CUSUM test (Biometrika 41, 1954):
each request adds the log-likelihood ratio of "it is down", where DOWN of all requests fail, to "it is as ever", where
as many fail as its record says; the sum never falls below 0, and at ENOUGH the breaker opens. So one failure never
opens it, three in a row open that of a server nobody knows, and a server that fails often anyway takes more of them.
Failures that opened it are no part of the record: after a few outages the next one would be what is likely. A request
that is let go before its first token counts as a stall where the record of waits (Kaplan and Meier's estimate, in which
waits that were cut short have their due) makes such a wait unlikely.

Open, it is not asked for a time that doubles from one failed trial to the next, with jitter. Half open, the next
request is a trial, one at a time: where it succeeds the breaker closes, and where it fails it opens for longer. What
only the settings mend (a refused key, a model that is not there) has no trial; `forget` ends it. All of this is advice:
whoever has nobody else to ask asks an open server too, and a success closes its breaker.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from ..estimation.survival import kaplan_meier

DOWN = 0.9  # share of requests that fail at a server that is down: some get through to half of an outage
# The log-likelihood ratio at which it opens, e^5 = 148 to 1. Three failures in a row of an unknown server come to 6.6,
# one at the best server there is to log(DOWN / LIKELY[0]) = 3.8.
ENOUGH = 5.0
AGAIN = ENOUGH / 2  # where the sum stands behind an outage: half as much as before says that it is not over
LIKELY = (0.02, 0.3)  # shares of failures that are believed: no server is so good that one says anything, nor so bad
PRIOR_FAILED, PRIOR = 1.0, 10.0  # an unknown server has failed at one request of ten
MEMORY = 100.0  # requests that its record goes back, each a little lighter than the next
WAITS = 64  # first tokens that its record of waits has: enough to tell a wait that one in fifty takes
UNLIKELY = 0.1  # a wait that so few take is a stall where it is given up; others are a lost race, and say nothing
STALL_S = 10.0  # given up after this long, a server nobody knows has stalled; a loser is listened to for as long
LATE_STALL_S = 2.0  # a silence between two tokens at which answers are moved away (handoff.stall_s)
FIRST_S, MAX_S = 1.0, 30.0  # back-off: a restart takes a second, and one failed request in 30 s hurts nobody
# A request is unlike the latest ones where it is silent for twice as long as the longest of so many of them.
LATEST, TWICE = 20, 2.0
TRIAL_S = 30.0  # a trial that says nothing for this long holds up no other; a first token takes 20 s at most by default


class BreakerState(Enum):
    """The state of a breaker, by the names of the field."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True, eq=False)
class BreakerCall:
    """One request to the server. It ends once: what is said of it later counts for nothing.

    `epoch` is the breaker's when it `began`: what began before an outage was noticed, or was over, is no news of it.
    """

    epoch: int
    began: float = 0.0
    has_spoken: bool = False
    is_over: bool = False


class Breaker:
    """The breaker of one server and model. `draw` gives numbers in [0, 1), for the jitter.

    All mutable state: the record (failures, waits, the sum of the test, and since when it is above 0, by how many
    failures); since when it is open, why, and until when; all calls in flight, and the trial; and until when a server
    without room rests, which is no failure.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._failed, self._asked = PRIOR_FAILED, PRIOR
        self._waits: deque[tuple[float, bool]] = deque(maxlen=WAITS)
        self._sum = 0.0
        self._n_doubtful = 0  # failures since the sum was 0: of an outage, or of the server as it is
        self._is_open = self._breaks_late = False
        self._why = self._rest_why = ""
        self._until = self._rest_until = -math.inf
        self._n_failed = 0  # trials, and the failures that opened it, in this outage
        self._epoch = 0
        self._trial: BreakerCall | None = None
        self._trial_until = -math.inf
        self._calls: dict[BreakerCall, None] = {}  # in flight, in the order in which they began
        self._doubted_since = -math.inf

    # --- for reading -------------------------------------------------------------------------------------------------

    def state(self, now: float) -> BreakerState:
        """Return its state."""
        if now < self._rest_until or (self._is_open and now < self._until):
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._is_open else BreakerState.CLOSED

    def down_s(self, now: float) -> float:
        """How long nobody should ask, s: 0 where a request is welcome, infinite where only the settings mend it."""
        until = max(self._until, self._trial_until if self.is_tried(now) else -math.inf) if self._is_open else -math.inf
        return max(0.0, until - now, self._rest_until - now)

    def is_tried(self, now: float) -> bool:
        """Whether a trial is in flight, so that others wait for what becomes of it."""
        return self._trial is not None and now < self._trial_until

    @property
    def is_well(self) -> bool:
        """Whether no failure has opened it: then it is not half open either, and needs no trial."""
        return not self._is_open

    @property
    def outage(self) -> int:
        """A number that changes whenever it opens, closes, or opens again."""
        return self._epoch

    def is_doubted(self, now: float) -> bool:
        """Whether a request in flight will say how the server is, so that whoever has another one had better wait.

        One is silent for unusually long, or one has failed lately: many at once shall not all find that out.
        """
        return bool(self._calls) and (self._sum > 0 or self.is_silent(now))

    def is_silent(self, now: float) -> bool:
        """Whether a request in flight has waited for its first token for longer than is usual."""
        oldest = next((call for call in self._calls if not call.has_spoken), None)
        if oldest is None:
            return False
        known = len(self._waits) >= 1 / UNLIKELY
        return now - oldest.began > (TWICE * self._longest_s if known else STALL_S)

    @property
    def _longest_s(self) -> float:
        """The longest of the latest waits for a first token, s; infinite where there was none."""
        return max((waited_s for waited_s, _ in islice(reversed(self._waits), LATEST)), default=math.inf)

    def why(self, now: float) -> str | None:
        """Return the reason of the failure that opened it, or that it has no room; None where it is closed."""
        if self._is_open:
            return self._why
        return self._rest_why if now < self._rest_until else None

    # --- one request -------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> BreakerCall:
        """Return a call for a request that begins now; half open, the first one is the trial."""
        call = BreakerCall(self._epoch, now)
        self._calls[call] = None
        if self._is_open and now >= self._until and not self.is_tried(now):
            self._trial, self._trial_until = call, now + TRIAL_S
        return call

    def speak(self, call: BreakerCall, waited_s: float) -> None:
        """Note a first token, after so long. An outage of requests that never came so far is over by it."""
        if call.is_over:
            return
        call.has_spoken = True
        if call.epoch != self._epoch:
            return
        if not self._is_open:
            self._waits.append((waited_s, True))
        elif not self._breaks_late:
            self._close()
            call.epoch = self._epoch

    def succeed(self, call: BreakerCall) -> None:
        """End a request that was answered: whole, or with a refusal that is the request's own fault."""
        if self._end(call) is None:
            return
        if self._is_open:
            self._close()
            return
        if call.began >= self._doubted_since:  # else it says how the server was before the first one failed
            self._sum = max(0.0, self._sum + math.log((1.0 - DOWN) / (1.0 - self._likely)))
        self._remember(failed=False)
        if self._sum == 0:
            for _ in range(self._n_doubtful):
                self._remember(failed=True)
            self._n_doubtful = self._n_failed = 0
            self._breaks_late = False

    def fail(self, call: BreakerCall, why: str, now: float) -> None:
        """End a request that failed, by no fault of its own."""
        was_trial = self._end(call)
        if was_trial is None:
            return
        if was_trial:
            self._open(why, now, late=call.has_spoken)
        elif not self._is_open:
            self._n_doubtful += 1
            self._weigh(call, self._likely, why, now)

    def leave(self, call: BreakerCall, silent_s: float | None, now: float) -> None:
        """End a request that we let go, in a silence of so long; None where that silence says nothing."""
        if call.has_spoken:
            if silent_s is not None and silent_s >= LATE_STALL_S:
                self.fail(call, "stalled", now)
            else:
                self.succeed(call)
            return
        was_trial = self._end(call)
        if was_trial is None:
            return
        likely = None if silent_s is None else self._likely_stall(silent_s)
        if was_trial:
            if likely is not None or (silent_s is not None and silent_s > self._longest_s):
                self._open("stalled", now, late=self._breaks_late)
            # Else it has shown nothing, as where it has lost a race: the next request is the trial.
        elif not self._is_open and silent_s is not None:
            if likely is None:
                self._waits.append((silent_s, False))
            else:  # no part of the record, or an outage would soon look like it
                self._weigh(call, likely, "stalled", now)

    # --- what a server says of itself --------------------------------------------------------------------------------

    def limit(self, why: str, for_s: float, now: float) -> None:
        """Open for as long as the server asks to be left alone, such as by Retry-After; then there is a trial."""
        until = now + for_s
        if self._is_open and self._until >= until:
            return
        self._begin_outage(why)
        self._until, self._breaks_late = until, False

    def bar(self, why: str) -> None:
        """Open until `forget`: no waiting mends it."""
        self._begin_outage(why)
        self._until = math.inf

    def rest(self, why: str, for_s: float, now: float) -> None:
        """Leave it alone for so long, though nothing has failed: it has no room. With 0 s it has some again."""
        self._rest_why, self._rest_until = why, now + for_s if for_s > 0 else -math.inf

    def forget(self) -> None:
        """Ask again, as if nothing had happened; its record stays."""
        if self._is_open:
            self._close()
        self._sum, self._n_failed, self._n_doubtful, self._rest_until = 0.0, 0, 0, -math.inf

    # --- within ------------------------------------------------------------------------------------------------------

    @property
    def _likely(self) -> float:
        """The share of failures that its record makes likely."""
        return min(max(self._failed / self._asked, LIKELY[0]), LIKELY[1])

    def _likely_stall(self, waited_s: float) -> float | None:
        """Return how likely a first token takes longer than this, by the record; None where that is no stall."""
        n = len(self._waits)
        if n < 1 / UNLIKELY:
            return self._likely if waited_s >= STALL_S else None
        waits, seen = zip(*self._waits, strict=True)
        likely = max(float(kaplan_meier(waits, seen).at(waited_s)), 1 / (n + 1), LIKELY[0])
        return likely if likely <= UNLIKELY else None

    def _remember(self, *, failed: bool) -> None:
        self._failed, self._asked = self._failed + failed, self._asked + 1
        if self._asked > MEMORY:
            self._failed, self._asked = self._failed * MEMORY / self._asked, MEMORY

    def _weigh(self, call: BreakerCall, likely: float, why: str, now: float) -> None:
        """Add a failure that was `likely` at a server that is as ever; open where that is enough."""
        if self._sum == 0:
            self._doubted_since = call.began
        self._sum += math.log(DOWN / likely)
        self._breaks_late |= call.has_spoken
        if self._sum >= ENOUGH:
            self._open(why, now, late=self._breaks_late)

    def _open(self, why: str, now: float, *, late: bool) -> None:
        """Open, or open again for twice as long, with half of it by chance: many clients do not come back at once."""
        self._begin_outage(why)
        self._n_failed = max(self._n_failed, 0) + 1
        wait_s = min(MAX_S, FIRST_S * 2.0 ** min(self._n_failed - 1, 16))
        self._until = now + wait_s * (0.5 + 0.5 * self._draw())
        self._breaks_late = late

    def _begin_outage(self, why: str) -> None:
        self._is_open, self._why = True, why
        self._epoch += 1
        self._trial, self._n_doubtful = None, 0

    def _close(self) -> None:
        self._is_open = self._breaks_late = False
        self._epoch += 1
        self._trial, self._sum, self._doubted_since = None, AGAIN, -math.inf
        self._until = -math.inf

    def _end(self, call: BreakerCall) -> bool | None:
        """End a call once; return whether it was the trial, None where it says nothing of the server as it is now."""
        if call.is_over:
            return None
        call.is_over = True
        self._calls.pop(call, None)
        was_trial = call is self._trial
        if was_trial:
            self._trial = None
        return was_trial if call.epoch == self._epoch else None
