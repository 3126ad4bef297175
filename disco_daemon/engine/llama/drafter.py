"""What all that guess tokens by a context of their own have in common."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np

from .hidden import FloatRows
from .rows import Rows

LEAST_SURE = 0.75  # of a token: a guess ends before one that it would be less sure of; as in llama.cpp
NEWEST = 0.2  # weight of the newest measurement
MOST_OFF = 4.0  # a measurement is at most this many times what was known: another process had the processor


class Drafter:
    """A context that guesses the next tokens of texts, of which a model with `n_known` tokens is sure."""

    def __init__(self, context: Any, rows: Rows, n_vocab: int, n_known: int) -> None:
        self._ctx, self._memory = context, llama_cpp.llama_get_memory(context)
        self._rows, self._n_vocab, self._n_known = rows, n_vocab, n_known
        self.token_s = 0.0  # what a token takes

    def learn(self, took_s: float) -> None:
        """Learn from a token that took so long, s."""
        self.token_s += NEWEST * (min(took_s, MOST_OFF * self.token_s) - self.token_s)

    def _surest(self) -> int:
        """Return the likeliest next token; -1 if it is not sure, or the token is none of the large model's."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._ctx, -1), (self._n_vocab,))
        token = int(logits.argmax())
        sure = np.exp(logits - logits[token]).sum() * LEAST_SURE <= 1.0
        return token if sure and token < self._n_known else -1

    def _decode(self, tokens: list[int], start: int, seq: int, hidden: FloatRows | None = None) -> int:
        """Decode tokens, with logits of the last one; return llama_decode's return value."""
        last = start + len(tokens) - 1
        rows = [(token, i, seq, i == last) for i, token in enumerate(tokens, start)]
        rc = llama_cpp.llama_decode(self._ctx, self._rows.fill(rows, hidden))
        if rc == 0:
            llama_cpp.llama_synchronize(self._ctx)
        return int(rc)
