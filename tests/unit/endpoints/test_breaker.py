"""The breaker weighs what fails against the server's own record, and tries a server again one request at a time."""

from __future__ import annotations

import math

import pytest

from disco_daemon.endpoints.breaker import FIRST_S, LATE_STALL_S, MAX_S, STALL_S, TRIAL_S, Breaker, BreakerState

WHY = "server_error"


class Asked:
    """A breaker with the clock of its requests: one a second unless `at` is moved."""

    def __init__(self, draw: float = 1.0) -> None:
        self.breaker = Breaker(lambda: draw)
        self.at = 0.0

    def answers(self, n: int = 1, ttft_s: float = 0.1) -> None:
        for _ in range(n):
            self.at += 1
            call = self.breaker.begin(self.at)
            self.breaker.speak(call, ttft_s)
            self.breaker.succeed(call)

    def fails(self, n: int = 1, why: str = WHY, *, late: bool = False) -> None:
        for _ in range(n):
            self.at += 1
            call = self.breaker.begin(self.at)
            if late:
                self.breaker.speak(call, 0.1)
            self.breaker.fail(call, why, self.at)

    def is_left(self, silent_s: float | None, *, spoke: bool = False) -> None:
        self.at += 1
        call = self.breaker.begin(self.at)
        if spoke:
            self.breaker.speak(call, 0.1)
        self.breaker.leave(call, silent_s, self.at)

    def state(self) -> BreakerState:
        return self.breaker.state(self.at)

    @property
    def down_s(self) -> float:
        return self.breaker.down_s(self.at)

    def heal_time(self) -> None:
        self.at += self.down_s


def until_open(asked: Asked, most: int = 20) -> int:
    """How many failures in a row open it."""
    for n in range(1, most + 1):
        asked.fails()
        if asked.state() is BreakerState.OPEN:
            return n
    return most + 1


def test_three_failures_in_a_row_open_that_of_a_server_nobody_knows() -> None:
    assert until_open(Asked()) == 3


@pytest.mark.parametrize("n_before", [1, 5, 30, 200, 5000])
def test_one_failure_opens_it_never_and_three_in_a_row_always_however_well_it_has_done(n_before: int) -> None:
    asked = Asked()
    asked.answers(n_before)
    assert 2 <= until_open(asked) <= 3


def test_a_server_that_fails_once_in_a_hundred_stays_closed() -> None:
    asked = Asked()
    for _ in range(50):
        asked.answers(99)
        asked.fails()
        assert asked.state() is BreakerState.CLOSED


def test_a_server_that_fails_often_by_nature_takes_more_of_them() -> None:
    asked = Asked()
    asked.answers(10)
    for _ in range(40):
        asked.fails()
        asked.answers(3)
        assert asked.state() is BreakerState.CLOSED
    assert 3 < until_open(asked) <= 5


@pytest.mark.parametrize("n_between", [5, 10, 20, 50])
def test_outages_do_not_make_a_server_one_that_fails_often_by_nature(n_between: int) -> None:
    asked, counts = Asked(), []
    for _ in range(12):
        asked.answers(n_between)
        counts.append(until_open(asked))
        asked.heal_time()
        asked.fails()  # a trial
        asked.heal_time()
    assert max(counts) <= 3, counts


def test_half_of_all_requests_failing_opens_that_of_a_good_server() -> None:
    asked = Asked()
    asked.answers(200)
    for _ in range(4):
        asked.fails()
        if asked.state() is BreakerState.OPEN:
            break
        asked.answers()
    assert asked.state() is BreakerState.OPEN


def test_the_back_off_doubles_up_to_a_bound_and_jitter_takes_half_of_it_at_most() -> None:
    for draw, share in ((0.0, 0.5), (0.999999, 1.0)):
        asked, waits = Asked(draw), []
        asked.fails(3)
        for _ in range(8):
            waits.append(asked.down_s)
            asked.heal_time()
            asked.at -= 1  # a request takes one
            asked.fails()
        assert waits == pytest.approx([share * min(MAX_S, FIRST_S * 2**i) for i in range(8)], rel=1e-4)


