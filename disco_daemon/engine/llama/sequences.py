"""The sequences of a llama.cpp context: what each has in the KV cache, and how it gets from one to another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from .memory import N_BATCH, N_SEQS, N_SPARE_SEQS
from .refusals import ModelError
from .state import State
from .windows import Piece, joined, parted, spans

CellSpan: TypeAlias = tuple[int, int, Collection[int]]  # positions from one to another, and the sequences with them

CARRIED = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # what has no cells, or a window's
FAR = 2**30  # a position that no text has


class Sequences:
    """A context's KV cache; a whole model and a range of its layers have it in the same way.

    Where it is `windowed`, layers with a sliding window have few cells, apart from the others: enough for the window of
    each sequence that runs, which is what it carries. These cells, too, are used one after the other and never twice;
    when none is left, the windows are moved to the front.
    """

    _ctx: Any = None
    _memory: Any
    _window = 0  # tokens that some of its layers see
    n_seqs = N_SEQS
    divisible = True  # whether what is computed of a text can be cut behind any token; else layers carry a state on
    resumes = True  # whether it can be gone on with from a copy of that state
    windowed = False  # whether layers with a window have cells for that alone
    n_snapshots = 0  # tokens of the latest decode by which a recurrent state can go back
    _no_state: State = b""
    _n_window_cells = 0  # in all, where it is `windowed`
    _window_head = 0  # cells used of them, at most, since they were last moved
    _latest: tuple[int, int] | None = None  # the sequence that the latest decode was of alone, and its rows

    def _attach(self, context: Any) -> None:
        """Use a new context, made for `n_seqs` sequences and N_SPARE_SEQS."""
        self._ctx, self._memory = context, llama_cpp.llama_get_memory(context)
        self._trash, self._scratch = range(self.n_seqs, self.n_seqs + N_SPARE_SEQS)
        self._window = int(llama_cpp.llama_model_n_swa(llama_cpp.llama_get_model(context)))
        self._window_head = 0
        self.n_snapshots = int(llama_cpp.llama_n_rs_seq(context))
        if not self.divisible:
            self._no_state = self._cell_apart() if self.windowed else self.state(self._scratch)

    @property
    def retracts(self) -> bool:
        """Whether what the latest decode has added to sequences can be taken from them again."""
        return self.divisible or self.windowed

    @property
    def n_retractable(self) -> int:
        """How many tokens can be taken from a sequence again that the latest decode, of it alone, has added.

        One that was broken off leaves a recurrent state half updated, and is not taken back so.
        """
        return N_BATCH if self.retracts else self.n_snapshots

    def can_cut(self, seq: int, n: int) -> bool:
        """Whether a running sequence can go on behind its first `n` tokens when it is cut there."""
        if not self.windowed:
            return self.divisible or self._has_snapshot(seq, n)
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, seq))
        return 0 <= first <= max(0, n - self._window + 1)

    def _has_snapshot(self, seq: int, n: int) -> bool:
        """Whether llama.cpp has the state behind the first `n` tokens: the latest decode has written some behind it."""
        if self._latest is None or self._latest[0] != seq:
            return False
        n_back = llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1 - n
        return bool(0 < n_back <= self.n_snapshots and n_back < self._latest[1])

    def _note_snapshots(self, seqs: Collection[int], n_rows: int) -> None:
        """Note a decode of `n_rows` of these sequences, none if it was broken off.

        Where it was of several, llama.cpp may have moved the states of some, and not their snapshots
        (`llama_memory_recurrent::find_slot`).
        """
        self._latest = (next(iter(seqs)), n_rows) if len(seqs) == 1 else None

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

        A state that was carried through a text cannot be cut, but goes back to a snapshot. Without one the sequence has
        nothing, and `otherwise` is called.
        """
        if n <= 0:
            self.forget(seq)
            return
        goes_back = bool(self.n_snapshots) and self._has_snapshot(seq, n)
        llama_cpp.llama_memory_seq_cp(self._memory, seq, self._trash, n, -1)
        is_cut = llama_cpp.llama_memory_seq_rm(self._memory, seq, n, -1)
        # Till its next decode a snapshot is only marked as the state; whatever moves states meanwhile would lose that.
        if not is_cut or (goes_back and not self.set_state(seq, self.state(seq))):
            self.forget(seq)
            otherwise()

    def clear(self) -> None:
        """Free all cells of all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._window_head, self._latest = 0, None

    def compact(self, spans: Iterable[CellSpan]) -> int:
        """Put these spans of cells to the front, in this order, and free all other cells; return the bytes copied.

        Raises ModelError if llama.cpp does not take them back.
        """
        kept = list(spans)
        carriers = () if self.divisible else {seq for _, _, owners in kept for seq in owners}
        states = {seq: self.state(seq) for seq in carriers}
        if self.windowed:  # else a part would have some of its first owner's window
            for seq in (self._trash, *carriers):
                self._clear_window(seq)
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
        if self.windowed or not self._window:
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
        pieces = parted(data) if self._window and not self.windowed else [Piece(start, end, data)]
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
        if self._window and not self.windowed:
            return Sequences.part(self, seq, 0, llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1)
        return self._save(seq)

    def restore(self, seq: int, data: State) -> bool:
        """Put the content from `save` back into the KV cache, as sequence `seq`; return False if there is no room."""
        if self.windowed:
            self._reserve_window(self._window)
            return self._restore(seq, data) and self._count_window(seq)
        return self._put_pieces(data, (seq,), -1, -1) if self._window else self._restore(seq, data)

    def state(self, seq: int) -> memoryview:
        """Copy what a sequence carries beside its cells: a window, or recurrent layers' state at its text's end."""
        return self._save(seq, CARRIED)

    def set_state(self, seq: int, state: State) -> bool:
        """Let a sequence carry what `state` has copied, in place of what it carries; return False if it has nothing."""
        if self.windowed:
            self._reserve_window(self._window)
            self._drop_window(seq)
            return self._restore(seq, state, CARRIED) and self._count_window(seq)
        return self._restore(seq, state, CARRIED)

    def drop_state(self, seq: int) -> None:
        """Let a sequence carry nothing: then it is cells, which can be cut, shared and moved."""
        if self.windowed:
            self._reserve_window(1)
            self._drop_window(seq)
        elif not self.set_state(seq, self._no_state):
            raise ModelError("llama.cpp does not take an empty state")

    # --- the cells of layers with a window ------------------------------------------------------------------------

    def _cell_apart(self) -> State:
        """Return what a sequence carries that has one cell, at FAR. Raises ModelError."""
        row = llama_cpp.llama_batch_init(1, 0, 1)
        try:
            row.n_tokens, row.token[0], row.pos[0] = 1, 0, FAR
            row.n_seq_id[0], row.seq_id[0][0], row.logits[0] = 1, self._scratch, False
            if llama_cpp.llama_decode(self._ctx, row) != 0:
                raise ModelError("llama.cpp cannot compute a token with this model")
        finally:
            llama_cpp.llama_batch_free(row)
        cell = self.state(self._scratch)
        Sequences.clear(self)
        return cell

    def _reserve_window(self, n: int) -> None:
        """Make sure of `n` cells that are not used, and of one more, for `_clear_window`.

        Raises ModelError if llama.cpp does not take back the windows.
        """
        if self._window_head + n < self._n_window_cells:
            return
        carriers = [seq for seq in range(self.n_seqs) if llama_cpp.llama_memory_seq_pos_max(self._memory, seq) >= 0]
        states = {seq: self.state(seq) for seq in carriers}
        for seq in (self._trash, *carriers):
            self._clear_window(seq)
        self._window_head = 0
        for seq, state in states.items():
            if not (self._restore(seq, state, CARRIED) and self._count_window(seq)):
                raise ModelError("llama.cpp does not take back a window that it saved")

    def _count_window(self, seq: int) -> bool:
        """Count the cells that a sequence's window has been put into; return True."""
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, seq)
        self._window_head += llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1 - first if first >= 0 else 0
        return True

    def _drop_window(self, seq: int) -> None:
        """Take its window from a sequence; as in `forget` the cells stay used."""
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, seq)
        if first >= 0:
            llama_cpp.llama_memory_seq_cp(self._memory, seq, self._trash, first, -1)
            self._clear_window(seq)

    def _clear_window(self, seq: int) -> None:
        """Free the cells of a sequence's window, and no others.

        llama.cpp has no function for that, and passes over a state without cells. So the window becomes one of a single
        cell, at a position where nothing else is, and that is removed.
        """
        is_replaced = self._restore(seq, self._no_state, CARRIED)
        if not is_replaced or not llama_cpp.llama_memory_seq_rm(self._memory, seq, FAR, -1):
            raise ModelError("llama.cpp does not take an empty window")

    def _save(self, seq: int, flags: int = 0) -> memoryview:
        # Neither zeroed before nor copied after: either takes many times as long as llama.cpp does to fill it.
        buffer = np.empty(llama_cpp.llama_state_seq_get_size_ext(self._ctx, seq, flags), np.uint8)
        n = llama_cpp.llama_state_seq_get_data_ext(self._ctx, _pointer(buffer), len(buffer), seq, flags)
        return buffer[:n].data

    def _restore(self, seq: int, data: State, flags: int = 0) -> bool:
        self._latest = None  # it takes the place of some state, and its snapshots are of another text
        buffer = np.frombuffer(data, np.uint8)
        return bool(llama_cpp.llama_state_seq_set_data_ext(self._ctx, _pointer(buffer), len(buffer), seq, flags))


def _pointer(buffer: NDArray[np.uint8]) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
