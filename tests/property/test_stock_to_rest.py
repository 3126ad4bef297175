"""A reader whose answer's source rests reads on at their pace: whether the target comes, is late, or never does."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.dispatch.migrate import stock_to_ask_again, stock_to_rest
from disco_daemon.types import Delivery, Token

WORD = Token(" word")
seconds = st.floats(0.0, 8.0)


class Reading:
    """A paced reader of a source of `source_tps` token/s, which rests by the rule, and of what comes after it."""

    def __init__(self, pace_tps: float, source_tps: float, wait95_s: float, again95_s: float) -> None:
        self.buffer = TokenBuffer(Delivery.PACED, pace_tps)
        self.to_rest = stock_to_rest(pace_tps, wait95_s, again95_s)
        self.low = stock_to_ask_again(pace_tps, again95_s)
        self.now, self.step_s = 0.0, 1 / source_tps
        self.is_asked_again = False

    def until_it_rests(self) -> None:
        while self.buffer.n_held < self.to_rest:
            self.let_go_until(self.now + self.step_s)
            self.buffer.put(WORD, self.now)

    def let_go_until(self, end: float) -> bool:
        """Release what is due up to then, one by one; return whether the stock has run low."""
        while (due := self.buffer.due_at) is not None and due <= end:
            self.now = max(self.now, due)
            self.buffer.release(self.now)
            if self.buffer.n_held <= self.low:
                return True
        self.now = end
        return False

    def wait(self, target_s: float, again_s: float) -> None:
        """Let the reader read until the target's first token, or that of the source that was asked again."""
        comes = self.now + target_s
        if self.let_go_until(min(comes, self.now + 1e4)) and self.now < comes:
            self.is_asked_again = True
            again = min(comes, self.now + again_s)
            while self.let_go_until(again) and self.buffer.n_held:
                pass
            self.now = again
        for _ in range(5):
            self.buffer.put(WORD, self.now)

    @property
    def longest_gap_s(self) -> float:
        times = self.buffer.arrivals
        return max((b - a for a, b in pairwise(times)), default=0.0)


@given(
    pace_tps=st.floats(1.0, 20.0),
    quicker=st.floats(1.5, 30.0),
    wait95_s=seconds,
    again95_s=seconds,
    late=st.just(1.0) | st.floats(0.0, 3.0) | st.just(math.inf),
    again=st.floats(0.0, 1.0),
)
def test_nobody_waits_and_nobody_is_asked_without_need(
    pace_tps: float, quicker: float, wait95_s: float, again95_s: float, late: float, again: float
) -> None:
    target_s = math.inf if late == math.inf else late * wait95_s
    reading = Reading(pace_tps, pace_tps * quicker, wait95_s, again95_s)
    reading.until_it_rests()
    reading.wait(target_s, again * again95_s)
    if target_s <= wait95_s:
        assert not reading.is_asked_again
    assert reading.longest_gap_s <= 1 / pace_tps + 1e-6


@given(pace_tps=st.floats(1.0, 20.0), wait95_s=seconds, again95_s=seconds, more_s=seconds)
def test_the_stock_grows_with_what_it_has_to_last_for(
    pace_tps: float, wait95_s: float, again95_s: float, more_s: float
) -> None:
    least = stock_to_rest(pace_tps, wait95_s, again95_s)
    assert least > stock_to_ask_again(pace_tps, again95_s)
    assert stock_to_rest(pace_tps, wait95_s + more_s, again95_s) >= least
    assert stock_to_rest(pace_tps, wait95_s, again95_s + more_s) >= least


@pytest.mark.parametrize(("wait95_s", "again95_s"), [(math.inf, 1.0), (1.0, math.inf)])
def test_no_stock_lasts_for_ever(wait95_s: float, again95_s: float) -> None:
    assert stock_to_rest(4.8, wait95_s, again95_s) == math.inf


def test_a_reader_without_the_rule_would_have_waited() -> None:
    """The same reader, with a token less in stock than the source takes to come back."""
    reading = Reading(5.0, 50.0, wait95_s=1.0, again95_s=2.0)
    reading.to_rest, reading.low = 8, 7
    reading.until_it_rests()
    reading.wait(math.inf, 2.0)
    assert reading.is_asked_again
    assert reading.longest_gap_s > 1 / 5.0 + 0.1
