from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disco_daemon.delivery.seam import Diverged, Seam

STORY = "Once upon a time, there was a king."
letters = st.text("ab ", max_size=40)


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def joined(delivered: str, pieces: list[str]) -> str:
    """All that a reader sees of the continuation."""
    seam = Seam(delivered)
    return "".join([*(seam.feed(piece) for piece in pieces), seam.flush()])


cuts = st.lists(st.integers(0, 200), max_size=12)


@given(st.text(min_size=Seam.MIN_RESTART), st.text(), cuts)
def test_a_restarted_answer_is_joined_without_doubling_however_it_is_cut(old: str, new: str, at: list[int]) -> None:
    assert joined(old, chunked(old + new, at)) == new


@given(st.text(), st.text(), cuts)
def test_a_continuation_that_shares_no_beginning_passes_through_at_once(old: str, new: str, at: list[int]) -> None:
    assume(not old or not new or old[0] != new[0])
    seam = Seam(old)
    for piece in chunked(new, at):
        assert seam.feed(piece) == piece
    assert seam.flush() == ""


@given(st.text(max_size=Seam.MIN_RESTART - 1), st.text(), cuts)
def test_after_a_few_characters_only_nothing_is_taken_for_a_restart(old: str, new: str, at: list[int]) -> None:
    seam = Seam(old)
    for piece in chunked(new, at):
        assert seam.feed(piece) == piece
    assert seam.flush() == ""


@given(letters, letters, cuts)
def test_whatever_comes_it_is_joined_dropped_or_refused_but_never_doubled(old: str, new: str, at: list[int]) -> None:
    try:
        out = joined(old, chunked(new, at))
    except Diverged:
        assert new[: Seam.MIN_RESTART] == old[: Seam.MIN_RESTART]
        return
    assert new.endswith(out), "the seam only takes away, and only at the beginning"
    if len(old) >= Seam.MIN_RESTART:
        assert not out.startswith(old[: Seam.MIN_RESTART]) or new.startswith(old), "no doubled restart"


@given(letters, letters, cuts, cuts)
def test_where_the_chunks_are_cut_makes_no_difference(old: str, new: str, one: list[int], two: list[int]) -> None:
    def outcome(at: list[int]) -> str | None:
        try:
            return joined(old, chunked(new, at))
        except Diverged:
            return None

    assert outcome(one) == outcome(two)


def test_text_is_held_only_while_it_could_still_be_a_restart() -> None:
    seam = Seam(STORY)
    assert seam.feed("Once") == ""
    assert seam.feed(" more") == "Once more"
    assert seam.feed("Once upon a time") == "Once upon a time"


def test_a_second_different_answer_is_refused() -> None:
    seam = Seam(STORY)
    assert seam.feed("Once upon a time") == ""
    with pytest.raises(Diverged, match="differs after 16 characters"):
        seam.feed(" I saw")


def test_a_short_chance_agreement_is_text() -> None:
    assert joined(STORY, ["Once", " again"]) == "Once again"
    almost = STORY[: Seam.MIN_RESTART - 1]
    assert joined(STORY, [almost, "X"]) == almost + "X"
    assert joined(STORY, ["Once"]) == "Once"


def test_an_incomplete_restart_is_dropped_at_the_end() -> None:
    assert joined(STORY, ["Once upon a time", ", there"]) == ""


def test_a_whole_restart_adds_nothing() -> None:
    assert joined(STORY, [STORY]) == ""


def test_flushing_twice_gives_text_once() -> None:
    seam = Seam(STORY)
    seam.feed("Once")
    assert (seam.flush(), seam.flush()) == ("Once", "")


def test_with_nothing_delivered_there_is_no_seam() -> None:
    seam = Seam("")
    assert [seam.feed("a"), seam.feed("a"), seam.flush()] == ["a", "a", ""]
