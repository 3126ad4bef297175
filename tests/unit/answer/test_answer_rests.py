"""A handoff whose source rests: it is stopped, and asked again only where the target does not come."""

from __future__ import annotations

import pytest

from disco_daemon.answer import (
    GO_WITHIN,
    Cancel,
    Complete,
    Deliver,
    Ended,
    Event,
    Feed,
    Followed,
    Move,
    Note,
    Start,
    State,
)
from disco_daemon.types import Delivery, Finish, Token
from tests.fixtures.answer import (
    ASK_AGAIN,
    DEVICE,
    REST,
    SERVER,
    STEP_S,
    TO_SERVER,
    broke,
    delivered,
    dropped,
    ended,
    follower,
    played,
    said,
    to_follower,
    to_server,
)


def test_a_source_that_rests_is_closed_and_the_target_takes_over_where_it_stopped() -> None:
    watch, effects = to_server(REST)
    assert effects == [Cancel(DEVICE)]
    effects = watch.on(said(SERVER, " trois"), 0.5)
    note = Note("handoff device to server after 2 tokens (cost)")
    assert effects == [note, Deliver(Token(" trois"))]
    (move,) = watch.answer.moves
    assert (move.at, move.overlap, move.paused, move.asked_again, move.dropped) == (2, 0, True, False, None)
    assert watch.answer.tokens == {DEVICE: 2, SERVER: 1}
    watch.on(ended(SERVER))
    assert watch.shown == "one two trois"


def test_a_follower_whose_source_rests_goes_with_the_next_piece_however_much_it_is() -> None:
    much = [said(SERVER, f" {i}") for i in range(3 * GO_WITHIN)]
    watch, effects = to_follower(*much, REST)
    assert effects == [Cancel(SERVER)]
    text = "".join(f" {i}" for i in range(3 * GO_WITHIN))
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, text, (), go=True)]
    watch.on(said(DEVICE, " end"))
    assert watch.answer.source is DEVICE
    assert watch.answer.moves[0].overlap == 0, "nothing was made for the bin"


FULL = Ended(SERVER, Finish("length", full=True))


@pytest.mark.parametrize("failure", [broke(SERVER, "timeout"), broke(SERVER, "overloaded"), FULL])
def test_a_source_that_rests_is_asked_again_for_what_follows_where_the_target_fails(failure: Event) -> None:
    watch, effects = to_server(REST, failure)
    assert effects == [Start(DEVICE, "one two", n_tokens=2)]
    assert (watch.answer.state, watch.answer.source, watch.answer.handoffs) == (State.RELAYING, DEVICE, 0)
    (move,) = watch.answer.moves
    assert (move.paused, move.asked_again) == (True, True)
    assert move.dropped is not None
    watch.on(said(DEVICE, " three"))
    watch.on(ended(DEVICE))
    assert watch.shown == "one two three"


def test_a_target_that_comes_after_the_source_was_asked_again_takes_over_all_the_same() -> None:
    watch, effects = to_server(REST, ASK_AGAIN)
    assert effects == [Start(DEVICE, "one two", n_tokens=2)]
    assert watch.on(said(DEVICE, " three")) == [], "what it makes now is the tail"
    effects = watch.on(said(SERVER, " trois"))
    assert effects[0] == Cancel(DEVICE)
    assert delivered(effects) == " trois"
    (move,) = watch.answer.moves
    assert (move.paused, move.asked_again, move.overlap) == (True, True, 1)


def test_a_source_that_was_asked_again_gives_the_answer_where_the_target_stays_away() -> None:
    watch, _ = to_server(REST, ASK_AGAIN, said(DEVICE, " three"))
    assert watch.on(ended(DEVICE))[-1] == Complete("stop")
    assert watch.shown == "one two three"
    assert dropped(watch) == ["the source had finished before"]


def test_a_target_goes_on_alone_where_the_source_cannot_be_asked_again() -> None:
    watch, _ = to_server(REST, ASK_AGAIN, broke(DEVICE, "overloaded"))
    watch.on(said(SERVER, " trois"))
    assert watch.on(ended(SERVER)) == [Complete("stop")]
    assert watch.shown == "one two trois"


def test_the_tail_that_was_there_before_the_rest_is_part_of_what_the_source_goes_on_from() -> None:
    watch, _ = to_server(said(DEVICE, " three"), REST)
    assert watch.on(ASK_AGAIN) == [Start(DEVICE, "one two three", n_tokens=3)]


def test_a_source_rests_once() -> None:
    watch, effects = to_server(REST, ASK_AGAIN, REST)
    assert effects == []
    assert watch.running == {DEVICE, SERVER}


@pytest.mark.parametrize("event", [REST, ASK_AGAIN])
def test_without_a_handoff_or_a_source_there_is_nothing_to_stop(event: Event) -> None:
    assert played(said(DEVICE, "one"), event)[1] == []
    alone = (said(SERVER, "one"), said(SERVER, " two"), broke(SERVER), event)
    assert played(*alone, **follower)[1] == []


def test_a_source_that_is_silent_does_not_rest() -> None:
    stalled = Move(SERVER, "stall")
    first = (said(DEVICE, "Once upon a time there was a fox"), stalled, REST)
    assert played(*first, delivery=Delivery.PACED)[1] == []


def test_a_source_in_the_middle_of_a_token_or_at_the_limit_goes_on() -> None:
    begun = (said(DEVICE, "one", ids=(1,)), said(DEVICE, " two", ids=(2,)), TO_SERVER)
    assert played(*begun, said(DEVICE, " th"), REST, delivery=Delivery.PACED)[1] == [], "its id is still to come"
    assert played(*begun, REST, delivery=Delivery.PACED)[1] == [Cancel(DEVICE)]
    full = played(*begun, said(DEVICE, " three", ids=(3,)), REST, delivery=Delivery.PACED, max_tokens=3)
    assert full[1] == []


def test_a_stop_string_around_a_rest_is_found() -> None:
    for delivery in (Delivery.RESERVE, Delivery.PACED):
        for stop, rest, shown in (("two three", "two three", "one "), ("o!", "o!", "one tw")):
            watch, effects = to_server(REST, ASK_AGAIN, stop=(stop,), delivery=delivery)
            assert effects == [Start(DEVICE, shown, (), watch.answer.n_generated)], "what waited it says again"
            watch.on(said(DEVICE, rest))
            assert watch.ends == [Complete("stop")]
            assert watch.shown == shown


def test_what_is_in_stock_flows_while_the_source_rests() -> None:
    first = [said(DEVICE, text) for text in ("one", " two", " three", " four")]
    watch, _ = played(*first, TO_SERVER, REST, delivery=Delivery.PACED)
    for text in (" two", " three", " four"):
        due = watch.answer.buffer.due_at
        assert due is not None
        assert due - watch.now == pytest.approx(STEP_S)
        watch.now = due
        assert delivered([Deliver(token) for token in watch.answer.buffer.release(due)]) == text