def test_half_open_one_request_tries_it_and_the_others_go_elsewhere() -> None:
    asked = Asked()
    asked.fails(3)
    asked.heal_time()
    breaker, now = asked.breaker, asked.at
    assert (asked.state(), asked.down_s) == (BreakerState.HALF_OPEN, 0)
    trial = breaker.begin(now)
    assert (asked.state(), asked.down_s) == (BreakerState.HALF_OPEN, TRIAL_S)
    other = breaker.begin(now)
    breaker.fail(other, WHY, now)
    assert asked.down_s == TRIAL_S, "a failure of one that was asked all the same says nothing new"
    breaker.speak(trial, 0.1)
    assert (asked.state(), asked.down_s) == (BreakerState.CLOSED, 0), "a first token is what it had never given"
    breaker.succeed(trial)
    asked.answers(2)
    assert asked.state() is BreakerState.CLOSED


def test_behind_an_outage_it_opens_again_sooner() -> None:
    asked = Asked()
    asked.answers(50)
    asked.fails(3)
    asked.heal_time()
    asked.answers()
    assert asked.state() is BreakerState.CLOSED
    assert until_open(asked) <= 2


def test_a_server_that_breaks_off_in_mid_answer_has_to_give_a_whole_one() -> None:
    asked = Asked()
    asked.fails(3, "cut", late=True)
    assert (asked.state(), asked.breaker.why(asked.at)) == (BreakerState.OPEN, "cut")
    asked.heal_time()
    trial = asked.breaker.begin(asked.at)
    asked.breaker.speak(trial, 0.1)
    assert asked.state() is BreakerState.HALF_OPEN
    asked.breaker.succeed(trial)
    assert asked.state() is BreakerState.CLOSED


def test_a_trial_that_is_cancelled_leaves_the_next_one_its_place() -> None:
    asked = Asked()
    asked.fails(3)
    asked.heal_time()
    for silent_s in (None, 0.1, 5.0):
        asked.breaker.leave(asked.breaker.begin(asked.at), silent_s, asked.at)
        assert (asked.state(), asked.down_s) == (BreakerState.HALF_OPEN, 0), "a race that is lost says nothing"
    asked.is_left(STALL_S)
    assert asked.down_s > FIRST_S, "a stall does"
    asked.heal_time()
    asked.answers()
    assert asked.state() is BreakerState.CLOSED


def test_a_trial_that_says_nothing_for_long_holds_up_no_other() -> None:
    asked = Asked()
    asked.fails(3)
    asked.heal_time()
    thinking = asked.breaker.begin(asked.at)
    asked.at += TRIAL_S
    assert asked.down_s == 0
    asked.fails()
    assert asked.state() is BreakerState.OPEN
    asked.breaker.succeed(thinking)
    assert asked.state() is BreakerState.OPEN, "it began before the failure"


def test_what_began_before_an_outage_is_no_news_of_it() -> None:
    asked = Asked()
    breaker = asked.breaker
    old = [breaker.begin(0.0) for _ in range(8)]
    asked.fails(3)
    breaker.succeed(old[0])
    assert asked.state() is BreakerState.OPEN
    asked.heal_time()
    asked.answers()
    for call in old[1:]:
        breaker.fail(call, "timeout", asked.at)
    assert asked.state() is BreakerState.CLOSED


# --- stalls -----------------------------------------------------------------------------------------------------------


def test_a_wait_that_is_given_up_is_a_stall_where_the_record_makes_it_unlikely() -> None:
    asked = Asked()
    asked.answers(40, ttft_s=0.1)
    asked.is_left(0.5)
    assert asked.state() is BreakerState.CLOSED, "one slow answer is none"
    asked.is_left(0.5)
    assert (asked.state(), asked.breaker.why(asked.at)) == (BreakerState.OPEN, "stalled")


def test_a_server_that_loses_its_races_is_not_down_for_it() -> None:
    """Every second answer is slow, and a race cuts all of those: what is seen of the others must not mislead."""
    asked = Asked()
    asked.answers(30)
    for _ in range(30):
        asked.answers()
        asked.is_left(0.05)
    for _ in range(200):
        asked.is_left(0.05)
        assert asked.state() is BreakerState.CLOSED
    fair = Asked()
    for _ in range(100):
        fair.answers(1, ttft_s=0.1)
        fair.is_left(0.2)
        assert fair.state() is BreakerState.CLOSED


def test_a_server_nobody_knows_has_stalled_when_it_is_given_up_after_long() -> None:
    asked = Asked()
    for _ in range(8):
        asked.is_left(STALL_S / 2)
    assert asked.state() is BreakerState.CLOSED
    asked = Asked()
    for _ in range(3):
        asked.is_left(STALL_S)
    assert asked.state() is BreakerState.OPEN


