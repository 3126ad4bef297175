"""llama.cpp's grammar sampler for one answer, which is asked about few tokens, and what it may cost.

A mask over a whole vocabulary takes ten milliseconds: each token's text is decoded and walked. But only the largest
logits can be drawn. So tokens are asked about in the order of their logits, in growing parts, until what is allowed
among them settles the draw: it is the one that a mask over all would have given. Where that takes many, the grammar is
asked about each first character before.

A grammar whose readings may multiply is tried with all tokens each time, which takes long while its readings are still
few: so the meter ends it in time. One token alone would show nothing until C code takes minutes for the next one.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from .ambiguity import readings
from .grammar import AMBIGUOUS
from .hidden import FloatRows
from .refusals import FormatError

# What a grammar may cost: processor time, s. llama.cpp may have to try the whole vocabulary, so the bounds are for one
# of USUAL_VOCABULARY tokens, and grow with it. A string takes 0.0002 s a token, and up to 0.03 where all are tried. A
# token of an enum of 1,000 words that begin alike may take 2 s, but that is the end of it: long lists have more, unless
# the grammar is of those whose readings multiply, of which each token takes a few times what the last one did.
MAX_TOKEN_S = 0.25  # for one token; the next one would take a few times that, and the other answers wait for it
MAX_GRAMMAR_S = 3.0  # for all tokens so far,
MAX_MEAN_S = 0.05  # and for each one more: what takes longer slows the others down to a fifth
MAX_LIST_S = 4.0  # for one token, whatever the list and the vocabulary; well below hang.HANG_S
USUAL_VOCABULARY = 50_000  # tokens
WORDS = 50  # of one list, for which a token may take MAX_TOKEN_S more; for five times as many, the whole as much again
CALM = 64  # readings: beyond it they multiply
WIDTHS = (0.0, 3.0, 6.0, 9.0, 12.0, math.inf)  # below the largest logit: where each part of what is tried ends
SLOW_S = 0.001  # processor time to follow a token, s, beyond which readings multiply; usual ones take 0.00005
FEW = 3.0  # what lies deeper may be too many tokens to be tried without a look at their first characters
ROUNDED = 1e-3  # a logit may be off by that against llama.cpp's own sums
SUMMED = 1e-4  # of a sum: llama.cpp adds up in 32 bits, and over all that is allowed

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
Tokens = NDArray[np.integer[Any]]


class GrammarMeter:
    """The cost so far of the grammar of one answer."""

    def __init__(self, n_vocab: int, grammar: str, kind: type[FormatError] = FormatError) -> None:
        self._kind = kind
        n_words = max(line.count("|") for line in grammar.split("\n"))
        if n_words >= WORDS and readings(grammar) > CALM:
            n_words = 0
        scale = max(1.0, n_vocab / USUAL_VOCABULARY)
        self._token_s = min(MAX_LIST_S, MAX_TOKEN_S * scale * (1 + n_words / WORDS))
        self._scale = scale * (1 + n_words / (5 * WORDS))
        self._total_s, self._n = 0.0, 0
        self._is_stuck = False
        self.over = False  # whether an answer's grammar has cost too much

    def add(self, token_s: float, *, is_drawn: bool = True) -> None:
        """Add the time that drawing a token took, or to go on behind one: those come at once, and earn no time."""
        self._total_s += token_s
        self._n += is_drawn
        most_s = MAX_GRAMMAR_S + self._n * MAX_MEAN_S
        self.over = self.over or token_s > self._token_s or self._total_s > most_s * self._scale

    def stop(self) -> None:
        """End the answer: no token may follow."""
        self.over = self._is_stuck = True

    def error(self) -> FormatError:
        """Return the error for the client."""
        if self._is_stuck:
            return self._kind(f"No token of the model goes on as {self._kind.whose} demands.")
        return self._kind(f"Obeying {self._kind.whose} takes too long. {AMBIGUOUS}")


@dataclass(frozen=True, slots=True)
class Cuts:
    """What of all tokens may be drawn by chance, in the chain's order; 0, 1 and 0 cut nothing off."""

    top_k: int
    top_p: float
    min_p: float

    def are_settled(self, allowed: FloatRows, floor: float, others: FloatRows) -> bool:
        """Whether what they leave is known by the `allowed` logits, of those from `floor` on; others may be allowed."""
        best = np.sort(allowed)[::-1].astype(np.float64)
        if not len(best):
            return False
        if is_whole := 0 < self.top_k <= len(best):
            best = best[: self.top_k]
        least = best[0] + math.log(self.min_p) if self.min_p else -math.inf
        n_left = np.count_nonzero(best >= least) if is_whole or floor + ROUNDED <= least else math.inf
        if self.top_p >= 1 or is_whole:
            return bool(n_left < math.inf)
        with np.errstate(all="ignore"):  # of a broken model nothing is settled
            shares = np.exp(best - best[0]).cumsum()
            most = shares[-1] + np.exp(others - np.float32(best[0])).sum(dtype=np.float64)
        edges = self.top_p * np.array([shares[-1] * (1 - SUMMED), most * (1 + SUMMED)])
        n_fewest, n_most = np.searchsorted(shares, edges) + 1
        return bool(min(n_fewest, n_left) == min(n_most, n_left))


