"""When an engine that has ended is started again: only an answer says that its model works."""

from __future__ import annotations

import itertools
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.lives import CRASHED, IDLE_S, LEFT_ALONE_MOST_S, LEFT_ALONE_S, MAX_LOADS, EngineLives
from disco_daemon.system.process import PAUSE_FIRST_S

ABORTED = -signal.SIGABRT
DONE = wire.Done(id="1", reason="stop", n_prompt=1, n_completion=1, busy_s=0.1)
CANCELLED = wire.Done(id="1", reason="cancelled", n_prompt=1, n_completion=1, busy_s=0.1)
FAILED = wire.Failed(id="1", reason="engine_error", message="no", your_fault=False)
ages = st.floats(0, 10 * IDLE_S)


def lived(lives: EngineLives, *replies: wire.Reply, age_s: float = 1.0, n_in_flight: int = 1) -> float:
    """A life that was ready for `age_s`, heard these replies, and crashed; the pause behind it, s."""
    now = 1000.0
    lives.begin(now)
    lives.ready_at = now + 1.0
    for reply in replies:
        lives.hear(reply)
    lives.end(now + 1.0 + age_s, ABORTED, n_in_flight)
    return lives.pause_s


@given(st.lists(ages, min_size=CRASHED, max_size=40))
def test_lives_that_end_at_a_request_are_ever_farther_apart_however_long_they_waited_for_it(found: list[float]) -> None:
    lives = EngineLives()
    pauses = [lived(lives, age_s=age_s) for age_s in found]
    assert lives.crashes
    later = pauses[CRASHED - 1 :]
    assert later[0] == LEFT_ALONE_S
    assert all(b == min(LEFT_ALONE_MOST_S, 2 * a) for a, b in itertools.pairwise(later))
    assert max(pauses[: CRASHED - 1]) < LEFT_ALONE_S, "one crash, or two, may be chance: the next answer waits for it"


@given(st.lists(st.tuples(ages, st.sampled_from([CANCELLED, FAILED])), min_size=CRASHED, max_size=CRASHED))
def test_only_an_answer_that_was_given_says_that_the_model_works(found: list[tuple[float, wire.Reply]]) -> None:
    lives = EngineLives()
    for age_s, reply in found:
        lived(lives, reply, age_s=age_s)
    assert lives.n_crashed == CRASHED
    assert lived(lives, DONE, age_s=20.0) <= PAUSE_FIRST_S
    assert lives.n_crashed == 0
    assert lived(lives, wire.Embedded(id="1", vectors=(b"",), n_tokens=1, busy_s=0.1), age_s=20.0) <= PAUSE_FIRST_S


def test_what_ends_an_engine_that_has_nothing_to_do_is_not_its_model() -> None:
    lives = EngineLives()
    for _ in range(2 * CRASHED):
        assert lived(lives, age_s=IDLE_S + 1, n_in_flight=0) <= PAUSE_FIRST_S
    assert not lives.crashes
    for _ in range(CRASHED):
        lived(lives, age_s=0.1, n_in_flight=0)  # at its warm-up
    assert lives.crashes


@pytest.mark.parametrize("has_loaded", [False, True])
def test_lives_that_end_while_they_load_are_given_up(has_loaded: bool) -> None:
    lives, n = EngineLives(), 0
    while not lives.is_given_up(has_loaded=has_loaded):
        lives.begin(float(n))
        lives.end(n + 0.5, ABORTED, 1)
        n += 1
    assert (n > MAX_LOADS) is has_loaded
    assert not lives.crashes


def test_the_words_name_what_it_was() -> None:
    lives = EngineLives()
    for _ in range(CRASHED):
        lived(lives)
    said = lives.verdict("the engine process was killed by signal 6")
    assert "this model's file crashes the engine: the engine process was killed by signal 6, 3 times in a row" in said
    lives.end(1e9, -signal.SIGKILL, 1)
    assert "crashes" not in lives.verdict(""), "it may be memory that is short"
