"""A model's own layer that guesses the next token but one (MTP, `nextn` tensors), as a draft model.

Its entry for a text's position p takes the token there and the model's hidden row of p - 1, and guesses the token at
p + 1. So each decode leaves rows here, which the layer reads some at a time. Where a row is missing, since a text was
taken over from a cache, the entry has zeros in its place: the guess is worse then, and the answer is the same.

llama.cpp has the functions for that in C++ alone (src/llama-ext.h, "a staging header"): they are found by the names
that compilers make of them, types included. A library without them guesses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from typing import Any

import llama_cpp
import numpy as np

from .drafter import Drafter
from .hidden import FloatRows
from .memory import work_bytes
from .rows import ABORTED, NO_KV_SLOT, Row, Rows

_staged: Any = None
with suppress(ImportError, AttributeError):
    _staged = import_module("llama_cpp.llama_cpp_ext")

N_TEXTS = 8  # texts that it knows: those of as many answers as are guessed for, and chats before them
N_ROWS = 128  # read at once, at most; as many wait for each text
N_AT_ONCE = 64  # rows that a text gets at once
N_KEPT = 32  # rows that wait in any case: so many guesses of an iteration may be wrong, and are cut
MTP_CONTEXT = 1  # as in llama.h, `enum llama_context_type`


def is_there() -> bool:
    """Whether llama.cpp's library has the functions."""
    return _staged is not None


def layer_bytes(n_vocab: int, n_embd: int) -> int:
    """Estimate the memory that the layer takes beside its weights and cells, bytes."""
    return work_bytes(N_ROWS, n_vocab, n_embd) + 4 * N_TEXTS * (N_ROWS + 1) * n_embd


class _Text:
    """The tokens of one sequence from position `start` on, and the rows that are not read yet.

    The layer has cells for the positions from `start` up to `n_read` (exclusive), as sequence `seq`. The first `n_rows`
    of `rows` are for the entries from `n_read` up to the one behind the last token, whose token is not known yet.
    """

    def __init__(self, seq: int, start: int, n_embd: int) -> None:
        self.seq, self.start, self.n_read = seq, start, start
        self.tokens: list[int] = []
        self.rows = np.zeros((N_ROWS + 1, n_embd), np.float32)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def n_waiting(self) -> int:
        """How many of its tokens are not read yet."""
        return self.end - self.n_read

    def cut(self, n: int) -> None:
        """Forget the tokens from position `n` on, `start` at least."""
        del self.tokens[n - self.start :]
        if n < self.n_read:  # the row before is gone
            self.n_read = n
            self.rows[0] = 0.0

    def add(self, tokens: Sequence[int], hidden: FloatRows) -> None:
        """Add tokens, and their rows; there has to be room for these."""
        first = self.n_waiting + 1
        self.rows[first : first + len(tokens)] = hidden
        self.tokens += tokens

    def mark_read(self, n: int) -> None:
        """Note that the layer has read `n` entries more."""
        kept = self.n_waiting + 1 - n
        self.rows[:kept] = self.rows[n : n + kept].copy()
        self.n_read += n


