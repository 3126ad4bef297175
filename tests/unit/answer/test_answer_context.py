"""Where an answer fills a context, where the client has begun it, and where a source is silent too often."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.answer import (
    MAX_STALLS,
    Cancel,
    Complete,
    Deliver,
    Ended,
    Event,
    Fail,
    Followed,
    Move,
    Start,
    State,
)
from disco_daemon.errors import EndpointError
from disco_daemon.types import Continuation, Delivery, Finish, Plan, Side, Token
from tests.fixtures.answer import (
    DEVICE,
    EXACT,
    GUARDED,
    INF,
    NONE,
    SERVER,
    UNTRIED,
    Watch,
    broke,
    delivered,
    dropped,
    ended,
    guarded,
    played,
    said,
    to_follower,
)

FULL = Ended(DEVICE, Finish("length", full=True))
DEVICE_ONLY, SERVER_ONLY = Plan(0, INF), Plan(INF, 0)


def failure(watch: Watch) -> EndpointError:
    (end,) = watch.ends
    assert isinstance(end, Fail)
    assert isinstance(end.error, EndpointError)
    return end.error


# --- a full context ---------------------------------------------------------------------------------------------------


def test_a_device_whose_context_is_full_hands_the_answer_to_the_server() -> None:
    watch, effects = played(said(DEVICE, "one"), said(DEVICE, " two"), FULL, plan=DEVICE_ONLY)
    assert effects == [Start(SERVER, "one two", n_tokens=2)]
    watch.on(said(SERVER, " three"))
    assert watch.on(ended(SERVER))[-1] == Complete("stop")
    assert watch.shown == "one two three"
    (move,) = watch.answer.moves
    assert (move.reason, move.source, move.target) == ("context", DEVICE, SERVER)


def test_alone_from_the_start_a_full_context_is_a_length_as_with_everybody() -> None:
    watch, effects = played(said(DEVICE, "one"), FULL, available=frozenset({DEVICE}))
    assert effects == [Complete("length")]
    assert watch.shown == "one"


def test_at_the_limit_a_full_context_is_a_length_too() -> None:
    assert played(said(DEVICE, "one"), FULL, plan=DEVICE_ONLY, max_tokens=1)[1] == [Complete("length")]


@pytest.mark.parametrize(
    "script",
    [
        (said(DEVICE, "one"), FULL, broke(SERVER)),
        (said(SERVER, "one"), broke(SERVER), FULL),
        (said(SERVER, "one"), broke(SERVER), said(DEVICE, " two"), FULL),
    ],
)
def test_a_dead_server_and_a_full_device_are_an_error_that_says_both(script: tuple[Event, ...]) -> None:
    watch, _ = played(*script)
    error = failure(watch)
    assert error.code == "context_full"
    assert "fills the context of the device" in str(error)
    assert "server cut" in str(error)
    assert watch.shown in ("one", "one two")


def test_a_server_that_cannot_continue_leaves_an_error_that_says_so() -> None:
    watch, _ = played(said(DEVICE, "one"), FULL, plan=DEVICE_ONLY, continuation={DEVICE: EXACT, SERVER: NONE})
    assert "the server cannot go on" in str(failure(watch))


def test_a_target_without_room_is_dropped_and_the_living_source_goes_on() -> None:
    watch, effects = to_follower(FULL)
    assert effects == []
    assert dropped(watch) == ["context_full"]
    assert watch.on(Move(DEVICE, "stall")) == [], "it is not asked again"
    assert watch.on(ended(SERVER))[-1] == Complete("stop")
    followed, _ = to_follower(said(SERVER, " three"), Followed(DEVICE), said(SERVER, " four"), FULL)
    assert dropped(followed) == ["context_full"]
    assert followed.on(ended(SERVER))[-1] == Complete("stop")
    assert followed.shown == "one two three four"


def test_a_device_that_fills_up_while_the_server_takes_over_leaves_it_to_the_server() -> None:
    watch, effects = played(said(DEVICE, "one"), Move(SERVER, "cost"), FULL, plan=DEVICE_ONLY)
    assert effects == []
    watch.on(said(SERVER, " two"))
    watch.on(ended(SERVER))
    assert watch.shown == "one two"
    assert watch.answer.moves[0].reason == "context"


def test_a_device_that_is_full_before_its_first_token_loses_the_race() -> None:
    watch, effects = played(FULL)
    assert effects == []
    assert watch.on(said(SERVER, "Hi")) == [Deliver(Token("Hi"))]
    assert played(FULL, plan=Plan(0, 3.0))[1] == [Start(SERVER)]


# --- silence ----------------------------------------------------------------------------------------------------------


def test_targets_for_a_silent_source_are_bounded() -> None:
    watch, _ = played(said(DEVICE, "one"), plan=DEVICE_ONLY)
    n_started = 0
    for i in range(50):
        effects = watch.on(Move(SERVER, "stall"))
        n_started += Start in map(type, effects)
        watch.on(said(DEVICE, f" w{i}"))
        watch.on(said(SERVER, " mismatch"))
        if watch.answer.state is State.HANDOFF:
            watch.on(broke(SERVER, "timeout"))
    assert n_started <= MAX_STALLS
    assert watch.on(ended(DEVICE))[-1] == Complete("stop")


def test_a_dropped_target_of_a_stall_is_tried_as_often_as_the_bound_says() -> None:
    watch, _ = played(said(DEVICE, "one"), plan=DEVICE_ONLY, delivery=Delivery.PACED)
    starts = []
    for i in range(10):
        starts += [e for e in watch.on(Move(SERVER, "stall")) if isinstance(e, Start)]
        watch.on(said(DEVICE, f" w{i}"), 1.0)  # it is shown: the target has to say the same
        watch.on(said(SERVER, " something else"))
    assert len(starts) == MAX_STALLS
    assert dropped(watch) == ["mismatch"] * MAX_STALLS


def test_an_answer_at_its_limit_is_not_moved() -> None:
    assert played(said(DEVICE, "one"), Move(SERVER, "stall"), plan=DEVICE_ONLY, max_tokens=1)[1] == []


# --- what the client has begun ----------------------------------------------------------------------------------------

BEGUN = "Once upon a time, there lived"


@pytest.mark.parametrize("before", [BEGUN, "```python\n"])
@pytest.mark.parametrize("trust", [GUARDED, UNTRIED])
def test_an_echo_of_what_the_client_has_begun_neither_wins_nor_is_shown(before: str, trust: Continuation) -> None:
    more: dict[str, Any] = {"continuation": {DEVICE: EXACT, SERVER: trust}, "before": before}
    watch, effects = played(said(SERVER, before[:4]), **more)
    assert effects == []
    assert watch.on(said(SERVER, before[4:])) == []
    assert watch.answer.state is State.RACING
    assert watch.on(said(SERVER, " an old")) == [Cancel(DEVICE), Deliver(Token(" an old"))]
    assert watch.on(said(SERVER, before)) == [Deliver(Token(before))], "later it is text like any other"
    assert watch.answer.tokens[SERVER] == 2


def test_a_continuation_goes_straight_on() -> None:
    for trust in (EXACT, GUARDED):
        more: dict[str, Any] = {"continuation": {DEVICE: EXACT, SERVER: trust}, "before": BEGUN}
        assert delivered(played(said(SERVER, " an old"), **more)[1]) == " an old"


def test_an_answer_begun_anew_is_none_and_the_device_goes_on() -> None:
    watch, effects = played(said(SERVER, BEGUN[:20] + " was"), before=BEGUN, plan=SERVER_ONLY, **guarded)
    assert effects == [Cancel(SERVER), Start(DEVICE)]
    assert watch.on(said(DEVICE, " an")) == [Deliver(Token(" an"))]


def test_an_echo_that_the_limit_cuts_is_no_answer() -> None:
    watch, _ = played(said(SERVER, BEGUN[:20]), plan=SERVER_ONLY, before=BEGUN, max_tokens=5, **guarded)
    assert watch.on(ended(SERVER, "length")) == [Start(DEVICE)]


def test_an_echo_alone_is_an_answer_that_says_nothing_more() -> None:
    watch, _ = played(said(SERVER, BEGUN), before=BEGUN, plan=SERVER_ONLY, **guarded)
    assert watch.on(ended(SERVER)) == [Complete("stop")]
    assert watch.shown == ""


def test_words_that_were_asked_for_again_are_trimmed_from_the_first_token_on() -> None:
    def last_word(side: Side, text: str) -> str | None:
        return (BEGUN + text).split()[-1] if side is SERVER else None

    watch, _ = played(
        said(SERVER, "Sure: there"), said(SERVER, " lived an"), before=BEGUN, overlap=last_word, **guarded
    )
    assert watch.shown == " an"


def test_an_echo_after_a_handoff_repeats_what_the_client_has_begun_too() -> None:
    watch, _ = played(said(DEVICE, " an old"), Move(SERVER, "cost"), before=BEGUN, plan=DEVICE_ONLY, **guarded)
    watch.on(said(SERVER, BEGUN + " an old"))
    watch.on(said(SERVER, " clockmaker"))
    assert watch.shown == " an old clockmaker"
