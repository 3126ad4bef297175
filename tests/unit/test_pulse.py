"""What was measured while this process stood still, or the machine slept, is known as such."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from disco_daemon.daemon.tasks.loop_monitor import INTERVAL_S, N_STALLS, SLEPT_S, STALL_S, Pulse


@dataclass
class Hands:
    """A clock whose hands are moved by the test; s."""

    mono: float = 100.0
    unix: float = 1_700_000_000.0

    def now(self) -> float:
        return self.mono

    def wall(self) -> float:
        return self.unix

    def move(self, s: float, *, asleep: float = 0.0) -> None:
        """`asleep` is seen by the wall clock only, as on Linux."""
        self.mono += s
        self.unix += s + asleep


@pytest.fixture
def hands() -> Hands:
    return Hands()


def beats(pulse: Pulse, hands: Hands, n: int) -> None:
    for _ in range(n):
        hands.move(INTERVAL_S)
        pulse.beat()


def test_a_regular_pulse_disturbs_nothing(hands: Hands) -> None:
    pulse = Pulse(hands)
    begin = hands.now()
    beats(pulse, hands, 50)
    assert not pulse.disturbed(begin, hands.now())
    assert pulse.quantile_ms(0.99) == pytest.approx(0, abs=1e-3)


def test_a_stall_disturbs_what_it_overlaps_and_nothing_else(hands: Hands) -> None:
    pulse = Pulse(hands)
    before = hands.now()
    beats(pulse, hands, 10)
    began = hands.now()
    hands.move(INTERVAL_S + 2 * STALL_S)
    pulse.beat()
    ended = hands.now()
    beats(pulse, hands, 10)
    assert not pulse.disturbed(before, began)
    assert pulse.disturbed(before, ended)
    assert pulse.disturbed(began + STALL_S, hands.now())
    assert not pulse.disturbed(ended, hands.now())
    assert pulse.quantile_ms(1) == pytest.approx(2 * STALL_S * 1e3, abs=1)


def test_a_stall_counts_before_the_late_beat_has_come(hands: Hands) -> None:
    pulse = Pulse(hands)
    beats(pulse, hands, 3)
    began = hands.now()
    hands.move(1.0)
    assert pulse.disturbed(began, hands.now()), "the token was handled before the beat that would tell of the stall"


def test_a_suspend_shows_in_the_wall_clock_only(hands: Hands) -> None:
    pulse = Pulse(hands)
    began = hands.now()
    hands.move(INTERVAL_S, asleep=2 * SLEPT_S)
    pulse.beat()
    assert pulse.disturbed(began, hands.now())
    later = hands.now()
    beats(pulse, hands, 5)
    assert not pulse.disturbed(later, hands.now())


def test_a_clock_that_is_set_back_is_no_better_than_a_sleep(hands: Hands) -> None:
    pulse = Pulse(hands)
    began = hands.now()
    hands.move(INTERVAL_S, asleep=-3600)
    pulse.beat()
    assert pulse.disturbed(began, hands.now())


def test_only_so_many_stalls_are_remembered(hands: Hands) -> None:
    pulse = Pulse(hands)
    first = hands.now()
    for _ in range(N_STALLS + 1):
        hands.move(1.0)
        pulse.beat()
    assert not pulse.disturbed(first, first + 0.5)
    assert pulse.disturbed(hands.now() - 0.5, hands.now())


def test_before_the_first_beat_nothing_is_known_of_the_lag(hands: Hands) -> None:
    assert Pulse(hands).quantile_ms(0.5) is None


def test_each_lateness_is_told(hands: Hands) -> None:
    told: list[float] = []
    pulse = Pulse(hands, told.append)
    beats(pulse, hands, 2)
    hands.move(INTERVAL_S + 0.05)
    pulse.beat()
    assert told == pytest.approx([0.0, 0.0, 0.05], abs=1e-6)
