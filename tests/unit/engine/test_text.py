from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama.text import TextStream

any_text = st.text(st.characters(exclude_categories=["Cs"]))
cuts = st.lists(st.integers(0, 400), max_size=20)
stops = st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=4)


def chunked(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    """What is shown piece by piece, as the engine does: nothing is fed after a stop."""
    stream, shown = TextStream(stop), list[str]()
    for piece in pieces:
        shown.append(stream.feed(piece))
        if stream.stopped:
            break
    return [*shown, stream.flush()], stream


def first_stop(text: str, stop: list[str]) -> int | None:
    """Where the stop string that is complete first begins."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        return None
    first = min(ends)[0]
    return min(start for end, start in ends if end == first)


@given(any_text, cuts)
def test_any_text_in_any_chunks_comes_out_whole(text: str, at: list[int]) -> None:
    shown, stream = run(chunked(text.encode(), at), [])
    assert "".join(shown) == text
    assert not stream.stopped


@given(any_text, cuts)
def test_nothing_but_half_a_code_point_is_held_back(text: str, at: list[int]) -> None:
    stream, shown, given_ = TextStream(), "", b""
    for piece in chunked(text.encode(), at):
        shown += stream.feed(piece)
        given_ += piece
        assert shown == given_.decode("utf-8", "ignore")


@given(st.binary())
def test_bytes_that_are_no_text_never_break_the_stream(data: bytes) -> None:
    whole = "".join(run([data], [])[0])
    assert "".join(run([bytes([b]) for b in data], [])[0]) == whole


@given(st.text("ab€x", max_size=30), stops, cuts)
def test_nothing_at_or_after_the_first_stop_string_is_shown(text: str, stop: list[str], at: list[int]) -> None:
    shown, stream = run(chunked(text.encode(), at), stop)
    out, cut = "".join(shown), first_stop(text, stop)
    assert stream.stopped == (cut is not None) == (stream.stop is not None)
    assert stream.stop is None or text.startswith(stream.stop, len(out)), "it names what it met there"
    assert not any(s in out for s in stop)
    if cut is None:
        assert out == text
    else:
        assert text.startswith(out)
        assert len(out) <= cut


@given(st.text("ab€x", max_size=30), stops)
def test_token_by_token_everything_before_the_first_stop_string_is_shown(text: str, stop: list[str]) -> None:
    shown, _ = run([c.encode() for c in text], stop)
    assert "".join(shown) == text[: first_stop(text, stop)]


@given(st.text("ab€x", max_size=30), stops)
def test_a_tail_is_held_only_while_it_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    stream, shown = TextStream(stop), ""
    for n, c in enumerate(text, 1):
        shown += stream.feed(c.encode())
        if stream.stopped:
            return
        held = text[len(shown) : n]
        assert not held or any(s.startswith(held) for s in stop)


def test_of_overlapping_stops_the_one_complete_first_counts() -> None:
    shown, stream = run([b"xa", b"ba", b"c"], ["aba", "abac", "bac"])
    assert ("".join(shown), stream.stopped) == ("x", True)


def test_of_two_stops_that_begin_at_one_place_the_one_complete_first_is_named() -> None:
    for stop in (["ab", "abc"], ["abc", "ab"]):
        assert run([b"x", b"abc"], stop)[1].stop == "ab"


def test_a_stop_string_may_begin_again_inside_itself() -> None:
    shown, stream = run([b"a", b"a", b"a", b"b"], ["aab"])
    assert ("".join(shown), stream.stopped) == ("a", True)


def test_a_stop_string_within_one_piece_hides_the_rest_of_that_piece() -> None:
    shown, stream = run([b"one STOP two"], ["STOP"])
    assert ("".join(shown), stream.stopped) == ("one ", True)


def test_an_unfinished_stop_string_is_text_after_all() -> None:
    assert run([b"one ST"], ["STOP"])[0] == ["one ", "ST"]


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert "".join(run(["€".encode()[:2]], [])[0]) == ""


def test_an_empty_stop_string_stops_nothing() -> None:
    assert "".join(run([b"text"], [""])[0]) == "text"


def test_a_stopped_stream_shows_no_more() -> None:
    stream = TextStream(["."])
    assert stream.feed(b"a.b") == "a"
    assert (stream.feed(b"c"), stream.flush(), stream.stopped) == ("", "", True)


@given(any_text, cuts)
def test_text_is_whole_exactly_where_it_is_that_of_all_bytes(text: str, at: list[int]) -> None:
    stream, shown, data = TextStream(), "", b""
    for piece in chunked(text.encode(), at):
        shown += stream.feed(piece)
        data += piece
        assert stream.whole == (shown.encode() == data and "\N{REPLACEMENT CHARACTER}" not in shown)


@given(st.binary(max_size=12))
def test_replaced_bytes_are_never_whole_again(data: bytes) -> None:
    stream, shown = TextStream(), b""
    for byte in data:
        shown += stream.feed(bytes([byte])).encode()
    assert not stream.whole or shown == data


def test_what_may_become_a_stop_string_is_not_whole_yet() -> None:
    stream, whole = TextStream(["STOP"]), []
    for piece in (b"one ST", b"AR", b" STOP"):
        stream.feed(piece)
        whole.append(stream.whole)
    assert whole == [False, True, False]
