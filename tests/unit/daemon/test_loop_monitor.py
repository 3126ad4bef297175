"""What was measured while this process stood still, or the machine slept, is known as such."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from disco_daemon.daemon.tasks.loop_monitor import INTERVAL_S, N_STALLS, SLEPT_S, STALL_S, LoopMonitor


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


def look(monitor: LoopMonitor, hands: Hands, n: int) -> None:
    for _ in range(n):
        hands.move(INTERVAL_S)
        monitor.look()


def test_a_punctual_loop_disturbs_nothing(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    begin = hands.now()
    look(monitor, hands, 50)
    assert not monitor.was_disturbed(begin, hands.now())
    assert monitor.quantile_ms(0.99) == pytest.approx(0, abs=1e-3)


def test_a_stall_disturbs_what_it_overlaps_and_nothing_else(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    before = hands.now()
    look(monitor, hands, 10)
    began = hands.now()
    hands.move(INTERVAL_S + 2 * STALL_S)
    monitor.look()
    ended = hands.now()
    look(monitor, hands, 10)
    assert not monitor.was_disturbed(before, began)
    assert monitor.was_disturbed(before, ended)
    assert monitor.was_disturbed(began + STALL_S, hands.now())
    assert not monitor.was_disturbed(ended, hands.now())
    assert monitor.quantile_ms(1) == pytest.approx(2 * STALL_S * 1e3, abs=1)


def test_a_stall_counts_before_the_late_beat_has_come(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    look(monitor, hands, 3)
    began = hands.now()
    hands.move(1.0)
    assert monitor.was_disturbed(began, hands.now()), (
        "the token was handled before the look that would tell of the stall"
    )


def test_a_suspend_shows_in_the_wall_clock_only(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    began = hands.now()
    hands.move(INTERVAL_S, asleep=2 * SLEPT_S)
    monitor.look()
    assert monitor.was_disturbed(began, hands.now())
    later = hands.now()
    look(monitor, hands, 5)
    assert not monitor.was_disturbed(later, hands.now())


def test_a_clock_that_is_set_back_is_no_better_than_a_sleep(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    began = hands.now()
    hands.move(INTERVAL_S, asleep=-3600)
    monitor.look()
    assert monitor.was_disturbed(began, hands.now())


def test_only_so_many_stalls_are_remembered(hands: Hands) -> None:
    monitor = LoopMonitor(hands)
    first = hands.now()
    for _ in range(N_STALLS + 1):
        hands.move(1.0)
        monitor.look()
    assert not monitor.was_disturbed(first, first + 0.5)
    assert monitor.was_disturbed(hands.now() - 0.5, hands.now())


def test_before_the_first_beat_nothing_is_known_of_the_lag(hands: Hands) -> None:
    assert LoopMonitor(hands).quantile_ms(0.5) is None


def test_each_lateness_is_told(hands: Hands) -> None:
    told: list[float] = []
    monitor = LoopMonitor(hands, told.append)
    look(monitor, hands, 2)
    hands.move(INTERVAL_S + 0.05)
    monitor.look()
    assert told == pytest.approx([0.0, 0.0, 0.05], abs=1e-6)