class GrammarSampler:
    """A grammar that follows an answer; freed with `close`."""

    def __init__(
        self, vocab: Any, grammar: str, n_vocab: int, kind: type[FormatError], initials: Tokens | None = None
    ) -> None:
        """`initials` are those of `Vocabulary`. Raises FormatError for a grammar that llama.cpp does not understand."""
        self._handle = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        if not self._handle:
            raise kind(f"llama.cpp does not understand the grammar of {kind.whose}.")
        self.meter = GrammarMeter(n_vocab, grammar, kind)
        self._multiplies = readings(grammar) > CALM
        self._is_slow = False
        self._initials = np.full(n_vocab, -1) if initials is None else initials
        self._firsts = np.flatnonzero(self._initials == np.arange(n_vocab))  # each begins with itself

    def close(self) -> None:
        """Free it; idempotent."""
        if self._handle is not None:
            llama_cpp.llama_sampler_free(self._handle)
            self._handle = None

    def allowed(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Tell of each token whether it may come next."""
        rows = np.zeros(len(tokens), CANDIDATE)
        rows["id"] = tokens
        llama_cpp.llama_sampler_apply(self._handle, ctypes.byref(candidates(rows)))
        found: NDArray[np.bool_] = rows["logit"] > -math.inf
        return found

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self.allowed(np.array([token]))[0])

    def accept(self, token: int) -> None:
        """Go on behind a token that may come next: at another one llama.cpp ends the process."""
        began = time.thread_time()
        llama_cpp.llama_sampler_accept(self._handle, token)
        self._is_slow = time.thread_time() - began > SLOW_S

    def first(self, tokens: Tokens, scores: FloatRows) -> Tokens:
        """Return the place of the token that may come next and has the largest score; nothing if none may."""
        found = self._search(tokens, scores, WIDTHS, lambda places, *_: len(places) > 0)
        return found[scores[found].argmax()][None] if len(found) else found

    def those_left(self, tokens: Tokens, logits: FloatRows, cuts: Cuts | None) -> Tokens:
        """Return places of tokens that may come next: all that cuts may leave; without cuts all."""
        if cuts is None:
            places = np.flatnonzero(self._may_come(tokens))
            return places[self.allowed(tokens[places])]

        def is_settled(places: Tokens, floor: float, others: NDArray[np.bool_]) -> bool:
            return cuts.are_settled(logits[places], floor, logits[others])

        return self._search(tokens, logits, WIDTHS[1:], is_settled)

    def _search(
        self,
        tokens: Tokens,
        scores: FloatRows,
        widths: tuple[float, ...],
        is_settled: Callable[[Tokens, float, NDArray[np.bool_]], bool],
    ) -> Tokens:
        """Return places of allowed tokens in their order, all down to the score where they settle the draw."""
        if self._multiplies or self._is_slow:
            return np.flatnonzero(self.allowed(tokens))
        largest, untried = scores.max(), np.ones(len(tokens), bool)
        found: Tokens = np.empty(0, np.int64)
        before = 0.0
        for width in widths:
            if width > FEW >= before:
                untried &= self._may_come(tokens)
            before, floor = width, float(largest - np.float32(width))
            lower = scores < floor  # never, if it is no number: then all are tried at once
            part = np.flatnonzero(untried & ~lower)
            untried &= lower
            found = np.sort(np.concatenate([found, part[self.allowed(tokens[part])]]))
            if not untried.any() or is_settled(found, floor, untried):
                break
        return found

    def _may_come(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Tell of each token whether its first character may come next; of what begins otherwise nothing is known."""
        may = np.ones(len(self._initials) + 1, bool)
        may[self._firsts] = self.allowed(self._firsts)
        found: NDArray[np.bool_] = may[self._initials[tokens]]  # the last one is for -1
        return found


def candidates(rows: NDArray[Any]) -> Any:
    """Return llama.cpp's array of candidates over `rows` of CANDIDATE, which it writes to and must outlive it."""
    first = rows.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    return llama_cpp.llama_token_data_array(first, len(rows), -1, False)
