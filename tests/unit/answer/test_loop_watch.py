# mypy: disable-error-code="unreachable, comparison-overlap, arg-type, unused-ignore"
"""An answer that repeats itself ends there, whichever side makes it, and goes nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.answer import Arrived, Cancel, Complete, Ended, LoopWatch, Move, Start, State
from disco_daemon.types import CallPart, Delivery, Delta, Finish, Plan, Side, Token
from tests.fixtures.answer import DEVICE, INF, RACE, SERVER, Watch, broke, delivered, ended, played, said

DEVICE_ONLY = Plan(0, INF)
SENTENCE = "I am a stranger in this town, and so are you. "
SURE = 60  # sentences, more than enough


def is_done(watch: Watch) -> bool:
    """Whether the answer has ended. A function, since a type checker takes a state that was seen for what is now."""
    return watch.answer.state is State.DONE


def looped(side: Side = DEVICE, n: int = SURE, **more: Any) -> Watch:
    """An answer after a good word and `n` times the sentence, as far as it went."""
    watch, _ = played(said(side, "Hello. "), plan=Plan(0, INF) if side is DEVICE else Plan(INF, 0), **more)
    for _ in range(n):
        for word in SENTENCE.split(" ")[:-1]:
            if not is_done(watch):
                watch.on(said(side, word + " "))
    return watch


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("delivery", Delivery)
def test_a_loop_ends_the_answer_as_a_limit_does_and_stops_its_side(side: Side, delivery: Delivery) -> None:
    watch = looped(side, delivery=delivery, stop=("never said",))
    assert watch.ends == [Complete("length")]
    assert watch.answer.stopped == "repetition"
    assert not watch.running
    assert watch.shown == watch.answer.text, "all that was made until then stands"
    assert watch.shown.startswith("Hello. " + SENTENCE)
    assert len(watch.shown) < 8 * len(SENTENCE)
    assert watch.answer.moves == []


def test_a_loop_that_comes_in_one_piece_is_cut_where_it_would_have_ended() -> None:
    in_words = looped().answer
    watch, effects = played(said(DEVICE, "Hello. "), said(DEVICE, SENTENCE * SURE, 600), plan=DEVICE_ONLY)
    assert effects[-1] == Complete("length")
    assert abs(len(watch.answer.text) - len(in_words.text)) <= len("stranger ")
    assert watch.answer.text.startswith(in_words.text[:-10])
    assert 1 < watch.answer.n_generated < 120


def test_an_answer_that_may_be_in_a_loop_does_not_move_for_money() -> None:
    watch = looped(n=1)
    movable = [watch.answer.movable]
    for _ in range(4):
        watch.on(said(DEVICE, SENTENCE))
    assert watch.answer.state is State.RELAYING
    movable.append(watch.answer.movable)
    watch.on(
        said(DEVICE, "But then it went on with something else that nobody had expected, least of all the two of us, ")
    )
    assert [*movable, watch.answer.movable] == [True, False, True]


def test_a_context_that_a_loop_has_filled_is_no_reason_to_ask_the_other_side() -> None:
    watch = looped(n=5)
    assert watch.answer.state is State.RELAYING
    effects = watch.on(Ended(DEVICE, Finish("length", full=True)))
    assert effects[-1] == Complete("length")
    assert not any(isinstance(effect, Start) for effect in effects)
    assert watch.answer.stopped == "repetition"


def test_a_handoff_that_is_under_way_is_called_off_and_both_sides_are_stopped() -> None:
    watch = looped(n=1)
    assert watch.on(Move(SERVER, "cost"))
    while watch.answer.state is State.HANDOFF:
        effects = watch.on(said(DEVICE, SENTENCE))
    assert is_done(watch)
    assert {effect.side for effect in effects if isinstance(effect, Cancel)} == set(Side)
    assert watch.answer.stopped == "repetition"
    assert [move.dropped for move in watch.answer.moves] == ["the source had finished before"]


def test_a_loop_that_begins_on_one_side_is_seen_on_the_other() -> None:
    watch = looped(n=3)
    watch.on(broke(DEVICE))
    n_before = len(watch.answer.text)
    assert watch.answer.state is State.HANDOFF
    while not is_done(watch):
        watch.on(said(SERVER, SENTENCE))
    assert watch.answer.stopped == "repetition"
    assert len(watch.answer.text) < n_before + 5 * len(SENTENCE)


def test_what_waits_for_a_stop_string_beyond_the_loop_is_not_shown() -> None:
    watch, _ = played(said(DEVICE, "Hello. "), plan=DEVICE_ONLY, stop=("a stranger in that",))
    while not is_done(watch):
        watch.on(said(DEVICE, SENTENCE))
    assert watch.answer.stopped == "repetition"
    assert watch.answer.stop_met is None


def test_a_watch_that_is_off_lets_everything_pass() -> None:
    watch = looped(watch=LoopWatch(is_on=False))
    assert watch.answer.state is State.RELAYING
    watch.on(ended(DEVICE))
    assert watch.answer.stopped is None


def test_a_server_that_has_stopped_a_loop_itself_is_believed() -> None:
    watch, _ = played(said(SERVER, "na na"), plan=Plan(INF, 0))
    watch.on(Ended(SERVER, Finish("length", repeated=True)))
    assert (watch.ends, watch.answer.stopped) == ([Complete("length")], "repetition")


def delta(**parts: Any) -> Arrived:
    return Arrived(SERVER, Token("", 12, Delta(**parts)))


@pytest.mark.parametrize("kind", ["thought", "refusal"])
def test_a_loop_in_a_thought_is_a_loop(kind: str) -> None:
    watch, _ = played(plan=Plan(INF, 0))
    for _ in range(SURE):
        if not is_done(watch):
            watch.on(delta(**{kind: SENTENCE}))
    assert watch.answer.stopped == "repetition"
    assert watch.answer.n_generated < 8 * 12


def test_the_arguments_of_a_call_may_repeat_themselves_for_longer_than_a_text() -> None:
    watch, _ = played(plan=Plan(INF, 0))
    n = 0
    while not is_done(watch):
        watch.on(delta(calls=(CallPart(0, SENTENCE),)))
        n += 1
    assert 8 < n < 30
    assert watch.answer.stopped == "repetition"


def test_of_two_choices_one_in_a_loop_leaves_the_other_alone() -> None:
    watch, _ = played(plan=Plan(INF, 0), watch=LoopWatch(choices=2), joinable=False)

    def one(index: int, text: str, end: str | None = None) -> None:
        watch.on(Arrived(SERVER, Token(text, 1, Delta(), index=index, ended=end)))

    for i in range(SURE):
        one(0, SENTENCE)
        one(1, f"The {i}th thing is {i * i * 7919:x}. ")
    assert watch.answer.state is State.RELAYING
    one(1, "The end.", "stop")
    assert is_done(watch)
    assert watch.answer.stopped == "repetition"


def test_two_answers_that_end_by_themselves_are_not_stopped() -> None:
    watch, _ = played(plan=RACE, watch=LoopWatch(choices=2), joinable=False)
    for index in (0, 1):
        watch.on(Arrived(SERVER, Token("Yes.", 1, Delta(), index=index, ended="stop" if index == 0 else None)))
    watch.on(ended(SERVER))
    assert watch.answer.stopped is None


def test_log_probabilities_stay_with_their_token() -> None:
    watch, _ = played(said(SERVER, "Hello. "), plan=Plan(INF, 0))
    token = Token(SENTENCE * SURE, 600, logprobs={"content": []})
    watch.on(Arrived(SERVER, token))
    assert delivered(watch.on(ended(SERVER))) == ""
    assert watch.answer.text == "Hello. " + token.text
    assert watch.answer.stopped == "repetition"
