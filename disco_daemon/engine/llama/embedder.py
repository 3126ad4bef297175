"""Vectors of texts, and how models rate them: by a context of their own, beside the answers' or in place of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ...models.text_models import ENCODERS, RANK, pooling_of
from ...types import Given
from .. import wire
from .context import FLASH_ATTN
from .memory import F16, TEXT_ROWS, TextNeed, available_bytes, require
from .metadata import Metadata
from .refusals import DimensionsError, PromptError, PromptTooLong
from .rows import ABORTED, Rows

PIECE = TEXT_ROWS  # tokens of one llama_decode
LEAST_CELLS = 512  # of the context, which grows with the texts: most are short
MAX_WAITING = 256  # requests of some texts each; the daemon sends one at a time for each client
_SHARES = ("qwen3", "qwen3vl")  # whose rating is a share already, of yes and no (src/llama-graph.cpp)
MAX_PACKED = 64  # texts in one llama_decode; llama.cpp takes 256 sequences

Vector = NDArray[np.float64]


class EmbeddingError(RuntimeError):
    """Embeddings are not possible now, or with this model; the message is fit for a user."""


class Passage(NamedTuple):
    """The tokens of a text from `start` up to `end` (exclusive)."""

    tokens: Sequence[int]
    start: int
    end: int


def reads_whole(metadata: Metadata) -> bool:
    """Whether each token of a text sees all others, so that a text has to be computed in one piece."""
    architecture = metadata.text("general.architecture")
    return architecture in ENCODERS or metadata.text(f"{architecture}.attention.causal") == "false"


def text_need(model: Any, n_vocab: int, *, has_flash: bool) -> TextNeed:
    """Return what a loaded model needs to make vectors of texts, with flash attention or without it."""
    metadata = Metadata(model)
    kept = 0 if metadata.text("general.architecture") in ENCODERS else metadata.kv_bytes(F16)
    n_heads = 0 if has_flash else llama_cpp.llama_model_n_head(model)
    return TextNeed(metadata.n_embd, n_vocab, kept, reads_whole(metadata), n_heads)


class EmbeddingContext:
    """A context over a model's weights, which gives vectors of texts, several at a time.

    Vectors are pooled here and not in llama.cpp, which pools within one llama_decode: a text may come in pieces. Only
    the ratings of a model that has a head for them are llama.cpp's.
    """

    def __init__(self, model: Any, params: llama_cpp.llama_context_params, n_vocab: int) -> None:
        """Open a context of a loaded llama_model; `params` have threads, types, abort callback and n_ctx."""
        metadata = Metadata(model)
        architecture = metadata.text("general.architecture")
        self.pooling = pooling_of(architecture, metadata.number("pooling_type")) or "mean"
        self.reads_whole = reads_whole(metadata)
        n_rows = params.n_ctx if self.reads_whole else min(params.n_ctx, PIECE)
        keeps = architecture not in ENCODERS
        has_state = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        self.n_packed = 1 if has_state else MAX_PACKED  # llama.cpp makes a state for each sequence at once
        try:
            has_flash = params.flash_attn_type != FLASH_ATTN[False]
            n_bytes = text_need(model, n_vocab, has_flash=has_flash).n_bytes(params.n_ctx)
            require(f"embeddings of {params.n_ctx} tokens", n_bytes, available_bytes())
        except MemoryError as e:
            raise EmbeddingError(str(e)) from e
        params.n_batch = params.n_ubatch = n_rows
        params.n_seq_max, params.kv_unified = self.n_packed, True
        params.embeddings = True
        rates = self.pooling == RANK
        params.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_RANK if rates else llama_cpp.LLAMA_POOLING_TYPE_NONE
        self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise EmbeddingError("llama.cpp cannot make a context for embeddings: free some memory.")
        self._memory = llama_cpp.llama_get_memory(self._ctx) if keeps else None
        self._rows = Rows(n_rows)
        self.n_ctx: int = params.n_ctx
        self.n_rows = n_rows  # of one llama_decode, at most
        self._is_share = architecture in _SHARES
        self._size = llama_cpp.llama_model_n_embd_out(model)

    def decode(self, pieces: Sequence[Passage]) -> tuple[int, list[Vector]]:
        """Compute pieces of different texts; return llama_decode's return value, and for each what it adds to a vector.

        The first may go on with the first of the time before, whose start is in the context; all others begin.
        """
        if self._memory is not None and pieces[0].start == 0:
            llama_cpp.llama_memory_clear(self._memory, False)
        rows = [(p.tokens[i], i, seq, True) for seq, p in enumerate(pieces) for i in range(p.start, p.end)]
        rc = int(llama_cpp.llama_decode(self._ctx, self._rows.fill(rows)))
        if rc != 0:
            for seq in range(1, len(pieces)):
                self._forget(seq, 0)
            return rc, []
        if self.pooling == RANK:
            return rc, [self._rating(llama_cpp.llama_get_embeddings_seq(self._ctx, i)[0]) for i in range(len(pieces))]
        found = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(self._ctx), (len(rows), self._size))
        vectors, at = [], 0
        for piece in pieces:
            vectors.append(self._pooled(piece, found[at : at + piece.end - piece.start]))
            at += piece.end - piece.start
        return rc, vectors

    def _rating(self, score: float) -> Vector:
        """Return how the head rates a text, and the same from 0 to 1."""
        return np.array([score, score if self._is_share else 0.5 + 0.5 * np.tanh(score / 2)])

    def _pooled(self, piece: Passage, rows: NDArray[np.float32]) -> Vector:
        """Return the sum of the rows that count of a piece."""
        if self.pooling == "mean":
            return np.asarray(rows.sum(axis=0, dtype=np.float64))
        at, row = (0, 0) if self.pooling == "cls" else (len(piece.tokens) - 1, -1)
        return rows[row].astype(np.float64) if piece.start <= at < piece.end else np.zeros(self._size)

    def cut(self, n: int) -> bool:
        """Forget all of the first text beyond `n` tokens; return False where llama.cpp cannot: then begin again."""
        return self._forget(0, n)

    def _forget(self, seq: int, n: int) -> bool:
        return self._memory is None or bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, n, -1))

    def close(self) -> None:
        """Free the context; idempotent."""
        if self._ctx is not None:
            llama_cpp.llama_free(self._ctx)
            self._ctx = None


@dataclass(slots=True)
class _Texts:
    """The texts of a request, of which those that have `vectors` are computed, and `n_past` tokens of the next one."""

    request: wire.Embed
    texts: list[list[int]]
    vectors: list[bytes] = field(default_factory=list)
    n_past: int = 0
    total: Vector | float = 0.0
    n_done: int = 0  # tokens of the texts that have vectors
    busy_s: float = 0.0


@dataclass(slots=True)
class Embeddings:
    """Texts of up to `n_ctx` tokens in the order of their arrival, computed a piece of tokens at a time.

    Short ones are computed together. A vector has `size` numbers. The context is made by `new_context` when it is
    first needed, and anew for longer texts than any before. `tokens` gives a text's token ids, and `pair` those of a
    query with a text, where the model rates them; both raise PromptError.
    """

    new_context: Callable[[int], EmbeddingContext]
    tokens: Callable[[Given], list[int]]
    n_ctx: int
    size: int
    send: Callable[[wire.Message], None]
    clock: Callable[[], float] = time.perf_counter
    pair: Callable[[str, Given], list[int]] | None = None
    _requests: dict[str, _Texts] = field(default_factory=dict)
    _context: EmbeddingContext | None = None
    _ended: float = 0.0  # the last piece, s
    _took_s: float = 0.0
    _n_alone: int = 0  # llama_decode's to come with one text each, since one with several has failed

    def tokenized(self, request: wire.Embed) -> wire.Embed:
        """Return a request with token ids in place of texts. Raises PromptError; any thread may call it."""
        _require_dimensions(request.dimensions, request.least_dimensions, self.size)
        return wire.Embed(
            id=request.id,
            inputs=tuple(tuple(self._tokens_of(request, given)) for given in request.inputs),
            dimensions=request.dimensions,
            centred=request.centred,
        )

    def _tokens_of(self, request: wire.Embed, given: Given) -> list[int]:
        what = "input" if request.query is None else "query with its document"
        if (request.query is None) != (self.pair is None):
            raise PromptError(_NO_RATINGS if self.pair is None else _NO_VECTORS)
        try:
            tokens = self.tokens(given) if self.pair is None else self.pair(request.query or "", given)
        except PromptTooLong as e:
            raise e.of(what) from e
        except PromptError as e:
            e.reason = "bad_input"
            raise
        if len(tokens) > self.n_ctx:
            raise PromptTooLong(self.n_ctx, len(tokens), exact=True, what=what)
        return tokens

    def add(self, request: wire.Embed) -> None:
        """Queue texts whose tokens are known, or refuse them with a Failed that says why."""
        if len(self._requests) >= MAX_WAITING:
            text = "the device's queue is full; try again later"
            self.send(wire.Failed(id=request.id, reason="overloaded", message=text, your_fault=False))
            return
        ids = cast("tuple[tuple[int, ...], ...]", request.inputs)
        self._requests[request.id] = _Texts(request, list(map(list, ids)))

    def cancel(self, request_id: str) -> None:
        """Drop the texts of a request, and say what was computed of them; unknown ids are ignored."""
        if (request := self._requests.pop(request_id, None)) is not None:
            n_tokens = request.n_done + request.n_past
            self.send(wire.Embedded(id=request_id, vectors=(), n_tokens=n_tokens, busy_s=request.busy_s))

    def is_first(self, request_id: str) -> bool:
        """Whether it is a request's turn; any thread may ask."""
        return list(self._requests)[:1] == [request_id]  # a copy, in one go: the main thread changes the requests

    def step(self, room: Callable[[], int], *, beside: bool = False) -> bool:
        """Compute a piece of at most `room` tokens; return False if there was nothing to compute.

        With `beside`, answers are running, and have half the time: they go on for as long as the last piece took.
        """
        request = next(iter(self._requests.values()), None)
        if request is None or (beside and self.clock() - self._ended < self._took_s):
            return request is not None
        try:
            context = self._context_for(len(request.texts[len(request.vectors)]))
            self._advance(context, self._pack(context, max(1, min(room(), context.n_rows))))
        except EmbeddingError as e:
            self._requests.pop(request.request.id)
            self.send(wire.Failed(id=request.request.id, reason="no_embeddings", message=str(e), your_fault=False))
        return True

    def _context_for(self, n_tokens: int) -> EmbeddingContext:
        """Return the context, made anew if it is too small. Raises EmbeddingError."""
        if self._context is None or self._context.n_ctx < n_tokens:
            if self._context is not None:
                self._context.close()
                self._context = None  # should there be no memory for a larger one, the next text makes a smaller one
            n_ctx = max(LEAST_CELLS, 1 << (n_tokens - 1).bit_length())
            self._context = self.new_context(min(self.n_ctx, n_ctx))  # for more, memory was not reckoned
        return self._context

    def _pack(self, context: EmbeddingContext, room: int) -> list[tuple[_Texts, Passage]]:
        """Return the pieces to compute next: of the first text as much as there is room for, and whole ones behind it.

        A text that has to be read whole is taken whole, however long it is.
        """
        found: list[tuple[_Texts, Passage]] = []
        n_kept = 0
        for request in self._requests.values():
            for index in range(len(request.vectors), len(request.texts)):
                tokens, start = request.texts[index], 0 if found else request.n_past
                n_left = len(tokens) - start
                n_most = 1 if self._n_alone else context.n_packed
                is_full = len(found) == n_most or n_kept + len(tokens) > context.n_ctx
                if found and (n_left > room or is_full):
                    return found
                end = len(tokens) if context.reads_whole else min(len(tokens), start + room)
                found.append((request, Passage(tokens, start, end)))
                room, n_kept = room - (end - start), n_kept + len(tokens)
                if end < len(tokens):
                    return found
        return found

    def _advance(self, context: EmbeddingContext, pack: list[tuple[_Texts, Passage]]) -> None:
        first, began = pack[0][0], self.clock()
        rc, vectors = context.decode([piece for _, piece in pack])
        self._ended = self.clock()
        self._took_s = self._ended - began
        n_rows = sum(piece.end - piece.start for _, piece in pack)
        for request, piece in pack:
            request.busy_s += self._took_s * (piece.end - piece.start) / n_rows
        if rc == ABORTED:  # a request was cancelled, this one or another
            self._go_back(context, first)
            return
        if rc != 0 and len(pack) > 1:  # nobody knows whose text it was: each is computed alone
            self._n_alone = len(pack)
            self._go_back(context, first)
            return
        self._n_alone = max(0, self._n_alone - 1)
        if rc != 0:
            raise EmbeddingError(f"llama_decode returned {rc}")
        for (request, piece), vector in zip(pack, vectors, strict=True):
            request.n_past, request.total = piece.end, request.total + vector
            if piece.end == len(piece.tokens):
                rated = context.pooling == RANK
                request.vectors.append(_floats(vector) if rated else _unit(request.total, request.request))
                request.n_done += piece.end
                request.n_past, request.total = 0, 0.0
        for request in {id(one): one for one, _ in pack}.values():
            self._tell(request)

    def _go_back(self, context: EmbeddingContext, first: _Texts) -> None:
        """Take back what a decode that came to nothing has done to the first text, or begin that again."""
        if first.n_past and not context.cut(first.n_past):
            first.n_past, first.total = 0, 0.0

    def _tell(self, request: _Texts) -> None:
        """Send the vectors of a request, or how far it is."""
        own, n_done = request.request, request.n_done + request.n_past
        if len(request.vectors) < len(request.texts):
            n_tokens = sum(map(len, request.texts))
            self.send(wire.PrefillProgress(id=own.id, n_past=n_done, n_prompt=n_tokens))
            return
        del self._requests[own.id]
        vectors = tuple(request.vectors)
        self.send(wire.Embedded(id=own.id, vectors=vectors, n_tokens=n_done, busy_s=request.busy_s))


