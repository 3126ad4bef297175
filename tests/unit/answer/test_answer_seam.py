from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.answer import (
    Arrived,
    Cancel,
    Complete,
    Deliver,
    Ended,
    Fail,
    Feed,
    Followed,
    Move,
    Start,
    State,
    Tick,
)
from disco_daemon.types import Delivery, Finish, Token
from tests.fixtures.answer import (
    CALL,
    DEVICE,
    SERVER,
    STEP_S,
    TO_DEVICE,
    TO_SERVER,
    broke,
    delivered,
    ended,
    follower,
    gone,
    guarded,
    played,
    said,
    to_follower,
    to_server,
)

# --- token ids --------------------------------------------------------------------------------------------------------


def test_ids_are_given_when_those_of_the_whole_answer_are_known() -> None:
    script = (said(SERVER, "one", ids=(1,)), said(SERVER, " two three", 2, ids=(2, 3)), TO_DEVICE)
    watch, effects = played(*script, **follower)
    assert effects == [Start(DEVICE, "one two three", (1, 2, 3), 3, held=True)]
    watch.on(said(SERVER, " four", ids=(4,)))
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, " four", (4,), go=True)]


def test_no_ids_are_given_when_one_is_missing() -> None:
    watch, effects = played(said(SERVER, "one", ids=(1,)), said(SERVER, " two"), TO_DEVICE, **follower)
    assert effects == [Start(DEVICE, "one two", (), 2, held=True)]
    watch.on(said(SERVER, " three", ids=(3,)))
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, " three", (), go=True)]


def test_ids_that_belong_to_earlier_pieces_are_not_given_for_a_later_one() -> None:
    """A character of two tokens, the first of which was given as text already: its id must not come again."""
    script = (said(SERVER, "one", ids=(1,)), said(SERVER, "", ids=()), TO_DEVICE)
    late = (said(SERVER, "é", ids=(2, 3)), said(SERVER, "", ids=()))
    watch, _ = played(*script, *late, **follower)
    assert watch.on(Followed(DEVICE)) == [Feed(DEVICE, "é", (), go=True)]


def test_a_piece_cut_at_the_seam_has_no_ids() -> None:
    watch, _ = to_server(said(DEVICE, " three", ids=(3,)))
    watch.on(Tick(), STEP_S)
    assert watch.on(said(SERVER, " three four", 2, ids=(3, 4)))[-1] == Deliver(Token(" four", 1))


def test_text_whose_token_was_taken_back_in_part_has_no_ids() -> None:
    """Of a token of several characters the buffer shows those that are whole; the token counts with its last one."""
    script = (
        said(DEVICE, "👍", ids=(0,)),
        TO_SERVER,
        said(DEVICE, "💻👩", 2, ids=(1, 2)),
        said(SERVER, "💻", ids=(1,)),
    )
    watch, _ = played(*script, delivery=Delivery.RESERVE)
    watch.on(said(SERVER, "!", ids=(2,)))
    assert watch.on(Move(DEVICE, "stall")) == [Start(DEVICE, "👍💻!", (), watch.answer.n_generated)]


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_a_stop_string_across_the_seam_ends_the_answer() -> None:
    watch, effects = played(said(DEVICE, "one EN"), TO_SERVER, stop=("END",))
    assert (watch.shown, effects) == ("one ", [Start(SERVER, "one ", (), 0)]), "what may be its beginning waits"
    effects = watch.on(said(SERVER, "END two"))
    assert effects[-1] == Complete("stop")
    assert (watch.shown, watch.answer.stop_met) == ("one ", "END")


