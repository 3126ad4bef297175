"""What a sequence has in the KV cache, cut and joined by layers, so that a boundary between two ranges may move.

llama.cpp saves a sequence as numbers of 4 bytes: its mark, the sequence, 1 (one stream of cells), the number n of
cells, for each its position, 1 and the sequence; whether values lie transposed, the number of layers. Then come the
keys of each layer, then the values of each: a type, the bytes of a row (8 bytes) and n rows; of transposed values a
type, the bytes of a number, the numbers of a row, and those. This is no promise of llama.cpp: `moves_states` tries it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ...types import LayerRange
from .hidden import FloatRows
from .refusals import ModelError
from .rows import Row
from .state import State

MARKS = struct.Struct("<Ii")  # mark, sequence
_HEAD = struct.Struct("<IiII")  # mark, sequence, streams, cells
_CELL = struct.Struct("<iIi")  # position, how many sequences have it, the sequence
_COUNTS = struct.Struct("<II")  # whether values lie transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of a number, numbers of a row

N_TRIED = 12  # positions by which it is tried out whether a sequence can be cut by layers and joined
_A, _B = 0, 1  # its two sequences


class StateFormatError(ValueError):
    """A saved sequence is not in the form that this module knows, or parts of one do not fit together."""


@dataclass(frozen=True, slots=True)
class Section:
    """What is saved of one cache: the cells' positions, and of each layer the keys, then of each the values.

    `shape` says whether values lie transposed, and of each part the type, and the bytes for a cell.
    """

    positions: tuple[int, ...]
    parts: tuple[State, ...]
    shape: tuple[int, ...] = (0,)

    @property
    def n_layers(self) -> int:
        """How many layers it has."""
        return len(self.parts) // 2


@dataclass(frozen=True, slots=True)
class LayerState:
    """A sequence's cells of some layers: their positions, and of each layer the keys and the values, as saved."""

    layers: LayerRange
    mark: int
    positions: tuple[int, ...]
    is_transposed: bool
    keys: tuple[State, ...]
    values: tuple[State, ...]

    def cut(self, layers: LayerRange) -> LayerState:
        """Return the part of these layers. Raises ValueError if they are not all here."""
        own = self.layers
        if not (own.first <= layers.first and layers.last <= own.last and layers.of == own.of):
            raise ValueError(f"the layers {layers} of {layers.of} are not all among {own} of {own.of}")
        wanted = slice(layers.first - own.first, layers.last - own.first)
        return replace(self, layers=layers, keys=self.keys[wanted], values=self.values[wanted])

    def packed(self) -> bytes:
        """Return it in llama.cpp's form, for a context with these layers, and a tail where they are not the last.

        A tail hands its rows on whatever its own cells have: it gets those of the layer before it.
        """
        n_tail = 0 if self.layers.is_last else 1
        keys, values = (each + each[len(each) - n_tail :] for each in (self.keys, self.values))
        cells = (_CELL.pack(position, 1, 0) for position in self.positions)
        head = _HEAD.pack(self.mark, 0, 1, len(self.positions))
        return b"".join((head, *cells, _COUNTS.pack(self.is_transposed, len(keys)), *keys, *values))


def unpacked(data: State, layers: LayerRange) -> LayerState:
    """Return what a range's context has saved of a sequence, without its tail. Raises StateFormatError."""
    try:
        return _unpacked(memoryview(data), layers)
    except struct.error as e:
        raise StateFormatError("a saved sequence ends within its numbers") from e


def is_state_of(data: State, start: int, end: int) -> bool:
    """Whether what begins like this was saved of the cells from one position to another, and in their order."""
    try:
        _, _, n_streams, n_cells = _HEAD.unpack_from(data)
        return n_streams == 1 and [
            cell[:2] for cell in _CELL.iter_unpack(memoryview(data)[_HEAD.size : state_head(n_cells)])
        ] == [(position, 1) for position in range(start, end)]
    except struct.error:
        return False


def state_head(n_cells: int) -> int:
    """Return the bytes before a saved sequence's layers."""
    return _HEAD.size + n_cells * _CELL.size


def joined(parts: Sequence[LayerState]) -> LayerState:
    """Return the state of all layers of the parts, one range behind the other.

    Raises StateFormatError if there is a gap between them, or if they are not of the same cells.
    """
    if not parts:
        raise StateFormatError("there are no parts to join")
    for a, b in pairwise(parts):
        if (a.layers.last, a.layers.of) != (b.layers.first, b.layers.of):
            raise StateFormatError(f"behind the layers {a.layers} come {b.layers}")
        if (a.mark, a.positions, a.is_transposed) != (b.mark, b.positions, b.is_transposed):
            raise StateFormatError(f"the layers {a.layers} and {b.layers} have saved different cells")
    first, last = parts[0], parts[-1]
    return replace(
        first,
        layers=LayerRange(first.layers.first, last.layers.last, first.layers.of),
        keys=tuple(rows for part in parts for rows in part.keys),
        values=tuple(rows for part in parts for rows in part.values),
    )


