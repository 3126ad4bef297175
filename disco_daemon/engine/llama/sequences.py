"""The sequences of a llama.cpp context: what each has in the KV cache, and how it gets from one to another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from .refusals import ModelError
from .state import State
from .windows import Piece, joined, parted, spans

CellSpan: TypeAlias = tuple[int, int, Collection[int]]  # positions from one to another, and the sequences with them

N_SEQS = 64  # sequences in one context: answers, and cached prefixes
_TRASH, _SCRATCH = N_SEQS, N_SEQS + 1  # for forgotten cells; for cells that are being moved
N_SEQS_MAX = N_SEQS + 2  # that a context is made for


class Sequences:
    """A context's KV cache; a whole model and a range of its layers have it in the same way."""

    _ctx: Any
    _memory: Any
    _window = 0  # tokens that some of its layers see

    def _attach(self, context: Any) -> None:
        """Use a new context, made for N_SEQS_MAX sequences."""
        self._ctx, self._memory = context, llama_cpp.llama_get_memory(context)
        self._window = int(llama_cpp.llama_model_n_swa(llama_cpp.llama_get_model(context)))

    def forget(self, seq: int) -> None:
        """Take all that it has from a sequence.

        KV cells are not free until `clear`: llama.cpp would fill them next, and attention adds up in the order of the
        cells. A sequence whose cells are not in the order of their positions is rounded differently, which is enough
        to make a greedy answer another one.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, seq, _TRASH, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)  # of all there is llama.cpp refuses nothing

    def truncate(self, seq: int, n: int, otherwise: Callable[[], object]) -> None:
        """Take what is behind its first `n` tokens from a sequence, as `forget` does with all.

        A state that was carried through a text cannot be cut: then the sequence has nothing, and `otherwise` is called.
        """
        if n <= 0:
            self.forget(seq)
            return
        llama_cpp.llama_memory_seq_cp(self._memory, seq, _TRASH, n, -1)
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, n, -1):
            self.forget(seq)
            otherwise()

    def clear(self) -> None:
        """Free all cells of all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def compact(self, spans: Iterable[CellSpan]) -> int:
        """Put these spans of cells to the front, in this order, and free all other cells; return the bytes copied.

        Raises ModelError if llama.cpp does not take them back.
        """
        kept = list(spans)
        parts = [Sequences.part(self, min(owners), start, end) for start, end, owners in kept]
        Sequences.clear(self)
        for (start, end, owners), data in zip(kept, parts, strict=True):
            Sequences.put(self, data, owners, start, end)
        return sum(map(len, parts))

    def part(self, seq: int, start: int, end: int) -> memoryview:
        """Copy the KV cache's content of a sequence's positions from `start` to `end`."""
        if not self._window:
            return self._piece(seq, start, end)
        return joined([Piece(*span, self._piece(seq, *span)) for span in spans(start, end, self._window)])

    def put(self, data: State, owners: Iterable[int], start: int, end: int) -> None:
        """Put the content from `part` into new cells, for several sequences. Raises ModelError if there are none."""
        if not self._put_pieces(data, tuple(owners), start, end):
            raise ModelError("llama.cpp does not take back what it saved of its KV cache")

    def _piece(self, seq: int, start: int, end: int) -> memoryview:
        llama_cpp.llama_memory_seq_cp(self._memory, seq, _SCRATCH, start, end)
        data = self._save(_SCRATCH)
        llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return data

    def _put_pieces(self, data: State, owners: tuple[int, ...], start: int, end: int) -> bool:
        """Put content into new cells; return False if there are none, or it is not from `part`."""
        pieces = parted(data) if self._window else [Piece(start, end, data)]
        if pieces is None:
            return False
        for piece in pieces:
            if not self._restore(_SCRATCH, piece.data):
                return False
            for seq in owners:
                llama_cpp.llama_memory_seq_cp(self._memory, _SCRATCH, seq, piece.start, piece.end)
            llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return True

    def share(self, source: int, seq: int, n: int) -> None:
        """Let a sequence without cells have the first `n` of another's; nothing is computed or copied."""
        self.share_range(source, seq, 0, n)

    def share_range(self, source: int, seq: int, start: int, end: int) -> None:
        """Let a sequence have another's cells at the positions from `start` to `end`, where it has none."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, seq, start, end)

    def save(self, seq: int) -> memoryview:
        """Copy the KV cache's content of a sequence."""
        if self._window:
            return Sequences.part(self, seq, 0, llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1)
        return self._save(seq)

    def restore(self, seq: int, data: State) -> bool:
        """Put the content from `save` back into the KV cache, as sequence `seq`; return False if there is no room."""
        return self._put_pieces(data, (seq,), -1, -1) if self._window else self._restore(seq, data)

    def _save(self, seq: int) -> memoryview:
        # Neither zeroed before nor copied after: either takes many times as long as llama.cpp does to fill it.
        buffer = np.empty(llama_cpp.llama_state_seq_get_size(self._ctx, seq), np.uint8)
        n = llama_cpp.llama_state_seq_get_data(self._ctx, _pointer(buffer), len(buffer), seq)
        return buffer[:n].data

    def _restore(self, seq: int, data: State) -> bool:
        buffer = np.frombuffer(data, np.uint8)
        return bool(llama_cpp.llama_state_seq_set_data(self._ctx, _pointer(buffer), len(buffer), seq))


def _pointer(buffer: NDArray[np.uint8]) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
