from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.answer import (
    Answer,
    Arrived,
    Begin,
    Broke,
    Cancel,
    Complete,
    Deliver,
    Due,
    Ended,
    Event,
    Fail,
    Followed,
    Move,
    Note,
    SetTimer,
    Start,
    Tick,
)
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.errors import EndpointError, Unavailable
from disco_daemon.types import BOTH, CallPart, Continuation, Delivery, Delta, Finish, Plan, Side, Token
from tests.fixtures.answer import (
    CALL,
    DEVICE,
    EXACT,
    INF,
    NONE,
    PACE_TPS,
    SERVER,
    STEP_S,
    TO_SERVER,
    Watch,
    broke,
    delivered,
    dropped,
    ended,
    gone,
    guarded,
    played,
    said,
)

# --- any interleaving -------------------------------------------------------------------------------------------------

texts = st.sampled_from(
    ["", "a", "Once", "Once upon a time", ", there", "Once upon a time, there", " was", "👍", "🏽", "\r"]
)
tokens = st.builds(Token, texts, st.integers(0, 2), st.sampled_from([None, None, None, Delta(calls=(CallPart(0),))]))
causes = st.sampled_from(["cost", "stall"])


def events(side: Side) -> st.SearchStrategy[Event]:
    arrived = st.builds(Arrived, st.just(side), tokens)
    ended = st.builds(Ended, st.just(side), st.builds(Finish, st.sampled_from(["stop", "length"])))
    reasons = st.sampled_from(["engine_gone", "stalled"] if side is DEVICE else ["timeout", "cut"])
    error = st.builds(EndpointError, st.just(side), reasons, st.just("broken"), your_fault=st.booleans())
    own = st.one_of(st.builds(Broke, st.just(side), error), ended, st.builds(Due, st.just(side)))
    return st.one_of(arrived, arrived, own, st.builds(Move, st.just(side), causes), st.just(Followed(side)))


any_event = st.one_of(events(DEVICE), events(SERVER), events(DEVICE), events(SERVER), st.just(Begin()), st.just(Tick()))
steps = st.tuples(any_event, st.sampled_from([0.0, 0.0, STEP_S, 1.0]))
delays = st.sampled_from([0.0, 0.5, 1.0, INF])
buffers = st.builds(TokenBuffer, st.sampled_from(Delivery), st.just(PACE_TPS))
answers = st.builds(
    Answer,
    plan=st.builds(Plan, delays, delays),
    available=st.frozensets(st.sampled_from(Side)) | st.just(BOTH),
    max_tokens=st.none() | st.integers(1, 6),
    stop=st.sampled_from([(), (), ("aO", "upon a time, there")]),
    continuation=st.fixed_dictionaries(dict.fromkeys(Side, st.sampled_from(Continuation))),
    followers=st.sampled_from([frozenset(), frozenset({DEVICE})]),
    joinable=st.sampled_from([True, True, True, False]),
    overlap=st.sampled_from([lambda side, text: None, lambda side, text: text[-4:] if side is SERVER else None]),
    buffer=buffers,
)


@settings(max_examples=1000)
@given(answers, st.booleans(), st.integers(0, 3), st.lists(steps, max_size=30))
def test_any_interleaving_keeps_every_promise(
    answer: Answer, begun: bool, reserve: int, script: Sequence[tuple[Event, float]]
) -> None:
    answer.buffer.reserve = reserve
    watch = Watch(answer)
    if begun:
        watch.on(Begin())
    for event, after_s in script:
        watch.on(event, after_s)


# --- the race ---------------------------------------------------------------------------------------------------------


def test_the_race_is_won_by_the_first_token_and_the_loser_is_cancelled_before_it_is_shown() -> None:
    watch, effects = played(said(SERVER, "Hi"))
    assert effects == [Cancel(DEVICE), Deliver(Token("Hi"))]
    assert watch.answer.winner is SERVER
    assert watch.on(said(DEVICE, "Hello")) == []
    assert watch.on(ended(SERVER)) == [Complete("stop")]


def test_a_race_starts_both_at_once() -> None:
    assert played()[1] == [Start(DEVICE), Start(SERVER)]


