"""Rows that cross the link arrive as what was computed, or within the error that their codec promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from disco_daemon.link.protocol import CODECS, IDS, BadFrameError
from disco_daemon.link.rows.codec import BLOCK, N_OUTLIERS, RowArray, decode_rows, encode_rows, row_bytes

LARGEST = float(np.float32(1e38))
LEAST_NORMAL = float(np.finfo(np.float32).tiny)  # below it, float32 itself has no relative precision
codecs = st.sampled_from((*CODECS, IDS))


def rows_of(most: float = LARGEST) -> st.SearchStrategy[RowArray]:
    shapes = st.tuples(st.integers(0, 4), st.integers(1, 100))
    numbers = st.floats(-most, most, width=32) if most != LARGEST else st.floats(-LARGEST, LARGEST, width=32)
    return arrays.arrays(np.float32, shapes, elements=numbers, fill=st.just(0.0))


def there_and_back(codec: str, rows: RowArray) -> RowArray:
    payload = encode_rows(codec, rows)
    assert len(payload) == len(rows) * row_bytes(codec, rows.shape[1])
    return decode_rows(codec, payload, *rows.shape)


@given(rows_of())
def test_f32_rows_arrive_to_the_bit(rows: RowArray) -> None:
    assert there_and_back("f32", rows).tobytes() == rows.tobytes()


@given(rows_of())
def test_bf16_rows_are_off_by_a_256th_at_most(rows: RowArray) -> None:
    error = np.abs(there_and_back("bf16", rows).astype(float) - rows)
    assert (error <= np.maximum(np.abs(rows.astype(float)) * 2**-8, LEAST_NORMAL)).all()


@given(rows_of())
def test_int8_rows_keep_their_outliers_and_are_off_by_half_a_scale_elsewhere(rows: RowArray) -> None:
    back = there_and_back("int8", rows)
    for row, got in zip(rows.astype(float), back.astype(float), strict=True):
        rank = np.sort(np.abs(row))[::-1]
        limit = rank[min(N_OUTLIERS, len(row)) - 1]  # what is larger travels as it is
        assert (got[np.abs(row) > limit] == row[np.abs(row) > limit]).all()
        for at in range(0, len(row), BLOCK):
            block = row[at : at + BLOCK]
            scale = np.minimum(np.abs(block), limit).max() / 127 * (1 + 2**-7)
            assert (np.abs(got[at : at + BLOCK] - block) <= 0.501 * scale + LEAST_NORMAL).all()


def test_rows_with_outliers_as_gemma_has_them_survive_every_codec() -> None:
    rows = np.random.default_rng(1).standard_normal((5, 576)).astype(np.float32)
    rows[:, [3, 70, 575]] = [98_408.0, -98_408.0, 40_000.0]
    for codec in CODECS:
        back = there_and_back(codec, rows)
        assert np.abs(back - rows).max(axis=1).max() <= 98_408 * 2**-8
        small = np.abs(rows) < 10
        assert np.abs(back - rows)[small].max() <= 0.04  # and those beside them are no coarser for it
    assert there_and_back("int8", rows)[:, 3].tolist() == [98_408.0] * 5


@pytest.mark.parametrize(("codec", "n_bytes"), [("f32", 2304), ("bf16", 1152), ("int8", 660)])
def test_a_row_of_576_numbers_has_the_bytes_that_the_page_says(codec: str, n_bytes: int) -> None:
    assert row_bytes(codec, 576) == n_bytes


@given(st.integers(0, 100), st.integers(1, 100), st.binary(min_size=1, max_size=9))
def test_rows_without_numbers_go_by_ids_take_no_byte_and_no_others_do(n: int, n_embd: int, more: bytes) -> None:
    none = np.empty((n, 0), np.float32)
    assert there_and_back(IDS, none).shape == (n, 0)
    assert row_bytes(IDS, 0) == 0
    with pytest.raises(BadFrameError):
        decode_rows(IDS, more, n, 0)
    for codec, width in (*((codec, 0) for codec in CODECS), (IDS, n_embd)):
        with pytest.raises(BadFrameError, match="no rows"):
            decode_rows(codec, b"", n, width)


def test_bf16_rounds_a_tie_to_the_even_neighbour() -> None:
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]], np.float32)
    assert there_and_back("bf16", ties).tolist() == [[1.0, 1 + 2**-6, -1.0]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_neither_written_nor_read(codec: str, number: float) -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 5] = number
    with pytest.raises(ValueError, match="not finite"):
        encode_rows(codec, rows)
    payload = bytearray(encode_rows(codec, np.zeros((2, 64), np.float32)))
    payload[-2:] = b"\x80\x7f"  # the end of the last row: infinity
    with pytest.raises(BadFrameError, match="not finite"):
        decode_rows(codec, bytes(payload), 2, 64)


@given(codecs, st.binary(max_size=300), st.integers(0, 3), st.integers(0, 40))
def test_whatever_a_stranger_sends_is_refused_or_finite(codec: str, payload: bytes, n_rows: int, n_embd: int) -> None:
    try:
        rows = decode_rows(codec, payload, n_rows, n_embd)
    except BadFrameError:
        return
    assert rows.shape == (n_rows, n_embd)
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()


@given(st.sampled_from(CODECS), st.data())
def test_whatever_has_the_right_length_is_refused_or_finite(codec: str, data: st.DataObject) -> None:
    n_rows, n_embd = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    size = n_rows * row_bytes(codec, n_embd)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        rows = decode_rows(codec, payload, n_rows, n_embd)
    except BadFrameError as e:
        assert "not finite" in str(e) or "outlier at" in str(e)  # noqa: PT017 -- either is right
        return
    assert np.isfinite(rows).all()


def test_another_codec_and_another_length_are_refused_with_the_numbers() -> None:
    with pytest.raises(BadFrameError, match="codec 'f16'"):
        decode_rows("f16", b"", 0, 4)
    with pytest.raises(BadFrameError, match="2 rows of 4 numbers by bf16 have 16 bytes, not 15"):
        decode_rows("bf16", bytes(15), 2, 4)
    with pytest.raises(BadFrameError, match="a row of 40 numbers has an outlier at 40"):
        decode_rows("int8", bytes(44) + b"\x28" + bytes(47), 1, 40)
    with pytest.raises(ValueError, match="beyond the range"):
        encode_rows("bf16", np.full((1, 1), np.finfo(np.float32).max, np.float32))
