"""Embeddings of texts by the same model, in a context of their own beside the answers'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from .. import wire
from .memory import F16, available_bytes, require, work_bytes
from .metadata import Metadata
from .refusals import PromptError
from .rows import ABORTED, Rows

PIECE = 128  # tokens of one llama_decode; larger ones are hardly faster, and answers have to wait for them
LEAST_CELLS = 512  # of the context, which grows with the texts: most are short
MAX_WAITING = 256  # texts; the daemon sends one at a time for each client
POOLING = {0: "mean", 1: "mean", 2: "first", 3: "last"}  # llama_pooling_type in a model's metadata; none is 0

Vector = NDArray[np.float64]


class EmbeddingError(RuntimeError):
    """Embeddings are not possible now, or with this model; the message is fit for a user."""


class EmbeddingContext:
    """A second context over a model's weights, which gives the last layer's vectors of one text at a time.

    Vectors are pooled here and not in llama.cpp, which pools within one llama_decode: a text may come in pieces.
    """

    def __init__(self, model: Any, params: llama_cpp.llama_context_params, n_vocab: int) -> None:
        """Open a context of a loaded llama_model; `params` have threads, types, abort callback and n_ctx."""
        metadata = Metadata(model)
        pooling = metadata.number("pooling_type")
        if pooling not in POOLING:
            raise EmbeddingError("The device's model gives no embeddings: it rates texts (pooling type rank).")
        work = work_bytes(PIECE, n_vocab, metadata.n_embd)
        try:
            n_bytes = work + params.n_ctx * metadata.kv_bytes(F16)
            require(f"embeddings of {params.n_ctx} tokens", n_bytes, available_bytes())
        except MemoryError as e:
            raise EmbeddingError(str(e)) from e
        params.n_batch = params.n_ubatch = PIECE
        params.n_seq_max, params.kv_unified = 1, True
        params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
        self._pooling = POOLING[pooling]
        self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise EmbeddingError("llama.cpp cannot make a context for embeddings: free some memory.")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._rows = Rows(PIECE)
        self.n_ctx: int = params.n_ctx
        self.size: int = llama_cpp.llama_model_n_embd_out(model)

    def decode(self, tokens: Sequence[int], start: int, end: int) -> tuple[int, Vector]:
        """Compute a piece of a text; return llama_decode's return value, and the sum of the vectors that count.

        At the `start` of a text the context is cleared.
        """
        if start == 0:
            llama_cpp.llama_memory_clear(self._memory, False)
        counts = {"first": {0}, "last": {len(tokens) - 1}, "mean": range(len(tokens))}[self._pooling]
        rows = [(tokens[i], i, 0, i in counts) for i in range(start, end)]
        rc = llama_cpp.llama_decode(self._ctx, self._rows.fill(rows))
        total = np.zeros(self.size)
        if rc == 0:
            llama_cpp.llama_synchronize(self._ctx)
            for row, (*_, wanted) in enumerate(rows):
                if wanted:
                    total += np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_ith(self._ctx, row), (self.size,))
        return int(rc), total

    def cut(self, n: int) -> bool:
        """Forget all beyond `n` tokens, such as half a piece; return False where llama.cpp cannot: then begin again."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1))

    def close(self) -> None:
        """Free the context; idempotent."""
        if self._ctx is not None:
            llama_cpp.llama_free(self._ctx)
            self._ctx = None


@dataclass(slots=True)
class _Text:
    """A text whose first `n_past` tokens are computed."""

    id: str
    tokens: list[int]
    n_past: int = 0
    total: Vector | float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class Embeddings:
    """Texts of up to `n_ctx` tokens in the order of their arrival, computed a piece at a time.

    The context is made by `new_context` when it is first needed, and anew for longer texts than any before; `tokens`
    gives a text's token ids, or raises PromptError.
    """

    new_context: Callable[[int], EmbeddingContext]
    tokens: Callable[[str | Sequence[int]], list[int]]
    n_ctx: int
    send: Callable[[wire.Message], None]
    clock: Callable[[], float] = time.perf_counter
    _texts: dict[str, _Text] = field(default_factory=dict)
    _context: EmbeddingContext | None = None
    _ended: float = 0.0  # the last piece, s
    _took_s: float = 0.0

    def add(self, request: wire.Embed) -> None:
        """Queue a text, or refuse it with a Failed that says why."""
        if len(self._texts) >= MAX_WAITING:
            text = "the device's queue is full; try again later"
            self.send(wire.Failed(id=request.id, reason="overloaded", message=text, your_fault=False))
            return
        try:
            tokens = self.tokens(request.input)
        except PromptError as e:
            self.send(wire.Failed(id=request.id, reason="bad_input", message=str(e), your_fault=True))
            return
        if len(tokens) > self.n_ctx:
            text = f"This model's maximum context length is {self.n_ctx} tokens, but the input has {len(tokens)}."
            self.send(wire.Failed(id=request.id, reason="context_length_exceeded", message=text, your_fault=True))
            return
        self._texts[request.id] = _Text(request.id, tokens)

    def cancel(self, request_id: str) -> None:
        """Drop a text; unknown ids are ignored."""
        self._texts.pop(request_id, None)

    def step(self, room: Callable[[], int], *, beside: bool = False) -> bool:
        """Compute a piece of at most `room` tokens; return False if there was nothing to compute.

        With `beside`, answers are running, and have half the time: they go on for as long as the last piece took.
        """
        text = next(iter(self._texts.values()), None)
        if text is None or (beside and self.clock() - self._ended < self._took_s):
            return text is not None
        try:
            self._advance(text, self._context_for(len(text.tokens)), room())
        except EmbeddingError as e:
            del self._texts[text.id]
            self.send(wire.Failed(id=text.id, reason="no_embeddings", message=str(e), your_fault=False))
        return True

    def _context_for(self, n_tokens: int) -> EmbeddingContext:
        """Return the context, made anew if it is too small. Raises EmbeddingError."""
        if self._context is None or self._context.n_ctx < n_tokens:
            if self._context is not None:
                self._context.close()
                self._context = None  # should there be no memory for a larger one, the next text makes a smaller one
            n_ctx = max(LEAST_CELLS, 1 << (n_tokens - 1).bit_length())
            self._context = self.new_context(n_ctx)
        return self._context

    def _advance(self, text: _Text, context: EmbeddingContext, room: int) -> None:
        end = min(len(text.tokens), text.n_past + max(1, min(room, PIECE)))
        began = self.clock()
        rc, vector = context.decode(text.tokens, text.n_past, end)
        self._ended = self.clock()
        self._took_s = self._ended - began
        text.busy_s += self._took_s
        if rc == ABORTED:  # a request was cancelled, this one or another
            if text.n_past and not context.cut(text.n_past):
                text.n_past, text.total = 0, 0.0
            return
        if rc != 0:
            raise EmbeddingError(f"llama_decode returned {rc}")
        text.n_past, text.total = end, text.total + vector
        if end == len(text.tokens):
            del self._texts[text.id]
            self.send(wire.Embedded(id=text.id, vector=_unit(text.total), n_tokens=end, busy_s=text.busy_s))
        else:
            self.send(wire.PrefillProgress(id=text.id, n_past=end, n_prompt=len(text.tokens)))


def _unit(vector: Vector | float) -> bytes:
    """Return a vector's direction, as little-endian float32 numbers."""
    length = float(np.linalg.norm(vector))
    return bytes((np.asarray(vector) / (length or 1.0)).astype("<f4").tobytes())
