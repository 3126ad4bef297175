"""A whole model in two ranges that shows what an exit learns from: the rows between them, and what becomes of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from ...types import LayerRange
from ..wire import Load
from .hidden import FloatRows
from .rows import Row
from .segment import SegmentModel
from .vocabulary import Vocabulary


class LowerRange(SegmentModel):
    """The first range, with the vocabulary."""

    def __init__(self, load: Load, layers: LayerRange) -> None:
        """Load it. Raises ModelError, TemplateError."""
        super().__init__(load, layers)
        self.vocabulary = Vocabulary(self._model, load.chat_template)

    def free(self, seq: int) -> None:
        """Free the cells of a sequence. The order of what comes next is no longer that of its positions."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, 0, -1)


class UpperRange(SegmentModel):
    """The last range; it shows its last rows behind the norm, which its output matrix takes to logits."""

    def __init__(self, load: Load, layers: LayerRange) -> None:
        """Load it. Raises ModelError."""
        super().__init__(load, layers)
        llama_cpp.llama_set_embeddings(self._ctx, True)

    def free(self, seq: int) -> None:
        """Free the cells of a sequence, as LowerRange does."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, 0, -1)

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

        Returns of the rows that want logits: their hidden rows at the cut, their last rows (n x n_embd each), and their
        logits, n x n_vocab.
        """
        hidden = self.lower.run(rows)
        logits = self.upper.run(rows, hidden)
        wanted = [i for i, row in enumerate(rows) if row[3]]
        return hidden[wanted], self.upper.finals(rows), logits

    def free(self, seq: int) -> None:
        """Free the cells of a sequence in both."""
        self.lower.free(seq)
        self.upper.free(seq)

    def close(self) -> None:
        """Free both; nothing else may be called afterwards."""
        self.lower.close()
        self.upper.close()
