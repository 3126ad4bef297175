from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disco_daemon.delivery.seam import Diverged, Seam, StopScan
from disco_daemon.types import Delta, Token

STORY = "Once upon a time, there was a king."
letters = st.text("ab ", max_size=40)
cuts = st.lists(st.integers(0, 200), max_size=12)


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def taken(seam: Seam, pieces: list[str], committed: str = "") -> list[Token]:
    """All tokens that a reader gets of the continuation, joined as early as can be."""
    for i, piece in enumerate(pieces):
        seam.feed(Token(piece, ids=(i,)))
        out = seam.join(committed)
        if out is not None:
            return out + [Token(p, ids=(j,)) for j, p in enumerate(pieces[i + 1 :], i + 1)]
    return seam.ended(committed)


def joined(before: str, pieces: list[str], committed: str = "", *, guarded: bool = True) -> str:
    return text_of(taken(Seam(before, guarded=guarded), pieces, committed))


# --- a server that starts the answer again -----------------------------------------------------------------------


@given(st.text(min_size=Seam.MIN_RESTART), st.text(), cuts)
def test_a_restarted_answer_is_joined_without_doubling_however_it_is_cut(old: str, new: str, at: list[int]) -> None:
    assert joined(old, chunked(old + new, at)) == new


@given(st.text(), st.text(), cuts)
def test_a_continuation_that_shares_no_beginning_passes_through_at_once(old: str, new: str, at: list[int]) -> None:
    assume(new and (not old or old[0] != new[0]))
    pieces = [piece for piece in chunked(new, at) if piece]
    seam = Seam(old, guarded=True)
    seam.feed(Token(pieces[0]))
    assert seam.join("") == [Token(pieces[0])]


@given(st.text(max_size=Seam.MIN_RESTART - 1), st.text(min_size=1))
def test_after_a_few_characters_only_nothing_is_taken_for_a_restart(old: str, new: str) -> None:
    seam = Seam(old, guarded=True)
    seam.feed(Token(new))
    assert seam.join("") == [Token(new)]


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


@given(letters, letters, letters, cuts, cuts)
def test_where_the_chunks_are_cut_makes_no_difference(
    old: str, new: str, committed: str, one: list[int], two: list[int]
) -> None:
    def outcome(at: list[int]) -> str | None:
        try:
            return joined(old, chunked(new, at), committed)
        except Diverged:
            return None

    assert outcome(one) == outcome(two)


def test_text_is_held_only_while_it_could_still_be_a_restart() -> None:
    seam = Seam(STORY, guarded=True)
    seam.feed(Token("Once"))
    assert seam.join("") is None
    seam.feed(Token(" more"))
    assert seam.join("") == [Token("Once"), Token(" more")]


def test_a_second_different_answer_is_refused() -> None:
    seam = Seam(STORY, guarded=True)
    seam.feed(Token("Once upon a time"))
    assert seam.join("") is None
    seam.feed(Token(" I saw"))
    with pytest.raises(Diverged, match="differs after 16 characters") as e:
        seam.join("")
    assert e.value.reason == "restart"


def test_a_short_chance_agreement_is_text() -> None:
    assert joined(STORY, ["Once", " again"]) == "Once again"
    almost = STORY[: Seam.MIN_RESTART - 1]
    assert joined(STORY, [almost, "X"]) == almost + "X"
    assert joined(STORY, ["Once"]) == "Once"


def test_an_incomplete_restart_is_dropped_at_the_end() -> None:
    assert joined(STORY, ["Once upon a time", ", there"]) == ""


def test_a_whole_restart_adds_nothing() -> None:
    assert joined(STORY, [STORY]) == ""


def test_with_nothing_before_there_is_no_seam() -> None:
    assert joined("", ["a", "a"]) == "aa"


def test_an_exact_continuation_may_begin_like_the_answer() -> None:
    assert joined(STORY, [STORY], guarded=False) == STORY


# --- the tail that the reader has --------------------------------------------------------------------------------


@given(st.text(), st.text(), st.text(min_size=1), cuts, st.booleans())
def test_the_tail_is_covered_and_nothing_is_lost_or_doubled(
    before: str, committed: str, more: str, at: list[int], echoes: bool
) -> None:
    assume(not echoes or len(before) >= Seam.MIN_RESTART)
    text = committed + more
    assume(echoes or not before or not text or before[0] != text[0])
    pieces = chunked(before + text if echoes else text, at)
    assert joined(before, pieces, committed) == more