def _unpacked(data: memoryview, layers: LayerRange) -> LayerState:
    mark, _ = MARKS.unpack_from(data)
    found, end = section(data, MARKS.size, ends_early=False)
    n_own, n_layers = layers.n_layers, found.n_layers
    if n_layers != n_own + (0 if layers.is_last else 1):
        msg = f"a sequence of the layers {layers} was saved with {n_layers} layers: the form is not known"
        raise StateFormatError(msg)
    if end != len(data):
        raise StateFormatError("behind the rows of a saved sequence there is more: the form is not known")
    keys, values = found.parts[:n_layers][:n_own], found.parts[n_layers:][:n_own]
    return LayerState(layers, mark, found.positions, bool(found.shape[0]), tuple(keys), tuple(values))


def section(data: memoryview, at: int, *, ends_early: bool = True) -> tuple[Section, int]:
    """Return what is saved from this byte on, and where it ends. Raises StateFormatError, struct.error.

    llama.cpp `ends_early` where there are no cells; what is packed here does not.
    """
    n_streams, n_cells = _COUNTS.unpack_from(data, at)
    cells_at = at + _COUNTS.size
    at = cells_at + n_cells * _CELL.size
    if n_streams != 1 or at > len(data):
        raise StateFormatError("a saved sequence has its cells in a form that is not known")
    if ends_early and not n_cells:
        return Section((), ()), at
    cells = list(_CELL.iter_unpack(data[cells_at:at]))
    if any(n_owners != 1 for _, n_owners, _ in cells):
        raise StateFormatError("the cells of a saved sequence have more than a position: the form is not known")
    is_transposed, n_layers = _COUNTS.unpack_from(data, at)
    at += _COUNTS.size
    if is_transposed > 1 or n_layers > len(data) - at:
        raise StateFormatError("a saved sequence has its layers in a form that is not known")
    parts, shape = list[State](), [is_transposed]
    for number in range(2 * n_layers):
        if number >= n_layers and is_transposed:
            kind, n_bytes, n_numbers = _COLUMNS.unpack_from(data, at)
            n_bytes *= n_numbers
            end = at + _COLUMNS.size + n_bytes * n_cells
        else:
            kind, n_bytes = _ROWS.unpack_from(data, at)
            end = at + _ROWS.size + n_bytes * n_cells
        if end > len(data):
            raise StateFormatError("a saved sequence ends within its rows")
        parts.append(data[at:end])  # no copy: `data` stays as long as any part of it does
        shape += kind, n_bytes
        at = end
    return Section(tuple(position for position, _, _ in cells), tuple(parts), tuple(shape)), at


# --- trying it out ----------------------------------------------------------------------------------------------------


class _Segment(Protocol):
    """What is needed of `segment.SegmentModel`."""

    layers: LayerRange
    n_embd: int
    n_vocab: int

    def run(self, rows: Sequence[Row], hidden: FloatRows | None = None) -> FloatRows: ...
    def save(self, seq: int) -> Any: ...
    def restore(self, seq: int, data: State) -> bool: ...
    def clear(self) -> None: ...


def moves_states(model: _Segment) -> bool:
    """Say whether a sequence of this range can be cut by layers, joined and taken back without changing what follows.

    Where it cannot, whoever takes a range over computes it again. For a context without sequences; it has none after.
    """
    random, layers = np.random.default_rng(0), model.layers
    hidden = random.standard_normal((N_TRIED + 1, model.n_embd), np.float32)
    tokens = [int(token) for token in random.integers(model.n_vocab, size=N_TRIED + 1)]

    def last_row(seq: int) -> FloatRows:
        return model.run([(tokens[-1], N_TRIED, seq, True)], hidden[-1:])

    try:
        model.run([(token, i, _A, False) for i, token in enumerate(tokens[:-1])], hidden[:-1])
        state = unpacked(model.save(_A), layers)
        halfway = (layers.first + layers.last) // 2
        ends = sorted({layers.first, halfway, layers.last})
        parts = [state.cut(LayerRange(first, last, layers.of)) for first, last in pairwise(ends)]
        if not model.restore(_B, joined(parts).packed()):
            return False
        return np.array_equal(last_row(_A), last_row(_B))
    except (StateFormatError, ModelError):
        return False
    finally:
        model.clear()
