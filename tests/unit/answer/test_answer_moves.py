from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.answer import (
    GO_WITHIN,
    MAX_CHASES,
    Arrived,
    Cancel,
    Complete,
    Deliver,
    Effect,
    Event,
    Fail,
    Feed,
    Followed,
    Move,
    Note,
    Start,
    State,
    Tick,
)
from disco_daemon.types import Delivery, Token
from disco_daemon.types.thought_marks import TAGS
from tests.fixtures.answer import (
    CALL,
    DEVICE,
    EXACT,
    NONE,
    SERVER,
    STEP_S,
    TO_DEVICE,
    TO_SERVER,
    UNTRIED,
    broke,
    delivered,
    dropped,
    ended,
    follower,
    gone,
    guarded,
    played,
    said,
    to_follower,
    to_server,
)

# --- a move to a follower ---------------------------------------------------------------------------------------------


def test_a_follower_is_started_held_with_the_answer_so_far_and_the_source_goes_on() -> None:
    watch, effects = to_follower()
    assert effects == [Start(DEVICE, "one two", n_tokens=2, held=True)]
    assert watch.answer.state is State.HANDOFF
    assert watch.on(said(SERVER, " three")) == [Deliver(Token(" three"))], "nothing is held back while it follows"


def test_a_follower_that_lacks_much_is_fed_and_follows_on_and_then_goes() -> None:
    watch, _ = to_follower(*(said(SERVER, f" {i}") for i in range(GO_WITHIN + 1)))
    fed = "".join(f" {i}" for i in range(GO_WITHIN + 1))
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, fed, (), go=False)]
    watch.on(said(SERVER, " last"))
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, " last", (), go=True)]
    assert watch.on(Followed(DEVICE)) == [], "it was told already"


def test_a_follower_that_never_catches_up_goes_after_some_chases() -> None:
    watch, _ = to_follower()
    feeds: list[Effect] = []
    for _ in range(MAX_CHASES + 1):
        watch.on(said(SERVER, " much", GO_WITHIN + 1))
        feeds += watch.on(Followed(DEVICE))
    assert [getattr(feed, "go", None) for feed in feeds] == [False] * MAX_CHASES + [True]


def test_the_source_is_cancelled_only_when_the_target_speaks_and_its_tail_is_thrown_away() -> None:
    watch, effects = to_follower(Followed(DEVICE), said(SERVER, " three"))
    assert effects == [], "the tail is shown only to a reader who starves"
    note = Note("handoff server to device after 2 tokens (cost)")
    joined = watch.on(said(DEVICE, " drei"))
    assert joined == [Cancel(SERVER), note, Deliver(Token(" drei"))]
    assert watch.answer.tokens == {SERVER: 2, DEVICE: 1}
    (move,) = watch.answer.moves
    assert (move.at, move.source, move.target, move.reason, move.overlap) == (2, SERVER, DEVICE, "cost", 1)
    assert move.dropped is None
    watch.on(ended(DEVICE))
    assert watch.shown == "one two drei"


def test_a_move_takes_from_the_decision_to_the_first_joined_token() -> None:
    watch, _ = to_follower()
    watch.on(Followed(DEVICE), 0.5)
    watch.on(said(DEVICE, " three"), 0.25)
    assert watch.answer.moves[0].took_s == pytest.approx(0.75)


def test_a_token_of_a_follower_that_was_not_told_to_go_is_none() -> None:
    watch, effects = to_follower(said(DEVICE, "stale"))
    assert effects == []
    assert watch.answer.text == "one two"


def test_a_follower_goes_on_when_the_source_dies_before_it_has_caught_up() -> None:
    many = [said(SERVER, " x") for _ in range(GO_WITHIN + 1)]
    watch, effects = to_follower(*many, broke(SERVER))
    assert effects == []
    assert getattr(watch.on(Followed(DEVICE))[0], "go", False), "nothing more will come"
    watch.on(said(DEVICE, " y"))
    assert watch.answer.moves[0].reason == "failure"
    assert watch.on(ended(DEVICE)) == [Complete("stop")]


def test_a_follower_that_ends_while_held_has_no_room_and_the_source_goes_on() -> None:
    watch, effects = to_follower(ended(DEVICE, "length"))
    assert effects == []
    assert dropped(watch) == ["refused"]
    assert watch.on(ended(SERVER)) == [Complete("stop")]


