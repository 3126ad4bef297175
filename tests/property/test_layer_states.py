"""A saved sequence is cut and joined by layers without a byte lost, and what is no such thing is refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama.layer_states import LayerState, StateFormatError, joined, unpacked
from disco_daemon.types import LayerRange


@st.composite
def states(draw: st.DrawFn) -> LayerState:
    n_layers, n_cells, transposed = draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.booleans())
    row = draw(st.integers(1, 6))

    def rows() -> bytes:
        return struct.pack("<iQ", 30, row) + draw(st.binary(min_size=row * n_cells, max_size=row * n_cells))

    def columns() -> bytes:
        return struct.pack("<iII", 1, 2, row) + draw(st.binary(min_size=2 * row * n_cells, max_size=2 * row * n_cells))

    keys = tuple(rows() for _ in range(n_layers))
    values = tuple(columns() if transposed else rows() for _ in range(n_layers))
    positions = tuple(range(n_cells))
    return LayerState(LayerRange(0, n_layers, n_layers), 0xAF143C18, positions, transposed, keys, values)


@given(states(), st.data())
def test_any_cuts_join_to_the_same(whole: LayerState, data: st.DataObject) -> None:
    n = whole.layers.of
    ends = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    parts = [whole.cut(LayerRange(first, last, n)) for first, last in pairwise(ends)]
    carried = [unpacked(part.packed(), part.layers) for part in parts]
    assert carried == parts
    assert joined(carried) == whole
    assert unpacked(whole.packed(), whole.layers) == whole


@given(states(), st.data())
def test_what_is_cut_short_or_goes_on_is_refused(whole: LayerState, data: st.DataObject) -> None:
    packed = whole.packed()
    with pytest.raises(StateFormatError):
        unpacked(packed[: data.draw(st.integers(0, len(packed) - 1))], whole.layers)
    with pytest.raises(StateFormatError):
        unpacked(packed + b"\0", whole.layers)


@given(states(), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(whole: LayerState, noise: bytes) -> None:
    with suppress(StateFormatError):
        unpacked(noise, whole.layers)


@given(states())
def test_parts_of_other_cells_or_with_a_gap_are_not_joined(whole: LayerState) -> None:
    n = whole.layers.of
    with pytest.raises(StateFormatError):
        joined([whole, whole])
    with pytest.raises(StateFormatError):
        joined([])
    if n > 1:
        low, high = whole.cut(LayerRange(0, 1, n)), whole.cut(LayerRange(1, n, n))
        longer = LayerState(high.layers, high.mark, (*high.positions, 99), high.is_transposed, high.keys, high.values)
        with pytest.raises(StateFormatError):
            joined([low, longer])
    with pytest.raises(ValueError, match="not all among"):
        whole.cut(LayerRange(0, n, n + 1))