def test_the_delay_policy_starts_the_device_only_when_it_is_due() -> None:
    watch, effects = played(plan=Plan(0.3, 0))
    assert effects == [Start(SERVER), SetTimer(DEVICE, 0.3)]
    assert watch.on(Due(DEVICE)) == [Start(DEVICE)]
    assert watch.on(Due(DEVICE)) == []


def test_the_delay_policy_starts_the_device_at_once_when_the_server_fails() -> None:
    assert played(broke(SERVER), plan=Plan(0.3, 0))[1] == [Start(DEVICE)]


def test_a_failure_before_the_first_token_starts_the_other_side_even_if_the_plan_did_not_use_it() -> None:
    assert played(gone(), plan=Plan(0, INF))[1] == [Start(SERVER)]
    assert played(broke(SERVER), plan=Plan(INF, 0))[1] == [Start(DEVICE)]


def test_the_only_side_available_starts_at_once_even_if_the_plan_did_not_use_it() -> None:
    assert played(plan=Plan(INF, 0), available=frozenset({DEVICE}))[1] == [Start(DEVICE)]


@pytest.mark.parametrize("side", Side)
def test_the_only_side_available_waits_for_nobody(side: Side) -> None:
    assert played(plan=Plan(1.5, 1.5), available=frozenset({side}))[1] == [Start(side)]


def test_without_any_side_the_answer_fails_as_unavailable() -> None:
    (effect,) = played(available=frozenset())[1]
    assert isinstance(getattr(effect, "error", None), Unavailable)


# --- a failure in mid-answer ------------------------------------------------------------------------------------------


def test_a_device_alone_that_dies_in_mid_answer_gets_no_second_chance() -> None:
    assert isinstance(played(said(DEVICE, "Hi"), gone(), available=frozenset({DEVICE}))[1][-1], Fail)


def test_when_the_device_dies_the_server_that_lost_the_race_carries_on() -> None:
    watch, effects = played(said(DEVICE, "Hi"), gone())
    assert effects == [Start(SERVER, "Hi", n_tokens=1)]
    note = Note("handoff device to server after 1 tokens (failure)")
    assert watch.on(said(SERVER, " there")) == [note, Deliver(Token(" there"))]
    assert (watch.shown, watch.answer.handoffs, watch.answer.winner) == ("Hi there", 1, DEVICE)
    assert watch.answer.tokens == {DEVICE: 1, SERVER: 1}


def test_when_the_server_cannot_continue_a_died_device_it_is_restarted_once() -> None:
    watch, effects = played(said(DEVICE, "Hi"), gone(), broke(SERVER))
    assert effects == [Start(DEVICE, "Hi", n_tokens=1)]
    assert watch.on(said(DEVICE, " you"))[1:] == [Deliver(Token(" you"))], "it is not cancelled as its own source"
    assert isinstance(watch.on(gone())[-1], Fail)


def test_a_device_that_died_before_the_first_token_is_not_tried_again() -> None:
    _, effects = played(gone(), said(SERVER, "Hi"), broke(SERVER))
    assert isinstance(effects[-1], Fail), "the request that killed the engine would kill it again"


def test_a_server_that_cannot_continue_is_not_asked_to_and_the_device_is_restarted_once() -> None:
    continuation = {DEVICE: EXACT, SERVER: NONE}
    for again in (gone(), broke(DEVICE, "stalled")):
        watch, effects = played(said(DEVICE, "Hi"), gone(), continuation=continuation)
        assert effects == [Start(DEVICE, "Hi", n_tokens=1)]
        assert isinstance(watch.on(again)[-1], Fail)
    assert isinstance(played(said(DEVICE, "Hi"), broke(DEVICE, "stalled"), continuation=continuation)[1][-1], Fail)
    assert played(gone(), plan=Plan(0, INF), continuation=continuation)[1] == [Start(SERVER)], "nothing to continue"


def test_a_side_that_is_not_configured_need_not_say_how_it_continues() -> None:
    alone: dict[str, Any] = {"available": frozenset({DEVICE}), "continuation": {DEVICE: EXACT}}
    assert isinstance(played(said(DEVICE, "Hi"), gone(), **alone)[1][-1], Fail)