def test_a_dead_source_leaves_a_device_that_need_not_follow() -> None:
    watch, effects = played(said(SERVER, "Hi"), broke(SERVER), **follower)
    assert effects == [Start(DEVICE, "Hi", n_tokens=1)]
    assert watch.on(said(DEVICE, " you"))[-1] == Deliver(Token(" you"))


# --- a move to a target that cannot follow ----------------------------------------------------------------------------


def test_a_target_that_cannot_follow_starts_at_once_and_the_source_insures_it() -> None:
    watch, effects = to_server()
    assert effects == [Start(SERVER, "one two", n_tokens=2)]
    assert watch.on(said(DEVICE, " three")) == []
    effects = watch.on(said(SERVER, " trois"))
    assert effects[0] == Cancel(DEVICE)
    assert delivered(effects) == " trois"
    assert watch.answer.moves[0].overlap == 1


def test_a_reader_who_starves_gets_the_tail_and_a_target_that_agrees_takes_over_behind_it() -> None:
    watch, _ = to_server(said(DEVICE, " three"), said(DEVICE, " four"))
    assert delivered(watch.on(Tick(), STEP_S)) == " three"
    assert watch.on(said(SERVER, " thr")) == [], "it does not cover what was shown"
    effects = watch.on(said(SERVER, "ee fo"))
    assert delivered(effects) == " fo"
    assert watch.answer.tokens == {DEVICE: 3, SERVER: 1}
    assert watch.answer.moves[0].overlap == 1, "four was never shown"
    watch.on(said(SERVER, "ur"))
    watch.on(ended(SERVER))
    assert watch.shown == "one two three four"


def test_a_target_that_differs_from_the_tail_shown_is_dropped_and_the_tail_is_the_answer() -> None:
    watch, _ = to_server(said(DEVICE, " three"), said(DEVICE, " four"))
    watch.on(Tick(), STEP_S)
    assert watch.on(said(SERVER, " trois")) == [Cancel(SERVER)]
    assert watch.answer.state is State.RELAYING
    assert delivered(watch.on(Tick())) == " four", "nothing is held for the handoff any more"
    assert dropped(watch) == ["mismatch"]
    watch.on(ended(DEVICE))
    assert watch.shown == "one two three four"


def test_a_dropped_target_is_not_tried_for_money_again_but_serves_when_the_source_dies() -> None:
    watch, _ = to_server(said(DEVICE, " three"))
    assert not watch.answer.movable
    watch.on(Tick(), STEP_S)
    watch.on(said(SERVER, " trois"))
    assert not watch.answer.movable
    assert watch.on(gone()) == [Start(SERVER, "one two three", n_tokens=3)]
    watch.on(said(SERVER, " vier"))
    watch.on(ended(SERVER))
    assert watch.shown == "one two three vier"
    assert [move.reason for move in watch.answer.moves] == ["cost", "failure"]


def test_a_target_that_began_the_answer_again_does_not_serve_when_the_source_dies() -> None:
    text = "Once upon a time, there"
    watch, _ = played(said(DEVICE, text), TO_SERVER, said(SERVER, "Once upon a time I"), **guarded)
    assert dropped(watch) == ["restart"]
    assert isinstance(watch.on(broke(DEVICE))[-1], Fail)


def test_a_source_that_ends_first_has_made_the_whole_answer() -> None:
    watch, effects = to_server(said(DEVICE, " three"), ended(DEVICE))
    assert effects == [Cancel(SERVER), Deliver(Token(" three")), Complete("stop")]
    assert dropped(watch) == ["the source had finished before"]


def test_a_source_that_breaks_in_a_handoff_leaves_it_to_the_target() -> None:
    watch, effects = to_server(said(DEVICE, " three"), broke(DEVICE))
    assert effects == []
    effects = watch.on(said(SERVER, " trois"))
    assert not any(isinstance(effect, Cancel) for effect in effects)
    watch.on(ended(SERVER))
    assert watch.shown == "one two trois"
    assert watch.answer.moves[0].reason == "failure"


def test_when_source_and_target_break_the_tail_is_shown_before_the_error() -> None:
    watch, effects = to_server(said(DEVICE, " three"), broke(DEVICE), broke(SERVER))
    assert delivered(effects) == " three"
    assert isinstance(effects[-1], Fail)
    assert dropped(watch) == ["cut"]


def test_when_source_and_target_are_lost_a_died_engine_is_restarted_after_the_tail() -> None:
    watch, effects = to_server(said(DEVICE, " three"), gone(), broke(SERVER))
    assert effects == [Start(DEVICE, "one two three", n_tokens=3)]
    watch.on(said(DEVICE, " four"))
    watch.on(ended(DEVICE))
    assert watch.shown == "one two three four"