def test_a_source_that_breaks_with_all_of_its_text_waiting_has_not_begun_the_answer() -> None:
    watch, effects = played(said(SERVER, "E"), broke(SERVER), stop=("END",))
    assert (watch.answer.state, effects) == (State.RACING, [Start(DEVICE)])
    watch.on(said(DEVICE, "END"))
    assert (watch.shown, watch.ends) == ("", [Complete("stop")])
    watch, _ = played(said(SERVER, "E"), broke(SERVER), said(DEVICE, "Every"), ended(DEVICE), stop=("END",))
    assert (watch.shown, watch.makers) == ("Every", [DEVICE] * 5)
    watch, effects = played(said(SERVER, "E"), broke(SERVER), broke(DEVICE), stop=("END",))
    assert isinstance(effects[-1], Fail)


def test_a_stop_string_that_begins_behind_the_seam_is_never_shown() -> None:
    watch, _ = played(said(DEVICE, "one"), TO_SERVER, said(SERVER, " tw"), stop=("END",))
    watch.on(said(SERVER, "o E"))
    assert watch.shown == "one two "
    effects = watch.on(said(SERVER, "ND x"))
    assert effects == [Cancel(SERVER), Complete("stop")]
    assert (watch.shown, watch.answer.stop_met) == ("one two ", "END")


def test_what_might_have_been_a_stop_string_is_shown_with_all_its_tokens() -> None:
    watch, _ = played(said(DEVICE, "one"), TO_SERVER, said(SERVER, " "), said(SERVER, "E", 2), stop=("END",))
    assert watch.shown == "one "
    assert watch.on(said(SERVER, "nd")) == [Deliver(Token("E", 2)), Deliver(Token("nd"))]
    watch.on(said(SERVER, "E"))
    assert watch.on(ended(SERVER)) == [Deliver(Token("E", 1)), Complete("stop")]
    assert watch.answer.tokens == {DEVICE: 1, SERVER: 5}


def test_what_might_have_been_a_stop_string_is_shown_before_an_error_and_before_a_tool_call() -> None:
    script = (said(DEVICE, "one"), TO_SERVER, said(SERVER, " "), said(SERVER, "E"))
    watch, _ = played(*script, stop=("END",))
    watch.on(broke(SERVER))
    assert isinstance(watch.on(broke(DEVICE))[-1], Fail)
    assert watch.shown == "one E"
    watch, _ = played(*script, Arrived(SERVER, CALL), stop=("END",))
    assert watch.shown == "one E"


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (Finish("stop", stop="END"), "END"),
        (Finish("stop"), None),
        (Finish("stop", stop="<|im_end|>"), None),
        (Finish("stop", stop=""), None),
        (Finish("tool_calls", stop="END"), None),
        (Finish("length", stop="END"), None),
    ],
)
def test_a_stop_string_is_told_where_it_is_the_clients_and_has_ended_the_answer(
    finish: Finish, told: str | None
) -> None:
    for script in ([said(SERVER, "one")], [said(DEVICE, "one"), TO_SERVER, said(SERVER, " two")]):
        watch, _ = played(*script, stop=("", "STOP", "END"))
        assert watch.on(Ended(SERVER, finish))[-1] == Complete(finish.reason)
        assert watch.answer.stop_met == told


def test_a_stop_string_in_a_second_handoff_cancels_its_target() -> None:
    watch, _ = played(said(DEVICE, "one"), TO_SERVER, said(SERVER, " two"), Move(DEVICE, "stall"), stop=("END",))
    effects = watch.on(said(SERVER, " END"))
    assert effects == [Deliver(Token(" ")), Cancel(DEVICE), Cancel(SERVER), Complete("stop")]


def test_a_stop_string_at_the_limit_ends_the_answer_once() -> None:
    watch, _ = played(said(DEVICE, "one"), TO_SERVER, said(SERVER, " two"), stop=("END",), max_tokens=3)
    assert watch.on(said(SERVER, " END")) == [Deliver(Token(" ")), Cancel(SERVER), Complete("stop")]


# --- the limit --------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_across_the_seam_and_none_is_shown_beyond_the_limit() -> None:
    watch, _ = to_follower(said(SERVER, " three"), max_tokens=5)
    watch.on(Followed(DEVICE))
    watch.on(said(DEVICE, " four"))
    last = said(DEVICE, " five", ids=(5,))
    assert watch.on(last) == [Deliver(last.token), Cancel(DEVICE), Complete("length")]
    assert watch.on(said(DEVICE, " six")) == []
    assert watch.shown == "one two three four five"


