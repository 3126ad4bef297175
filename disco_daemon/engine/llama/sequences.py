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
N_SPARE_SEQS = 2  # of a context beside them: for forgotten cells, and for cells that are being moved
CARRIED = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # what has no cells


class Sequences:
    """A context's KV cache; a whole model and a range of its layers have it in the same way."""

    _ctx: Any
    _memory: Any
    _window = 0  # tokens that some of its layers see
    n_seqs = N_SEQS
    divisible = True  # whether what is computed of a text can be cut behind any token; else layers carry a state on
    resumes = True  # whether it can be gone on with from a copy of that state
    _no_state: State = b""

    def _attach(self, context: Any) -> None:
        """Use a new context, made for `n_seqs` sequences and N_SPARE_SEQS."""
        self._ctx, self._memory = context, llama_cpp.llama_get_memory(context)
        self._trash, self._scratch = range(self.n_seqs, self.n_seqs + N_SPARE_SEQS)
        if not self.divisible:
            self._no_state = self.state(self._scratch)
        self._window = int(llama_cpp.llama_model_n_swa(llama_cpp.llama_get_model(context)))

    def forget(self, seq: int) -> None:
        """Take all that it has from a sequence.

        KV cells are not free until `clear`: llama.cpp would fill them next, and attention adds up in the order of the
        cells. A sequence whose cells are not in the order of their positions is rounded differently, which is enough
        to make a greedy answer another one.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, seq, self._trash, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)  # of all there is llama.cpp refuses nothing

    def truncate(self, seq: int, n: int, otherwise: Callable[[], object]) -> None:
        """Take what is behind its first `n` tokens from a sequence, as `forget` does with all.

        A state that was carried through a text cannot be cut: then the sequence has nothing, and `otherwise` is called.
        """
        if n <= 0:
            self.forget(seq)
            return
        llama_cpp.llama_memory_seq_cp(self._memory, seq, self._trash, n, -1)
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
        carriers = () if self.divisible else {seq for _, _, owners in kept for seq in owners}
        states = {seq: self.state(seq) for seq in carriers}
        parts = [Sequences.part(self, min(owners), start, end) for start, end, owners in kept]
        Sequences.clear(self)
        for (start, end, owners), data in zip(kept, parts, strict=True):
            Sequences.put(self, data, owners, start, end)
        for seq, state in states.items():  # a part brings that of its first owner, at the end of its text
            if not self.set_state(seq, state):
                raise ModelError("llama.cpp does not take back a state that it saved")
        return sum(map(len, parts)) + sum(map(len, states.values()))

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
        llama_cpp.llama_memory_seq_cp(self._memory, seq, self._scratch, start, end)
        data = self._save(self._scratch)
        llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
        return data

    def _put_pieces(self, data: State, owners: tuple[int, ...], start: int, end: int) -> bool:
        """Put content into new cells; return False if there are none, or it is not from `part`."""
        pieces = parted(data) if self._window else [Piece(start, end, data)]
        if pieces is None:
            return False
        for piece in pieces:
            if not self._restore(self._scratch, piece.data):
                return False
            for seq in owners:
                llama_cpp.llama_memory_seq_cp(self._memory, self._scratch, seq, piece.start, piece.end)
            llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
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

    def state(self, seq: int) -> memoryview:
        """Copy what a sequence carries beside its cells: the state of recurrent layers at the end of its text."""
        return self._save(seq, CARRIED)

    def set_state(self, seq: int, state: State) -> bool:
        """Let a sequence carry what `state` has copied, in place of what it carries; return False if it has nothing."""
        return self._restore(seq, state, CARRIED)

    def drop_state(self, seq: int) -> None:
        """Let a sequence carry nothing: then it is cells, which can be cut, shared and moved."""
        if not self.set_state(seq, self._no_state):
            raise ModelError("llama.cpp does not take an empty state")

    def _save(self, seq: int, flags: int = 0) -> memoryview:
        # Neither zeroed before nor copied after: either takes many times as long as llama.cpp does to fill it.
        buffer = np.empty(llama_cpp.llama_state_seq_get_size_ext(self._ctx, seq, flags), np.uint8)
        n = llama_cpp.llama_state_seq_get_data_ext(self._ctx, _pointer(buffer), len(buffer), seq, flags)
        return buffer[:n].data

    def _restore(self, seq: int, data: State, flags: int = 0) -> bool:
        buffer = np.frombuffer(data, np.uint8)
        return bool(llama_cpp.llama_state_seq_set_data_ext(self._ctx, _pointer(buffer), len(buffer), seq, flags))


def _pointer(buffer: NDArray[np.uint8]) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
