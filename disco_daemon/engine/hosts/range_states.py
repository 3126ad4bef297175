"""What a sequence has in a model that is cut into ranges: as the whole model's, or range by range.

Range by range is for models whose cells cannot be cut by layers. Then the rows that each leg took are there as well:
whoever takes its layers over computes from them. It fits the same ranges only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...types import LayerRange
from ..llama.layer_states import joined, unpacked
from ..llama.refusals import ModelError
from ..llama.state import State


class RangeStates(msgspec.Struct, frozen=True):
    """Cells of a sequence up to position `n`: of each range what was saved, and of each leg the rows that it took.

    Rows are numbers of 4 bytes, n x n_embd; empty if they are not there.
    """

    n: int
    ranges: tuple[tuple[int, int], ...]
    parts: tuple[bytes, ...]
    rows: tuple[bytes, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RangeStates)


def whole(ranges: Sequence[LayerRange], parts: Sequence[State]) -> memoryview:
    """Return the state of all layers, from those of the ranges. Raises StateFormatError."""
    return memoryview(joined([unpacked(part, layers) for part, layers in zip(parts, ranges, strict=True)]).packed())


def cut_whole(data: State, ranges: Sequence[LayerRange]) -> RangeStates:
    """Return a state of all layers by ranges, without rows. Raises StateFormatError."""
    state = unpacked(data, LayerRange(0, ranges[-1].last, ranges[-1].of))
    parts = tuple(state.cut(layers).packed() for layers in ranges)
    return RangeStates(max(state.positions, default=-1) + 1, _numbers(ranges), parts, tuple(b"" for _ in ranges[1:-1]))


def by_range(n: int, ranges: Sequence[LayerRange], parts: Sequence[State], rows: Sequence[State]) -> memoryview:
    """Return parts and rows in one piece."""
    found = RangeStates(n, _numbers(ranges), tuple(map(bytes, parts)), tuple(map(bytes, rows)))
    return memoryview(_encoder.encode(found))


def parse_ranges(data: State, ranges: Sequence[LayerRange]) -> RangeStates:
    """Return what `by_range` made. Raises ModelError if it is no such thing, or of other ranges."""
    try:
        found = _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise ModelError(f"no state of ranges: {e}") from e
    if found.ranges != _numbers(ranges):
        raise ModelError("the layers have been moved since these cells were saved")
    return found


def _numbers(ranges: Sequence[LayerRange]) -> tuple[tuple[int, int], ...]:
    return tuple((layers.first, layers.last) for layers in ranges)