def test_a_target_that_breaks_first_costs_the_reader_nothing_and_is_not_tried_again() -> None:
    watch, effects = to_server(said(DEVICE, " three"), broke(SERVER, "timeout"))
    assert effects == []
    assert delivered(watch.on(Tick())) == " three"
    assert dropped(watch) == ["timeout"]
    assert watch.on(Move(SERVER, "stall")) == []
    assert watch.on(ended(DEVICE)) == [Complete("stop")]


def test_a_target_that_ends_at_once_ends_the_answer_where_it_was_to_go_on() -> None:
    watch, effects = to_server(said(DEVICE, " three"), ended(SERVER))
    assert effects[0] == Cancel(DEVICE)
    assert effects[-1] == Complete("stop")
    assert watch.shown == "one two"


def test_a_target_that_ends_short_of_what_was_shown_is_dropped() -> None:
    watch, _ = to_server(said(DEVICE, " three"))
    watch.on(Tick(), STEP_S)
    watch.on(said(SERVER, " th"))
    assert watch.on(ended(SERVER)) == []
    assert dropped(watch) == ["short"]
    assert watch.answer.state is State.RELAYING


def test_a_side_that_was_left_for_its_silence_is_gone_back_to_only_where_the_other_one_fails() -> None:
    watch, _ = played(said(SERVER, "one"), said(SERVER, " two"), Move(DEVICE, "stall"))
    watch.on(said(DEVICE, " three"))
    assert watch.on(Move(SERVER, "stall")) == [], "one is slow, the other one was silent: it is left to write"
    assert Start(SERVER, "one two three", n_tokens=3) in watch.on(broke(DEVICE, "stalled"))
    watch.on(said(SERVER, " four"))
    watch.on(ended(SERVER))
    assert watch.shown == "one two three four"


def test_a_stall_moves_an_answer_and_may_be_tried_again_after_a_mismatch() -> None:
    watch, _ = played(said(SERVER, "one"), said(SERVER, " two"), Move(DEVICE, "stall"))
    watch.on(said(SERVER, " three"))
    assert watch.on(said(DEVICE, " drei")) == [Cancel(DEVICE)], "without a buffer the tail is shown at once"
    assert watch.on(Move(DEVICE, "stall")) == [Start(DEVICE, "one two three", n_tokens=3)]
    watch.on(said(DEVICE, " vier"))
    assert [move.reason for move in watch.answer.moves] == ["stall", "stall"]
    assert watch.answer.source is DEVICE


def test_text_asked_to_be_repeated_is_trimmed_at_the_seam() -> None:
    overlap: dict[str, Any] = {"overlap": lambda side, text: text[-3:] if side is SERVER else None}
    watch, effects = to_server(said(SERVER, "two"), said(SERVER, " three"), **overlap)
    assert delivered(effects) == " three"
    watch.on(ended(SERVER))
    assert watch.shown == "one two three"


def test_a_tool_call_of_the_source_drops_the_handoff() -> None:
    watch, effects = to_server(said(DEVICE, " three"), Arrived(DEVICE, CALL))
    assert effects == [Cancel(SERVER), Deliver(Token(" three")), Deliver(CALL)]
    assert dropped(watch) == ["the answer is no plain text any more"]
    assert watch.on(TO_SERVER) == []
    assert isinstance(watch.on(gone())[-1], Fail)


def test_a_tool_call_of_the_target_is_its_continuation() -> None:
    watch, effects = to_server(said(DEVICE, " three"), Arrived(SERVER, CALL))
    assert effects[0] == Cancel(DEVICE)
    assert effects[-1] == Deliver(CALL)
    assert isinstance(watch.on(broke(SERVER))[-1], Fail), "from here on nobody else goes on"