def test_an_answer_that_may_not_be_shared_is_not_continued_by_the_other_side() -> None:
    assert isinstance(played(said(DEVICE, "Hi"), gone(), joinable=False)[1][-1], Fail)
    assert played(gone(), plan=Plan(0, INF), joinable=False)[1] == [Start(SERVER)]


def test_a_target_that_continues_exactly_may_repeat_itself() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone())
    assert watch.on(said(SERVER, "Once upon a time"))[1:] == [Deliver(Token("Once upon a time"))]


def test_a_target_that_starts_the_answer_again_is_swallowed_until_it_says_something_new() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone(), **guarded)
    assert watch.on(said(SERVER, "Once upon")) == []
    assert watch.on(said(SERVER, " a time, there"))[1:] == [Deliver(Token(", there"))]
    assert watch.shown == "Once upon a time, there"


def test_a_target_that_tells_another_story_is_dropped_and_the_device_restarted() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time, there"), gone(), **guarded)
    start = Start(DEVICE, "Once upon a time, there", n_tokens=1)
    assert watch.on(said(SERVER, "Once upon a time I")) == [Cancel(SERVER), start]
    assert watch.on(said(SERVER, " was")) == []
    assert dropped(watch) == ["restart"]


def test_the_end_of_a_handoff_gives_out_what_the_seam_held_as_the_targets_text() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone(), said(SERVER, "Once", 3), **guarded)
    assert watch.on(ended(SERVER))[1:] == [Deliver(Token("Once", 3)), Complete("stop")]
    assert watch.answer.source is SERVER


def test_a_target_that_ends_within_its_repetition_of_the_answer_has_not_finished_it() -> None:
    """A server that begins again, and has only the rest's max_tokens to do so: no end of the answer."""
    story = "Once upon a time, there"
    watch, _ = played(said(DEVICE, story), TO_SERVER, said(SERVER, "Once upon a time"), **guarded)
    assert watch.on(ended(SERVER)) == []
    assert dropped(watch) == ["restart"]
    assert watch.on(said(DEVICE, " was")) == [Deliver(Token(" was"))]
    watch, _ = played(said(DEVICE, story), broke(DEVICE), said(SERVER, "Once upon a time"), **guarded)
    assert isinstance(watch.on(ended(SERVER, "length"))[-1], Fail)
    watch, _ = played(said(DEVICE, story), TO_SERVER, said(SERVER, story), **guarded)
    assert watch.on(ended(SERVER))[-1] == Complete("stop"), "it has nothing to add"


def test_text_that_the_seam_held_counts_with_all_its_tokens() -> None:
    script = (said(DEVICE, "Once upon a time", 4), gone(), said(SERVER, "On", 3), said(SERVER, " top", 2))
    watch, _ = played(*script, **guarded)
    assert watch.shown == "Once upon a timeOn top"
    assert watch.answer.tokens == {DEVICE: 4, SERVER: 5}


def test_a_failure_when_all_allowed_tokens_are_delivered_completes_with_length() -> None:
    _, effects = played(said(DEVICE, "Hi"), said(DEVICE, " you"), gone(), max_tokens=2)
    assert effects == [Complete("length")]


def test_a_tool_call_is_never_continued_by_the_other_side() -> None:
    assert isinstance(played(Arrived(SERVER, CALL), broke(SERVER))[1][-1], Fail)


def test_an_answer_moves_at_most_max_handoffs_times() -> None:
    watch, _ = played(said(DEVICE, "Hi"), gone(), said(SERVER, " a"), broke(SERVER), said(DEVICE, " b"))
    assert isinstance(watch.on(broke(DEVICE, "stalled"))[-1], Fail)


def test_the_error_shown_is_the_requests_own_fault_if_there_is_one_else_the_first() -> None:
    own = broke(SERVER, "context_length_exceeded", your_fault=True)
    assert played(broke(DEVICE), own)[1] == [Fail(own.error)]
    first = broke(SERVER)
    assert played(first, gone())[1] == [Fail(first.error)]


def test_what_the_buffer_holds_is_shown_before_the_error() -> None:
    paced: dict[str, Any] = {"delivery": Delivery.PACED, "available": frozenset({SERVER})}
    watch, effects = played(said(SERVER, "Hi"), said(SERVER, " there"), broke(SERVER), **paced)
    assert delivered(effects) == " there"
    assert isinstance(watch.ends[0], Fail)