_NO_RATINGS = "The device's model rates no texts: device.model has to be a rerank model, such as bge-reranker-v2-m3."
_NO_VECTORS = "The device's model makes no vectors, it rates texts: ask /v1/rerank, or set another device.model."


def _require_dimensions(wanted: int | None, least: int | None, size: int) -> None:
    """Refuse vectors of more numbers than `size`, or of fewer than the model was trained for. Raises DimensionsError.

    All of its numbers can be asked for of any model: nothing is cut then.
    """
    if wanted is None or wanted == size:
        return
    if wanted > size:
        raise DimensionsError(f"This model's embeddings have {size} dimensions: 'dimensions' can be at most that.")
    if least is None:
        able = "was not trained for vectors that can be cut (Matryoshka)"
        raise DimensionsError(f"This model {able}: leave out 'dimensions', or ask for {size}.")
    if wanted < least:
        raise DimensionsError(
            f"This model was trained for vectors of {least} dimensions and more: 'dimensions' can be no less."
        )


def _unit(vector: Vector | float, asked: wire.Embed) -> bytes:
    """Return a vector's direction, of as many of its numbers as are asked for."""
    found = np.asarray(vector)
    if asked.dimensions is not None and asked.dimensions < found.size:
        found = (found - found.mean() if asked.centred else found)[: asked.dimensions]
    return _floats(found / (float(np.linalg.norm(found)) or 1.0))


def _floats(vector: Vector) -> bytes:
    """Return numbers as little-endian float32."""
    return bytes(vector.astype("<f4").tobytes())