@given(st.text(min_size=1), cuts)
def test_a_target_that_ends_before_the_tail_cannot_be_joined(committed: str, at: list[int]) -> None:
    for n in range(len(committed)):
        with pytest.raises(Diverged) as e:
            joined("", chunked(committed[:n], at), committed)
        assert e.value.reason == "short"


def test_tokens_are_skipped_exactly_and_a_straddling_one_loses_its_ids() -> None:
    pieces = [" upon", " a", " time"]
    seam = Seam("Once", guarded=False)
    assert [t.ids for t in taken(seam, pieces, " upon a")] == [(2,)], "whole tokens keep theirs"
    assert taken(Seam("Once", guarded=False), pieces, " upon a ti") == [Token("me")]


def test_a_trimmed_token_counts_for_its_part() -> None:
    seam = Seam("Once", guarded=False)
    seam.feed(Token(" upon a time", 3, ids=(1, 2, 3)))
    assert seam.join(" upon") == [Token(" a time", 2)]
    assert seam.join(" upon a tim") == [Token("e", 1)]


def test_the_tail_may_grow_until_the_target_has_passed_it() -> None:
    seam = Seam("Once", guarded=False)
    seam.feed(Token(" upon"))
    assert seam.join(" upon a") is None
    seam.feed(Token(" a"))
    assert seam.join(" upon a time") is None
    assert seam.join(" upon a") == [], "level with the reader: what comes next is the answer"
    seam.feed(Token(" time,"))
    assert seam.join(" upon a time") == [Token(",", 1)]


def test_another_text_than_the_tail_is_refused() -> None:
    seam = Seam("Once", guarded=False)
    seam.feed(Token(" upon the"))
    with pytest.raises(Diverged, match="differs from what the reader has after 6 characters") as e:
        seam.join(" upon a time")
    assert e.value.reason == "mismatch"


def test_of_a_short_beginning_the_tail_tells_a_restart() -> None:
    assert joined("Once", ["Once upon", " a time, there"], " upon a time,") == " there"


def test_nothing_said_is_not_joined() -> None:
    seam = Seam(STORY, guarded=True)
    assert seam.join("") is None
    seam.feed(Token(""))
    assert seam.join("") is None
    seam.feed(Token(STORY))
    assert seam.join("") is None, "a repetition alone says nothing"


def test_an_end_where_the_reader_is_is_an_end() -> None:
    seam = Seam(STORY, guarded=False)
    assert seam.ended("") == []
    seam.feed(Token(" The"))
    assert seam.ended(" The") == []


# --- more than text ----------------------------------------------------------------------------------------------


def test_a_tool_call_is_joined_only_where_the_reader_has_no_more_text() -> None:
    call = Token("", delta=Delta())
    seam = Seam(STORY, guarded=True)
    seam.feed(call)
    assert seam.join("") == [call]
    with pytest.raises(Diverged) as e:
        seam.join(" The")
    assert e.value.reason == "delta"
    seam = Seam(STORY, guarded=False)
    for token in (Token(" The"), call):
        seam.feed(token)
    assert seam.join(" The") == [call]


def test_a_restart_that_turns_into_a_tool_call_is_refused() -> None:
    seam = Seam(STORY, guarded=True)
    for token in (Token(STORY[:20]), Token("", delta=Delta())):
        seam.feed(token)
    with pytest.raises(Diverged) as e:
        seam.join("")
    assert e.value.reason == "delta"


# --- the instructed overlap --------------------------------------------------------------------------------------

OVERLAP = "there was a king."


