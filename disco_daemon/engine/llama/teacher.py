"""A whole model in two ranges that shows what an exit learns from: the rows between them, and what becomes of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from ...types import LayerRange
from ..wire import Load
from .hidden import FloatRows, GraphWatch
from .refusals import refuse_to_cut
from .rows import Row
from .segment import SegmentModel
from .vocabulary import Vocabulary


class LowerRange(SegmentModel):
    """The first range, with the vocabulary."""

    def __init__(self, load: Load, layers: LayerRange) -> None:
        """Load it. Raises ModelError, TemplateError."""
        super().__init__(load, layers)
        self.vocabulary = Vocabulary(self._model, load.chat_template)

    def free(self, seq: int, from_pos: int = 0) -> None:
        """Free a sequence's cells from a position on. What comes next is no longer in the order of its positions."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, from_pos, -1):
            refuse_to_cut()


class UpperRange(SegmentModel):
    """The last range; it shows its last rows behind the norm, which its output matrix takes to logits."""

    def __init__(self, load: Load, layers: LayerRange, *, attended: bool = False) -> None:
        """Load it; `attended` lets it show the rows between its first layer's attention and FFN. Raises ModelError."""
        self._watch = GraphWatch("ffn_inp-0") if attended else None
        super().__init__(load, layers)
        llama_cpp.llama_set_embeddings(self._ctx, True)

    def free(self, seq: int, from_pos: int = 0) -> None:
        """Free a sequence's cells from a position on, as LowerRange does."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, from_pos, -1):
            refuse_to_cut()

    def _prepare(self, params: Any) -> None:
        if self._watch is not None:
            params.cb_eval = self._watch.callback

    def attended(self, rows: Sequence[Row]) -> FloatRows | None:
        """Return the rows behind the first layer's attention where logits were wanted; None if it does not show them.

        Raises ValueError if they were not seen.
        """
        if self._watch is None:
            return None
        seen = np.frombuffer(b"".join(self._watch.take()), np.float32).reshape(-1, self.n_embd)
        wanted = [i for i, row in enumerate(rows) if row[3]]
        if self.layers.n_layers == 1:  # the last layer goes on with wanted rows only
            wanted = list(range(len(wanted)))
        if len(seen) <= max(wanted, default=-1):
            raise ValueError("llama.cpp does not show the rows behind the attention of this model's layers")
        return seen[wanted]

    def finals(self, rows: Sequence[Row]) -> FloatRows:
        """Return the last rows of the last batch where logits were wanted, n x n_embd."""
        wanted = [
            np.ctypeslib.as_array(
                ctypes.cast(llama_cpp.llama_get_embeddings_ith(self._ctx, i), ctypes.POINTER(ctypes.c_float)),
                (self.n_embd,),
            )
            for i, row in enumerate(rows)
            if row[3]
        ]
        return np.array(wanted, np.float32).reshape(len(wanted), self.n_embd)


class Teacher:
    """Both ranges, with the same sequences in each."""

    def __init__(self, lower: LowerRange, upper: UpperRange) -> None:
        self.lower, self.upper = lower, upper
        self.vocabulary = lower.vocabulary

    def run(self, rows: Sequence[Row]) -> tuple[FloatRows, FloatRows, FloatRows]:
        """Compute one batch. Raises ModelError.

        Returns of the rows that want logits: what an exit gets of them, their last rows (n x n_embd each), and their
        logits, n x n_vocab. An exit gets hidden rows at the cut, or with the first upper layer's attention added.
        """
        hidden = self.lower.run(rows)
        logits = self.upper.run(rows, hidden)
        seen = self.upper.attended(rows)
        if seen is None:
            seen = hidden[[i for i, row in enumerate(rows) if row[3]]]
        return seen, self.upper.finals(rows), logits

    def free(self, seq: int, from_pos: int = 0) -> None:
        """Free a sequence's cells from a position on, in both."""
        self.lower.free(seq, from_pos)
        self.upper.free(seq, from_pos)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let a sequence without cells have the first `n` of another's, in both."""
        self.lower.share(source, seq, n)
        self.upper.share(source, seq, n)

    def close(self) -> None:
        """Free both; nothing else may be called afterwards."""
        self.lower.close()
        self.upper.close()
