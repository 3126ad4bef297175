"""The rows of one llama_decode, in llama.cpp's form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

NO_KV_SLOT, ABORTED = 1, 2  # what llama_decode returns, besides 0 (done) and negatives (broken)

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Rows:
    """A llama_batch over numpy arrays: filled as a whole, not element by element.

    With `n_embd` its rows come in place of tokens, hidden rows of that length, as between two ranges of layers; or
    `with_tokens`, as a layer that guesses takes both.
    """

    def __init__(self, n_batch: int, n_embd: int = 0, *, with_tokens: bool = False) -> None:
        self._token, self._pos, self._n_seq, self._seq = (np.ones(n_batch, np.int32) for _ in range(4))
        self._logits = np.zeros(n_batch, np.int8)
        self._hidden = np.empty((n_batch if n_embd else 0, n_embd), np.float32)
        where = self._seq.ctypes.data + self._seq.itemsize * np.arange(n_batch, dtype=np.uintp)
        self._seq_of = where.astype(np.uintp)  # each row's list of sequences has one entry
        self._batch = llama_cpp.llama_batch(
            n_tokens=0,
            token=None
            if n_embd and not with_tokens
            else self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=self._hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if n_embd else None,
            pos=self._pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._seq_of.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(
        self, rows: Sequence[Row], hidden: NDArray[np.float32] | None = None, *, with_logits: bool = True
    ) -> llama_cpp.llama_batch:
        """Fill the batch with these rows, and their hidden rows where it takes such.

        It is valid until the next call.
        """
        n = len(rows)
        if hidden is not None and len(self._hidden):
            self._hidden[:n] = hidden
        table = np.array(rows, np.int32)
        self._token[:n], self._pos[:n], self._seq[:n], self._logits[:n] = table.T
        if not with_logits:
            self._logits[:n] = 0
        self._batch.n_tokens = n
        return self._batch
