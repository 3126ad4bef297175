"""Saved cells in the form of a sliding window, from another machine: what can be checked is, to the last byte."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.hosts.messages import CellsSaved
from disco_daemon.engine.hosts.outstanding import AskedCells, AskedOfHost, UnaskedError, check_cells
from disco_daemon.engine.llama.layer_states import MARKS
from disco_daemon.engine.llama.windows import Piece, joined
from disco_daemon.types import LayerRange

LAYERS = LayerRange(2, 5, 9)  # and a tail
N_EMBD = 4
WINDOW = 8
F16 = 1


def section(positions: Sequence[int], n_layers: int, row: int = 8, kind: int = F16) -> bytes:
    """One cache's cells as llama.cpp writes them."""
    head = struct.pack("<II", 1, len(positions))
    if not positions:
        return head
    cells = b"".join(struct.pack("<iIi", position, 1, 65) for position in positions)
    rows = struct.pack("<iQ", kind, row) + bytes(row * len(positions))
    return head + cells + struct.pack("<II", 0, n_layers) + rows * 2 * n_layers


def state(positions: Sequence[int], seen: Sequence[int], layers: tuple[int, int] = (1, 3), **how: int) -> bytes:
    """Of the layers that see all, and of those that see the window."""
    return MARKS.pack(0x1234, 65) + section(positions, layers[0], **how) + section(seen, layers[1], **how)


def text(n: int, end: int) -> bytes:
    """A text of `n` tokens, asked for up to `end`; the window has the last ones."""
    pieces = []
    for start in range(0, end, WINDOW):
        last = min(end, start + WINDOW)
        there = range(start, min(n, last))
        pieces.append(Piece(start, last, state(there, [one for one in there if one >= n - WINDOW])))
    return bytes(joined(pieces))


def refused(data: bytes, end: int = 20) -> str:
    with pytest.raises(UnaskedError) as caught:
        check_cells(data, AskedCells(LAYERS, 0, end), are_joined=False)
    return str(caught.value)


@settings(deadline=None)
@given(n=st.integers(0, 60), end=st.integers(1, 60))
def test_any_text_is_taken(n: int, end: int) -> None:
    check_cells(text(n, end), AskedCells(LAYERS, 0, end), are_joined=False)
    asked = AskedOfHost(N_EMBD)
    asked.load(0, (2, 5, 9))
    asked.save(1, 0, (0, end), None)
    assert asked.most_behind(CellsSaved(copy=1)) >= len(text(n, end))


def piece(start: int, end: int, data: bytes | None = None) -> Piece:
    there = range(start, end)
    return Piece(start, end, state(there, there) if data is None else data)


ODD: dict[str, bytes] = {
    "nothing": b"",
    "no pieces": bytes(joined([])),
    "half a mark": bytes(joined([piece(0, 20)]))[:7],
    "more pieces than there are": bytes(joined([]))[:-4] + struct.pack("<I", 0xFFFFFFFF),
    "a gap between pieces": bytes(joined([piece(0, 8), piece(9, 20)])),
    "the same piece twice": bytes(joined([piece(0, 8), piece(0, 8), piece(8, 20)])),
    "pieces in another order": bytes(joined([piece(8, 20), piece(0, 8)])),
    "a piece of nothing": bytes(joined([piece(0, 8), piece(8, 8, state([], [])), piece(8, 20)])),
    "another end": bytes(joined([piece(0, 8)])),
    "a piece to 2^32": bytes(joined([Piece(0, 0xFFFFFFFF, state([], []))])),
    "a piece that ends before it begins": bytes(joined([piece(0, 8), Piece(8, 4, state([], [])), piece(4, 20)])),
    "cells of the next piece": bytes(joined([piece(0, 8, state(range(4, 12), [])), piece(8, 20)])),
    "the same cell twice": bytes(joined([piece(0, 20, state([3, 3], [3]))])),
    "a cell before the first": bytes(joined([piece(0, 20, state([-1, 0], [0]))])),
    "a cell of 2^31 - 1": bytes(joined([piece(0, 20, state([0, 2**31 - 1], [0]))])),
    "another number of layers": bytes(joined([piece(0, 20, state(range(20), range(12, 20), (2, 3)))])),
    "a layer too few": bytes(joined([piece(0, 20, state(range(20), range(12, 20), (1, 2)))])),
    "three caches": bytes(joined([piece(0, 20, state([0], [0]) + section([0], 1))])),
    "rows of another length": bytes(joined([piece(0, 8), piece(8, 20, state(range(8, 20), [9], row=16))])),
    "rows of another type": bytes(joined([piece(0, 8), piece(8, 20, state(range(8, 20), [9], kind=30))])),
    "a type that there is not": bytes(joined([piece(0, 20, state(range(20), [9], kind=64))])),
    "a negative type": bytes(joined([piece(0, 20, state(range(20), [9], kind=-1))])),
    "bytes behind a piece": bytes(joined([piece(0, 20, state(range(20), [9]) + b"\0")])),
    "bytes behind the last": text(20, 20) + b"\0",
    "cells with several owners": text(20, 20).replace(struct.pack("<iIi", 3, 1, 65), struct.pack("<iIi", 3, 2, 65)),
    "two streams": text(20, 20).replace(struct.pack("<II", 1, 8), struct.pack("<II", 2, 8)),
    "2^32 - 1 cells": text(20, 20).replace(struct.pack("<II", 1, 8), struct.pack("<II", 1, 0xFFFFFFFF)),
    "rows of 2^63 bytes": text(20, 20).replace(struct.pack("<iQ", F16, 8), struct.pack("<iQ", F16, 1 << 63)),
    "2^32 - 1 layers": text(20, 20).replace(struct.pack("<II", 0, 3), struct.pack("<II", 0, 0xFFFFFFFF)),
    "values in some other way": text(20, 20).replace(struct.pack("<II", 0, 3), struct.pack("<II", 7, 3)),
}  # fmt: skip


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_what_lies_is_refused(data: bytes) -> None:
    assert data != text(20, 20)
    assert "it sent" in refused(data)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_changed_nothing_is_let_through_that_says_other_lengths(random_: random.Random) -> None:
    whole = text(20, 24)
    made = bytearray(whole)
    at = 4 * random_.randrange(len(made) // 4)
    value = random_.choice([0, 1, 2, 5, 8, 9, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, random_.getrandbits(32)])
    match random_.randrange(4):
        case 0:
            del made[at : at + random_.randrange(1, 40)]
        case 1:
            made[at:at] = random_.randbytes(random_.randrange(1, 40))
        case _:
            struct.pack_into("<I", made, at, value)
    try:
        check_cells(bytes(made), AskedCells(LAYERS, 0, 24), are_joined=False)
    except UnaskedError:
        return
    assert len(made) == len(whole)


def test_one_cell_makes_home_take_no_megabyte() -> None:
    asked = AskedOfHost(4096)
    asked.load(0, (2, 5, 9))
    asked.save(1, 0, (0, 1), None)
    assert asked.most_behind(CellsSaved(copy=1)) < 1 << 20
