"""What is saved of a KV cache with a sliding window: pieces that it sees whole, and nothing else is taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama.windows import Piece, joined, parted, spans

ends = st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(sorted)
pieces = st.lists(
    st.builds(Piece, st.integers(0, 1 << 31), st.integers(0, 1 << 31), st.binary(max_size=40)), max_size=6
)


@given(ends, st.integers(1, 600))
def test_spans_cover_all_positions_once_and_a_window_or_a_block_sees_each_whole(ends: list[int], window: int) -> None:
    found = list(spans(ends[0], ends[1], window))
    assert [position for span in found for position in range(*span)] == list(range(ends[0], ends[1]))
    assert all(0 < end - start <= window for start, end in found)
    assert all(start // window == (end - 1) // window for start, end in found)


@given(pieces)
def test_what_was_joined_is_parted_again(pieces: list[Piece]) -> None:
    found = parted(joined(pieces))
    assert found is not None
    assert [(start, end, bytes(data)) for start, end, data in found] == pieces


@given(pieces, st.data())
def test_what_was_cut_short_or_changed_in_length_is_not_taken_back(pieces: list[Piece], data: st.DataObject) -> None:
    whole = bytes(joined(pieces))
    n = data.draw(st.integers(0, len(whole) - 1))
    assert parted(whole[:n]) is None
    assert parted(whole + b"more") is None


@given(st.binary(max_size=200))
def test_what_an_older_version_has_written_is_not_taken_back(data: bytes) -> None:
    assert parted(data) is None
