"""Whether what another machine says it has saved of a sequence can be that, to its last byte. Pure.

llama.cpp goes by the counts, positions, types and lengths in what it reads. A cache of cells is one section, as
`layer_states` has it; with a sliding window there are two, of the layers that see all and of those that see the window,
and of a long text one such state for each piece of it (`windows`). A section without cells has nothing behind its
counts, and the window's may lack the cells that no token sees any more.
"""

from __future__ import annotations

import struct

from ...types import LayerRange
from .layer_states import MARKS, Section, StateFormatError, section
from .state import State
from .windows import Piece, parted

MAX_TYPE = 64  # numbers of ggml's types; there are some forty
MAX_SECTIONS = 2  # of one state: layers that see all, and those that see the window


def check_state(data: State, layers: LayerRange, start: int, end: int) -> None:
    """Check what was saved of these layers at positions from `start` to `end`. Raises StateFormatError.

    Fewer may be there, up to some position: a text has an end.
    """
    n_layers = layers.n_layers + (0 if layers.is_last else 1)
    pieces = parted(data)
    if pieces is None:
        pieces = [Piece(start, end, data)]
    if not pieces or (pieces[0].start, pieces[-1].end) != (start, end):
        raise StateFormatError(f"it is not of the cells from {start} to {end}")
    shapes: dict[int, tuple[int, ...]] = {}  # by the number of a section
    at = start
    for piece in pieces:
        if piece.start != at or piece.end <= at:
            raise StateFormatError("its pieces are not one behind the other")
        at = piece.end
        try:
            found = _sections(memoryview(piece.data))
        except struct.error as e:
            raise StateFormatError("a saved sequence ends within its numbers") from e
        n_all = sum(one.n_layers for one in found)
        if n_all > n_layers or (n_all < n_layers and all(one.positions for one in found)):
            raise StateFormatError(f"the layers {layers} were saved with {n_all} layers")
        for number, one in enumerate(found):
            if one.positions and shapes.setdefault(number, one.shape) != one.shape:
                raise StateFormatError("its pieces have rows of different kinds")
            _check_positions(one, piece)


def _sections(data: memoryview) -> list[Section]:
    at, found = MARKS.size, list[Section]()
    MARKS.unpack_from(data)
    while at < len(data) or not found:
        if len(found) == MAX_SECTIONS:
            raise StateFormatError("behind the rows of a saved sequence there is more: the form is not known")
        one, at = section(data, at)
        found.append(one)
    return found


def _check_positions(one: Section, piece: Piece) -> None:
    wanted = range(piece.start, piece.end)
    if len(set(one.positions)) < len(one.positions) or not all(position in wanted for position in one.positions):
        raise StateFormatError(f"it has other cells than those from {piece.start} to {piece.end}")
    if any(not 0 <= kind < MAX_TYPE for kind in one.shape[1::2]):
        raise StateFormatError("its rows are of a type that there is not")