@pytest.mark.parametrize("text", [" three", " three four"])
def test_a_target_that_takes_over_at_the_limit_adds_nothing(text: str) -> None:
    watch, _ = to_server(said(DEVICE, " three"), max_tokens=3)
    watch.on(Tick(), STEP_S)
    effects = watch.on(said(SERVER, text))
    assert effects[-1] == Complete("length")
    assert watch.shown == "one two three"


def test_many_tokens_that_join_at_once_stop_at_the_limit() -> None:
    script = (said(DEVICE, "Once upon a time", 4), gone(), said(SERVER, "On", 1), said(SERVER, "ce", 1))
    watch, _ = played(*script, max_tokens=6, **guarded)
    assert watch.on(said(SERVER, " again"))[-1] == Complete("length")
    assert watch.shown == "Once upon a timeOnce"


def test_a_source_at_its_limit_in_a_second_handoff_ends_the_answer() -> None:
    script = (said(DEVICE, "one"), TO_SERVER, said(SERVER, " two"), Move(DEVICE, "stall"))
    watch, _ = played(*script, max_tokens=3)
    assert watch.on(said(SERVER, " thr")) == [Deliver(Token(" thr"))]
    assert watch.on(said(SERVER, "ee", 0)) == [Deliver(Token("ee", 0))], "of the last token all is said"
    effects = watch.on(said(SERVER, "four"))
    assert effects == [Cancel(DEVICE), Cancel(SERVER), Complete("length")]


def test_tokens_held_as_a_possible_stop_string_count_for_the_limit() -> None:
    watch, _ = played(said(DEVICE, "one"), TO_SERVER, said(SERVER, " "), stop=("END",), max_tokens=3)
    assert watch.on(said(SERVER, "E")) == []
    assert watch.on(said(SERVER, "x")) == [Deliver(Token("E")), Cancel(SERVER), Complete("length")]


@pytest.mark.parametrize(
    ("finish", "shown"),
    [
        (Finish("length"), "one two three four"),
        (Finish("stop", n_tokens=3), "one two three four"),
        (Finish("stop", n_tokens=4), "one two three "),
        (Finish("stop"), "one two three "),
    ],
)
def test_what_is_beyond_the_limit_is_shown_only_where_its_endpoint_says_that_it_kept_to_it(
    finish: Finish, shown: str
) -> None:
    watch, _ = played(*(said(SERVER, text) for text in ("one", " two", " three", " four")), max_tokens=3)
    assert watch.shown == "one two three "
    assert watch.on(Ended(SERVER, finish))[-1] == Complete("stop" if finish.n_tokens == 3 else "length")
    assert watch.shown == shown


# --- delivery ---------------------------------------------------------------------------------------------------------


def test_a_reserve_is_let_go_at_pace_while_the_answer_moves_and_at_once_after_it() -> None:
    reserved: dict[str, Any] = {"delivery": Delivery.RESERVE, "reserve": 3}
    words = [said(DEVICE, f" {i}") for i in range(5)]
    watch, _ = played(*words, TO_SERVER, **reserved)
    assert watch.shown == " 0 1"
    assert watch.on(Tick(), 0.5 * STEP_S) == []
    assert delivered(watch.on(Tick(), 0.6 * STEP_S)) == " 2"
    watch.answer.buffer.reserve = 0
    assert delivered(watch.on(said(SERVER, " cinq"))) == " 3 4 cinq"


def test_a_paced_answer_is_flushed_when_it_ends() -> None:
    watch, _ = played(*(said(DEVICE, f" {i}") for i in range(3)), delivery=Delivery.PACED)
    assert watch.shown == " 0"
    assert delivered(watch.on(ended(DEVICE))) == " 1 2"