class OwnLayer(Drafter):
    """The layer's context, which guesses for texts that the model computes: it knows them by their tokens.

    State: the texts by the model's sequences, the one used longest ago first. `token_s` is what a token takes, s.
    """

    def __init__(self, model: Any, trunk: Any, params: Any, n_cells: int) -> None:
        """Open it beside the context `trunk`, whose rows it takes from then on; `params` are as that one's.

        Raises MemoryError if there is none left, or it cannot compute a token: then the trunk is as it was.
        """
        params.ctx_type, params.n_ctx, params.n_seq_max = MTP_CONTEXT, n_cells, N_TEXTS
        params.n_batch = params.n_ubatch = N_ROWS
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise MemoryError("llama.cpp cannot make a context for the layer that guesses")
        self._n_embd = int(llama_cpp.llama_model_n_embd(model))
        n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        super().__init__(context, Rows(N_ROWS, self._n_embd, with_tokens=True), n_vocab, n_vocab)
        self._trunk = trunk
        for one in (trunk, context):  # all rows: of those with logits alone the layer's graph would show the first ones
            _staged.llama_set_embeddings_nextn(one, True, False)
        self._texts: dict[int, _Text] = {}
        self._free = list(range(N_TEXTS))
        try:
            self.token_s = self._warm_up()
        except BaseException:  # whatever it was, the context would be left for good
            self.close()
            raise

    def close(self) -> None:
        """Free the context, which has to be before the model and the trunk are."""
        _staged.llama_set_embeddings_nextn(self._trunk, False, False)
        llama_cpp.llama_free(self._ctx)

    def _warm_up(self) -> float:
        took_s = 0.0
        for position in range(2):
            began = time.perf_counter()
            if (rc := self._decode([0], position, 0, self.zeros(1))) not in (0, ABORTED):
                raise MemoryError(f"llama.cpp cannot compute a token with the layer that guesses (it returned {rc})")
            took_s = time.perf_counter() - began
        llama_cpp.llama_memory_clear(self._memory, False)
        return took_s

    def zeros(self, n: int) -> FloatRows:
        """Return rows that say nothing."""
        return np.zeros((n, self._n_embd), np.float32)

    # --- what becomes of the model's sequences -------------------------------------------------------------------

    def follow(self, rows: Sequence[Row]) -> None:
        """Take the model's rows of a batch that it has just computed."""
        pieces = [list(piece) for _, piece in groupby(enumerate(rows), lambda at: (at[1][2], at[1][1] - at[0]))]
        if len({piece[0][1][2] for piece in pieces}) > N_TEXTS:
            self.clear()  # nobody guesses for so many answers
            return
        shown = _staged.llama_get_embeddings_nextn(self._trunk)
        hidden = np.ctypeslib.as_array(shown, (len(rows), self._n_embd))
        for piece in pieces:
            first, (_, position, seq, _) = piece[0]
            tokens = [row[0] for _, row in piece]
            for at in range(0, len(tokens), N_AT_ONCE):
                some = tokens[at : at + N_AT_ONCE]
                self._add(seq, position + at, some, hidden[first + at : first + at + len(some)])

    def _add(self, seq: int, position: int, tokens: list[int], hidden: FloatRows) -> None:
        """Add tokens at a position to the text of the model's sequence `seq`."""
        text = self._texts.pop(seq, None)
        if text is not None and not text.start <= position <= text.end:
            self._drop(text)
            text = None
        if text is None:
            text = self._begin(position)
        self._texts[seq] = text
        text.cut(position)
        if text.n_waiting + len(tokens) >= N_ROWS:
            n = text.n_waiting - N_KEPT
            at = text.n_read - text.start
            if self._read(seq, text.tokens[at : at + n]):
                text.mark_read(n)
            else:
                self._drop(self._texts.pop(seq))
                return
        text.add(tokens, hidden)

    def _begin(self, start: int) -> _Text:
        if not self._free:
            self._drop(self._texts.pop(next(iter(self._texts))))
        return _Text(self._free.pop(), start, self._n_embd)

    def forget(self, seq: int) -> None:
        """Forget the text of the model's sequence."""
        if (text := self._texts.pop(seq, None)) is not None:
            self._drop(text)

    def clear(self) -> None:
        """Forget all texts."""
        for seq in list(self._texts):
            self.forget(seq)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let the model's sequence `seq`, which has nothing, have the first `n` tokens of another's text."""
        known = self._texts.get(source)
        if known is None or not known.start < n <= known.end:
            return
        self._texts[source] = self._texts.pop(source)  # so that it is not the one that gives way
        text = self._begin(known.start)
        text.tokens, text.n_read = known.tokens[: n - known.start], min(n, known.n_read)
        if n >= known.n_read:
            text.rows[: n - known.n_read + 1] = known.rows[: n - known.n_read + 1]
        llama_cpp.llama_memory_seq_cp(self._memory, known.seq, text.seq, known.start, text.n_read)
        self._texts[seq] = text

    def _drop(self, text: _Text) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, text.seq, -1, -1)
        self._free.append(text.seq)

    # --- guessing ------------------------------------------------------------------------------------------------

    def draft(self, key: str, tokens: Sequence[int], n: int) -> list[int]:
        """Guess at most `n` tokens after the text `tokens`, as long as it is sure of them; none for an unknown text."""
        del key  # a sequence of the model that has these tokens has their rows, whoever's answer it is
        n_known = len(tokens) - 1  # the last one is not computed yet
        seq = next((seq for seq, text in self._texts.items() if _begins(text, tokens[:n_known])), None)
        if seq is None:
            return []
        text = self._texts[seq] = self._texts.pop(seq)
        text.cut(n_known)
        new = list(tokens[text.n_read :])
        if not self._read(seq, new):
            self.forget(seq)
            return []
        text.mark_read(len(new) - 1)  # the last entry is read once more: its token may turn out to be another one
        return self._guess(text, n, len(new))

    def _guess(self, text: _Text, n: int, n_rows: int) -> list[int]:
        """Guess at most `n` tokens behind a batch of so many rows."""
        guess: list[int] = []
        while (token := self._surest()) >= 0:
            guess.append(token)
            if len(guess) == n:
                break
            began = time.perf_counter()
            shown = _staged.llama_get_embeddings_nextn_ith(self._ctx, n_rows - 1)
            hidden, n_rows = np.ctypeslib.as_array(shown, (1, self._n_embd)), 1
            if self._decode([token], text.end + len(guess), text.seq, hidden) != 0:
                break
            self.learn(time.perf_counter() - began)
        return guess

    def _read(self, seq: int, tokens: list[int]) -> bool:
        """Let the layer read on; return False if that was aborted, or there is no room, or guesses cannot be cut."""
        text = self._texts[seq]
        for _ in range(2):
            if not llama_cpp.llama_memory_seq_rm(self._memory, text.seq, text.n_read, -1):  # guesses
                return False
            rc = self._decode(tokens, text.n_read, text.seq, text.rows[: len(tokens)])
            if rc != NO_KV_SLOT:
                break
            for other in [other for other in self._texts if other != seq]:
                self.forget(other)
        return rc == 0


def _begins(text: _Text, tokens: Sequence[int]) -> bool:
    """Whether the tokens, from the text's start on, are those that it begins with."""
    n = len(tokens) - text.start
    return 0 < n <= len(text.tokens) and text.tokens[:n] == list(tokens[text.start :])