def test_a_silence_in_mid_answer_counts_and_a_reader_who_leaves_does_not() -> None:
    asked = Asked()
    for _ in range(20):
        asked.is_left(LATE_STALL_S / 2, spoke=True)
        asked.is_left(None, spoke=True)
    assert asked.state() is BreakerState.CLOSED
    for _ in range(3):
        asked.is_left(LATE_STALL_S, spoke=True)
    assert (asked.state(), asked.breaker.why(asked.at)) == (BreakerState.OPEN, "stalled")


# --- what a server says ----------------------------------------------------------------------------------------------


def test_what_only_the_settings_mend_stays_until_they_change_or_somebody_asks_all_the_same() -> None:
    asked = Asked()
    asked.answers(5)
    asked.breaker.bar("unauthorized")
    asked.at += 1e6
    assert (asked.state(), asked.down_s) == (BreakerState.OPEN, math.inf)
    asked.fails()
    assert asked.down_s == math.inf
    asked.breaker.forget()
    assert (asked.state(), asked.down_s, asked.breaker.why(asked.at)) == (BreakerState.CLOSED, 0, None)
    asked.breaker.bar("unauthorized")
    asked.answers()
    assert asked.state() is BreakerState.CLOSED


def test_a_limit_is_kept_to_the_second_and_one_request_tries_it_then() -> None:
    asked = Asked()
    call = asked.breaker.begin(0.0)
    asked.breaker.limit("rate_limited", 7.0, 0.0)
    asked.breaker.fail(call, "rate_limited", 0.0)
    assert (asked.state(), asked.down_s) == (BreakerState.OPEN, 7.0)
    asked.breaker.limit("rate_limited", 3.0, 0.0)
    assert asked.down_s == 7.0, "the longer one counts"
    asked.at = 7.0
    assert (asked.state(), asked.down_s) == (BreakerState.HALF_OPEN, 0)
    trial = asked.breaker.begin(7.0)
    assert asked.down_s > 0
    asked.breaker.limit("rate_limited", 9.0, 7.0)
    asked.breaker.fail(trial, "rate_limited", 7.0)
    assert asked.down_s == 9.0


def test_a_server_without_room_rests_and_needs_no_trial() -> None:
    asked = Asked()
    asked.answers(5)
    asked.breaker.rest("rate_limited", 4.0, asked.at)
    assert (asked.state(), asked.down_s, asked.breaker.why(asked.at)) == (BreakerState.OPEN, 4.0, "rate_limited")
    asked.at += 4.0
    assert (asked.state(), asked.down_s, asked.breaker.why(asked.at)) == (BreakerState.CLOSED, 0.0, None)
    asked.breaker.rest("rate_limited", 4.0, asked.at)
    asked.breaker.rest("rate_limited", 0.0, asked.at)
    assert asked.state() is BreakerState.CLOSED, "it has said that there is room"


def test_many_at_once_do_not_all_find_out_that_a_server_is_silent() -> None:
    """While one waits for unusually long, or one has failed and another is on its way, others had better be asked."""
    asked = Asked()
    asked.answers(20)
    call = asked.breaker.begin(asked.at)
    assert not asked.breaker.is_doubted(asked.at + 0.15)
    assert asked.breaker.is_silent(asked.at + 0.25)
    assert asked.breaker.is_doubted(asked.at + 0.25)
    asked.breaker.speak(call, 0.3)
    assert not asked.breaker.is_doubted(asked.at + 0.3)
    other = asked.breaker.begin(asked.at)
    asked.breaker.fail(call, WHY, asked.at)
    assert asked.breaker.is_doubted(asked.at), "the other one will tell"
    asked.breaker.succeed(other)
    assert not asked.breaker.is_doubted(asked.at), "nothing is in flight"


def test_what_began_before_the_first_failure_does_not_speak_for_the_server() -> None:
    asked = Asked()
    early = [asked.breaker.begin(asked.at) for _ in range(5)]
    for call in early:
        asked.breaker.speak(call, 0.1)
    asked.fails(2)
    for call in early:
        asked.breaker.succeed(call)
    asked.fails()
    assert asked.state() is BreakerState.OPEN


def test_a_trial_that_is_silent_for_longer_than_any_lately_has_failed() -> None:
    asked = Asked()
    asked.answers(3, ttft_s=0.1)
    asked.fails(until_open(Asked()))
    asked.heal_time()
    asked.is_left(0.05)
    assert asked.state() is BreakerState.HALF_OPEN, "it has lost a race"
    asked.is_left(0.2)
    assert asked.state() is BreakerState.OPEN
