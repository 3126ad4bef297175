"""A breaker under any interleaving of answers, failures, stalls, cancels, limits and times."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disco_daemon.endpoints.breaker import MAX_S, TRIAL_S, Breaker, BreakerCall, BreakerState

MOST_LIMIT_S = 300.0
ROUNDING_S = 1e-6  # of a clock that is far from 0
BOUND_S = max(MAX_S, TRIAL_S, MOST_LIMIT_S)
WHICH = st.integers(0, 1 << 16)
TIMES = st.sampled_from([0.0, 0.01, 0.5, 1.0, 5.0, 31.0, 301.0])
SILENCES = st.one_of(st.none(), st.sampled_from([0.0, 0.05, 0.3, 2.0, 12.0, 700.0]))


class BreakerMachine(RuleBasedStateMachine):
    """Requests begin whenever they like, be it that the breaker advises against them, and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        self.breaker = Breaker(self._draw)
        self.now = 0.0
        self.flying: list[BreakerCall] = []
        self.trials: dict[BreakerCall, float] = {}  # and when each began
        self.is_barred = False

    def _draw(self) -> float:
        self.draws += 1
        return (self.draws * 0.37) % 1.0

    def _take(self, which: int) -> BreakerCall:
        return self.flying.pop(which % len(self.flying))

    def _is_fresh(self, call: BreakerCall) -> bool:
        return call.epoch == self.breaker._epoch

    @rule(s=TIMES)
    def wait(self, s: float) -> None:
        self.now += s

    @rule()
    def begin(self) -> None:
        is_due = self.breaker.state(self.now) is BreakerState.HALF_OPEN and not self.breaker.down_s(self.now)
        call = self.breaker.begin(self.now)
        self.flying.append(call)
        if self.breaker._trial is call:
            self.trials[call] = self.now
            assert self.breaker.down_s(self.now) > 0, "a second trial would be welcome"
        assert call in self.trials or not is_due

    @precondition(lambda self: self.flying)
    @rule(which=WHICH, s=TIMES)
    def speak(self, which: int, s: float) -> None:
        self.breaker.speak(self.flying[which % len(self.flying)], s)
        self.is_barred &= self.breaker.down_s(self.now) == math.inf  # somebody asked all the same, and was answered

    @precondition(lambda self: self.flying)
    @rule(which=WHICH)
    def succeed(self, which: int) -> None:
        call = self._take(which)
        fresh = self._is_fresh(call)
        self.breaker.succeed(call)
        if fresh:
            self.is_barred = False
            assert self.breaker.why(self.now) in (None, "no room"), "it has answered"
        self.ended(call)

    @precondition(lambda self: self.flying)
    @rule(which=WHICH)
    def fail(self, which: int) -> None:
        call = self._take(which)
        self.breaker.fail(call, "server_error", self.now)
        self.ended(call)

    @precondition(lambda self: self.flying)
    @rule(which=WHICH, silent_s=SILENCES)
    def leave(self, which: int, silent_s: float | None) -> None:
        call = self._take(which)
        self.breaker.leave(call, silent_s, self.now)
        self.ended(call)

    @rule(s=st.sampled_from([0.5, 7.0, MOST_LIMIT_S]))
    def limit(self, s: float) -> None:
        self.breaker.limit("rate_limited", s, self.now)
        assert self.breaker.down_s(self.now) >= s - ROUNDING_S

    @rule(s=st.sampled_from([0.0, 7.0, MOST_LIMIT_S]))
    def rest(self, s: float) -> None:
        self.breaker.rest("no room", s, self.now)

    @rule()
    def bar(self) -> None:
        self.breaker.bar("unauthorized")
        self.is_barred = True

    @rule()
    def forget(self) -> None:
        self.breaker.forget()
        self.is_barred = False
        assert self.breaker.state(self.now) is BreakerState.CLOSED

    def ended(self, call: BreakerCall) -> None:
        """What is said of a call that has ended changes nothing; and it is no trial any more."""
        seen = self.breaker.state(self.now), self.breaker.down_s(self.now), self.breaker._sum
        self.breaker.succeed(call)
        self.breaker.fail(call, "cut", self.now)
        self.breaker.leave(call, 700.0, self.now)
        assert (self.breaker.state(self.now), self.breaker.down_s(self.now), self.breaker._sum) == seen
        assert self.breaker._trial is not call, "a trial leaked"
        self.trials.pop(call, None)

    @invariant()
    def one_trial_at_most(self) -> None:
        """Of all that were let in as trials, one is one now; nobody waits for another."""
        assert self.breaker._trial is None or self.breaker._trial in self.trials
        fresh = [call for call, began in self.trials.items() if self._is_fresh(call) and self.now < began + TRIAL_S]
        assert len(fresh) <= 1

    @invariant()
    def it_is_open_for_ever_only_where_settings_mend_it(self) -> None:
        down_s = self.breaker.down_s(self.now)
        assert down_s >= 0
        if self.is_barred:
            assert down_s == math.inf
            return
        assert down_s <= BOUND_S + ROUNDING_S
        later = self.now + down_s + ROUNDING_S
        assert self.breaker.state(later) is not BreakerState.OPEN
        assert self.breaker.down_s(later + TRIAL_S) == 0, "some request is welcome soon"

    def teardown(self) -> None:
        """When all have gone and time goes by, one good answer closes it."""
        for call in self.flying:
            self.breaker.leave(call, None, self.now)
        if self.is_barred:
            self.breaker.forget()
        self.now += BOUND_S + ROUNDING_S
        assert self.breaker.down_s(self.now) == 0
        call = self.breaker.begin(self.now)
        self.breaker.speak(call, 0.1)
        self.breaker.succeed(call)
        assert self.breaker.state(self.now) is BreakerState.CLOSED


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