@pytest.mark.parametrize(
    "said",
    [
        OVERLAP,
        f"\n {OVERLAP}",
        f'"{OVERLAP}"',
        f"“{OVERLAP}”",
        f'"{OVERLAP}',
        f"Sure! Here it goes on:\n\n{OVERLAP}",
        f"…a time, {OVERLAP}",
        "there  was\na king.",
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_repeated_words_are_trimmed(said: str, step: int) -> None:
    text = said + " He was old."
    seam = Seam(STORY, guarded=True, overlap=OVERLAP)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    assert text_of(taken(seam, pieces)) == " He was old."


def test_repeated_words_may_end_in_a_space() -> None:
    seam = Seam("Once upon ", guarded=True, overlap="Once upon ")
    assert text_of(taken(seam, ["Once upon", " a time"])) == "a time"


def test_words_not_repeated_are_refused() -> None:
    seam = Seam(STORY, guarded=True, overlap=OVERLAP)
    seam.feed(Token("He was old and " * 5))
    assert seam.join("") is None
    seam.feed(Token("grey."))
    seam.feed(Token(" And poor."))
    with pytest.raises(Diverged) as e:
        seam.join("")
    assert e.value.reason == "overlap"
    with pytest.raises(Diverged) as e:
        taken(Seam(STORY, guarded=True, overlap=OVERLAP), ["He was old."])
    assert e.value.reason == "overlap"


def test_repeated_words_and_the_tail() -> None:
    seam = Seam(STORY, guarded=True, overlap=OVERLAP)
    assert text_of(taken(seam, [OVERLAP, " He was", " old."], " He")) == " was old."
    assert Seam(STORY, guarded=True, overlap=" ").join("") is None


# --- stop strings ------------------------------------------------------------------------------------------------


def scanned(stop: tuple[str, ...], before: str, pieces: list[str]) -> tuple[str, bool]:
    scan = StopScan(stop, before)
    out: list[Token] = []
    for piece in pieces:
        some, stopped = scan.take(Token(piece))
        out += some
        if stopped:
            return text_of(out), True
    return text_of(out + scan.rest()), False


def by_the_letter(stop: tuple[str, ...], before: str, text: str) -> tuple[str, bool]:
    """Character by character: the answer ends with the first stop string that is complete."""
    for n in range(1, len(text) + 1):
        whole = before + text[:n]
        hits = [len(whole) - len(s) for s in stop if s and whole.endswith(s)]
        if hits:
            return whole[len(before) : max(len(before), min(hits))], True
    return text, False


stops = st.lists(st.text("ab\n", max_size=5), max_size=3).map(tuple)


@given(stops, letters, st.text("ab\n", max_size=30), cuts)
def test_stop_strings_are_found_across_the_seam_however_the_text_is_cut(
    stop: tuple[str, ...], before: str, text: str, at: list[int]
) -> None:
    assert scanned(stop, before, chunked(text, at)) == by_the_letter(stop, before, text)


@given(stops, letters, st.text("ab\n", max_size=30), cuts)
def test_only_what_may_become_a_stop_string_is_held(
    stop: tuple[str, ...], before: str, text: str, at: list[int]
) -> None:
    scan = StopScan(stop, before)
    fed = out = ""
    for piece in chunked(text, at):
        shown, stopped = scan.take(Token(piece))
        fed, out = fed + piece, out + text_of(shown)
        if stopped:
            return
        n_held = len(fed) - len(out)
        whole = before + fed
        assert not n_held or any(whole.endswith(s[:n]) for s in stop for n in range(n_held, len(s)))


def test_a_stop_string_across_the_seam_ends_the_answer() -> None:
    scan = StopScan(("\n\nQ:",), "The end\n")
    assert scan.take(Token("\nQ")) == ([], False)
    assert scan.n_waiting == 1
    assert scan.take(Token(": more")) == ([], True)
    assert scan.take(Token("and more")) == ([], True)
    assert scan.rest() == []


def test_a_stop_string_within_the_old_text_is_none() -> None:
    assert scanned(("ab",), "ab ab", [" c"]) == (" c", False)


@given(stops, letters, st.text("ab\n", max_size=30), cuts)
def test_of_tokens_the_same_text_is_let_through(stop: tuple[str, ...], before: str, text: str, at: list[int]) -> None:
    scan = StopScan(stop, before)
    pieces = chunked(text, at)
    out: list[Token] = []
    stopped = False
    for i, piece in enumerate(pieces):
        some, stopped = scan.take(Token(piece, ids=(i,)))
        out += some
        if stopped:
            break
    out += scan.rest()
    assert (text_of(out), stopped) == by_the_letter(stop, before, text)
    if not stopped:
        assert [i for token in out for i in token.ids] == list(range(len(pieces)))
        assert sum(token.n_tokens for token in out) == len(pieces)


def test_a_tool_call_ends_the_wait_for_a_stop_string() -> None:
    scan = StopScan(("END",), "")
    assert scan.take(Token("the E")) == ([Token("the ", 0)], False)
    call = Token("", delta=Delta())
    assert scan.take(call) == ([Token("E"), call], False)
    assert scan.take(Token("ND")) == ([], True)
    assert scan.take(Token("more")) == ([], True)
    assert scan.rest() == []


def test_white_space_after_the_repeated_words_belongs_to_the_continuation() -> None:
    seam = Seam("def f():\n", guarded=True, overlap="f():\n")
    seam.feed(Token("f():\n    return 1"))
    joined = seam.join("")
    assert joined is not None
    assert "".join(token.text for token in joined) == "    return 1"
