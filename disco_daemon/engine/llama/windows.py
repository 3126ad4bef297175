"""What a sequence has in a KV cache with a sliding window, saved so that it can be cut anywhere when it is back.

llama.cpp saves of such layers what the window at the sequence's end sees. That is enough to go on there, and not at a
token before: layers would lack the cells that its window sees, and say nothing of it. So a sequence is saved in pieces,
none longer than the window: of each piece all is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .state import State

_MARK = b"disco window 1\0\0"
_COUNT = struct.Struct("<I")
_PIECE = struct.Struct("<IIQ")  # the positions from where to where, and the bytes


class Piece(NamedTuple):
    """The content at the positions from `start` to `end`, as llama.cpp saves it."""

    start: int
    end: int
    data: State


def spans(start: int, end: int, window: int) -> Iterator[tuple[int, int]]:
    """Divide positions where a window of so many tokens may begin: a layer that sees blocks of text has those."""
    while start < end:
        yield start, (start := min(end, (start // window + 1) * window))


def joined(pieces: Sequence[Piece]) -> memoryview:
    """Return the pieces as one."""
    heads = [_PIECE.pack(start, end, len(data)) for start, end, data in pieces]
    return memoryview(b"".join([_MARK, _COUNT.pack(len(pieces)), *heads, *(data for _, _, data in pieces)]))


def parted(data: State) -> list[Piece] | None:
    """Return the pieces of `joined`; None if it is none of its, or not whole."""
    view, at = memoryview(data), len(_MARK) + _COUNT.size
    if len(view) < at or view[: len(_MARK)] != _MARK:
        return None
    (n,) = _COUNT.unpack_from(view, len(_MARK))
    behind = at + n * _PIECE.size
    if behind > len(view):
        return None
    pieces = []
    for start, end, size in _PIECE.iter_unpack(view[at:behind]):
        pieces.append(Piece(start, end, view[behind : behind + size]))
        behind += size
    return pieces if behind == len(view) else None