# --- where no move may be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ((), {}),
        ((said(DEVICE, "Hi"),), {"joinable": False}),
        ((said(DEVICE, "Hi"),), {"available": frozenset({DEVICE})}),
        ((said(DEVICE, "Hi"),), {"continuation": {DEVICE: EXACT, SERVER: NONE}}),
        ((said(DEVICE, "Hi"), Arrived(DEVICE, CALL)), {}),
        ((broke(SERVER), said(DEVICE, "Hi")), {}),
        ((said(DEVICE, "Hi"), TO_SERVER), {}),
        ((said(DEVICE, "Hi"), ended(DEVICE)), {}),
    ],
    ids=[
        "racing",
        "not shared",
        "alone",
        "mute",
        "tool call",
        "server failed",
        "moving",
        "done",
    ],
)
def test_nothing_moves_for_money_where_it_must_not(script: tuple[Event, ...], more: dict[str, Any]) -> None:
    watch, _ = played(*script, **more)
    assert not watch.answer.movable
    assert watch.on(TO_SERVER) == []
    assert watch.answer.state is not State.HANDOFF or TO_SERVER in script


def test_an_answer_is_movable_once_and_after_that_only_by_need() -> None:
    assert played(said(DEVICE, "Hi"))[0].answer.movable
    watch, _ = played(said(DEVICE, "Hi"), TO_SERVER, said(SERVER, " you"))
    assert not watch.answer.movable, "the last one is kept for a failure"
    assert watch.on(Move(DEVICE, "stall")) == [Start(DEVICE, "Hi you", n_tokens=2)]
    watch.on(said(DEVICE, " all"))
    assert watch.answer.handoffs == 2
    assert watch.on(Move(SERVER, "stall")) == []


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_nothing_moves_within_a_thought(opening: str, closing: str) -> None:
    watch, effects = played(said(DEVICE, f"{opening}Hm"), TO_SERVER)
    assert effects == []
    watch.on(said(DEVICE, f"{closing}So"))
    assert watch.on(TO_SERVER) == [Start(SERVER, f"{opening}Hm{closing}So", n_tokens=2)]


def test_nothing_moves_while_a_restart_could_not_be_told_from_a_continuation() -> None:
    watch, effects = played(said(DEVICE, "Once upon"), TO_SERVER, **guarded)
    assert effects == []
    watch.on(said(DEVICE, " a time"))
    assert watch.on(TO_SERVER) == [Start(SERVER, "Once upon a time", n_tokens=2)]
    assert played(said(DEVICE, "Hi"), gone(), **guarded)[1] == [Start(SERVER, "Hi", n_tokens=1)], "better than nothing"


def test_a_server_that_nobody_has_tried_gets_an_answer_only_by_need() -> None:
    untried: dict[str, Any] = {"continuation": {DEVICE: EXACT, SERVER: UNTRIED}}
    watch, _ = played(said(DEVICE, "Once upon a time"), **untried)
    assert not watch.answer.movable
    assert watch.on(gone()) == [Start(SERVER, "Once upon a time", n_tokens=1)]
    assert watch.on(said(SERVER, "Once upon a time")) == [], "it is checked at the seam"


def test_a_move_to_the_source_itself_is_none() -> None:
    assert played(said(DEVICE, "Hi"), TO_DEVICE)[1] == []


def test_the_reserve_is_given_back_when_the_handoff_is_over() -> None:
    for ending in (said(DEVICE, " drei"), broke(DEVICE)):
        watch, _ = to_follower()
        watch.answer.buffer.reserve = 3
        watch.on(Followed(DEVICE))
        watch.on(ending)
        assert watch.answer.buffer.reserve == 0, "nothing is held back where no handoff is possible"


# --- who made it ------------------------------------------------------------------------------------------------------


def test_what_the_source_made_stays_its_own_though_it_is_shown_after_the_handoff() -> None:
    """A slow reader has one word when the target takes over; the source's other words wait in the buffer."""
    script = (said(SERVER, "one"), said(SERVER, " two"), said(SERVER, " three"), TO_DEVICE)
    watch, _ = played(*script, delivery=Delivery.PACED, **follower)
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, "", (), go=True)]
    watch.on(said(DEVICE, " four"))
    assert watch.shown == "one"
    watch.on(ended(DEVICE))
    assert watch.shown == "one two three four"
    assert watch.makers == [SERVER] * len("one two three") + [DEVICE] * len(" four")


def test_a_dropped_handoff_changes_no_maker() -> None:
    watch, _ = to_server(broke(SERVER), said(DEVICE, " three"), ended(DEVICE))
    assert set(watch.makers) == {DEVICE}


def test_of_what_both_said_the_shown_part_is_the_source_s() -> None:
    watch, _ = to_server(said(DEVICE, " three"))
    watch.on(Tick(), STEP_S)
    watch.on(said(SERVER, " three four", 2))
    watch.on(ended(SERVER))
    assert watch.makers == [DEVICE] * len("one two three") + [SERVER] * len(" four")
