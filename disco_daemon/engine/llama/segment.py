"""A range of a model's layers in llama.cpp: tokens or hidden rows in, hidden rows or logits out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from ...types import LayerRange
from ..wire import Load
from .context import context_params
from .hidden import FloatRows, HiddenRows
from .library import usable_threads
from .memory import N_BATCH, N_SEQS, N_SPARE_SEQS
from .metadata import Metadata
from .refusals import ModelError
from .rounding import use_extra_buffers
from .rows import Row, Rows
from .sequences import Sequences


class SegmentModel(Sequences):
    """One range with a KV cache of its own, of `load.n_ctx` tokens in up to N_SEQS sequences."""

    def __init__(self, load: Load, layers: LayerRange) -> None:
        """Load the file of the range, `load.model_path`. Raises ModelError."""
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = load.n_gpu_layers or 0
        params.use_extra_bufts = use_extra_buffers(load)
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
        if not self._model:
            msg = f"llama.cpp cannot load the layers {layers}: the model cannot be cut there, or memory is short"
            raise ModelError(msg)
        self.layers = layers
        try:
            self._open(load, layers)
        except BaseException:  # whatever it was, model and context would be left for good
            self.close()
            raise

    def _open(self, load: Load, layers: LayerRange) -> None:
        self.n_embd = int(llama_cpp.llama_model_n_embd(self._model))
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        header = Metadata(self._model)
        architecture = header.text("general.architecture")
        self._hidden = None if layers.is_last else HiddenRows(architecture, layers.n_layers, self.n_embd)
        self._rows = Rows(N_BATCH, 0 if layers.is_first else self.n_embd)
        params = context_params(load, header)
        params.n_ctx, params.n_batch, params.n_ubatch = load.n_ctx, N_BATCH, N_BATCH
        params.n_seq_max = N_SEQS + N_SPARE_SEQS
        self._prepare(params)
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ModelError(f"llama.cpp cannot make a context of {load.n_ctx} tokens for the layers {layers}")
        self._attach(context)
        if self._hidden is not None:
            self._hidden.begin(context)

    def _prepare(self, params: Any) -> None:
        """Set what the context needs to be made with, so that it shows rows."""
        if self._hidden is not None:
            self._hidden.prepare(params)

    def use_threads(self, n: int) -> None:
        """Compute by so many threads from the next batch on."""
        llama_cpp.llama_set_n_threads(self._ctx, usable_threads(n), usable_threads(n))

    def close(self) -> None:
        """Free model and context; nothing else may be called afterwards."""
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)

    def run(self, rows: Sequence[Row], hidden: FloatRows | None = None) -> FloatRows:
        """Compute one batch; `hidden` are the rows that a range which is not the first one takes, n x n_embd.

        Returns the rows for the next range, n x n_embd, or of the last range the logits of the rows that want them, in
        order. Raises ModelError if llama.cpp cannot compute it.
        """
        if not self.layers.is_last:  # with a row wanted it would compute the whole head, for nothing
            rows = [(token, position, seq, False) for token, position, seq, _ in rows]
        self._decode(rows, hidden)
        return self._wanted(rows) if self._hidden is None else self._hidden.take(self._ctx, len(rows))

    def run_with_exit(self, rows: Sequence[Row]) -> tuple[FloatRows, FloatRows]:
        """Compute one batch of a first range whose file has an exit.

        Returns the rows for the next range, as `run` does to the bit, and the exit's logits of the rows that want
        them, in order. Raises ModelError if llama.cpp cannot compute it.
        """
        assert self._hidden is not None
        self._decode(rows, None)
        return self._hidden.take(self._ctx, len(rows)), self._wanted(rows)

    def _decode(self, rows: Sequence[Row], hidden: FloatRows | None) -> None:
        rc = llama_cpp.llama_decode(self._ctx, self._rows.fill(rows, hidden))
        if rc != 0:
            raise ModelError(f"llama.cpp cannot compute the layers {self.layers} (it returned {rc})")
        llama_cpp.llama_synchronize(self._ctx)

    def _wanted(self, rows: Sequence[Row]) -> FloatRows:
        wanted = [self._logits(index) for index, row in enumerate(rows) if row[3]]
        return np.array(wanted, np.float32).reshape(len(wanted), self.n_vocab)

    def _logits(self, index: int) -> FloatRows:
        logits = llama_cpp.llama_get_logits_ith(self._ctx, index)
        return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.n_vocab,))
