"""How long an engine or a relay that has ended waits before it is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.system.process import PAUSE_FIRST_S, PAUSE_JITTER, PAUSE_MAX_S, USEFUL_S, RestartPause

lives = st.lists(st.tuples(st.floats(0, 600), st.floats(0, 600)), max_size=20)


@given(lives, st.floats(0, 600))
def test_behind_a_useful_life_it_is_back_at_once_whatever_was_before(
    before: list[tuple[float, float]], start_s: float
) -> None:
    pause = RestartPause()
    for life in before:
        pause.after(*life)
    assert pause.after(start_s, max(USEFUL_S, start_s) + 0.1) <= PAUSE_FIRST_S


@given(lives)
def test_a_pause_is_never_longer_than_its_bound(before: list[tuple[float, float]]) -> None:
    pause = RestartPause()
    assert all(0 < pause.after(*life) <= PAUSE_MAX_S for life in before)


def test_a_process_that_ends_again_and_again_takes_ever_less_of_the_machine() -> None:
    pause = RestartPause()
    waits = [pause.after(0.2, 0.1) for _ in range(12)]
    floors = [min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**n) * (1 - PAUSE_JITTER) for n in range(12)]
    assert all(wait >= floor for wait, floor in zip(waits, floors, strict=True))


def test_a_life_that_took_longer_to_start_than_it_worked_was_of_little_use() -> None:
    pause = RestartPause()
    pause.after(60.0, 30.0)
    assert pause.after(60.0, 30.0) > PAUSE_FIRST_S * (1 - PAUSE_JITTER) * 1.99
