"""Sampling: a llama.cpp sampler chain for each answer."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence
from typing import Any

import llama_cpp

from ..wire import Generate
from .grammar import AMBIGUOUS
from .readings import readings
from .refusals import FormatError

DEFAULT_TEMPERATURE = 0.8  # this and the next as in llama.cpp: small models ramble at OpenAI's 1.0
DEFAULT_MIN_P = 0.05  # as in llama.cpp
PENALTY_WINDOW = 1024  # tokens the frequency and presence penalties look back on
# What a grammar may cost: processor time, s. llama.cpp tries the whole vocabulary, so the bounds are for one of
# USUAL_VOCABULARY tokens, and grow with it. A string takes 0.005 to 0.03 s a token, by what else the machine does. A
# token of an enum of 1,000 words that begin alike takes 2 s, but that is the end of it: long lists have more, unless
# the grammar is of those whose readings multiply, of which each token takes a few times what the last one did.
MAX_TOKEN_S = 0.25  # for one token; the next one would take a few times that, and the other answers wait for it
MAX_GRAMMAR_S = 3.0  # for all tokens so far,
MAX_MEAN_S = 0.05  # and for each one more: what takes longer slows the others down to a fifth
MAX_LIST_S = 4.0  # for one token, whatever the list and the vocabulary; well below hang.HANG_S
USUAL_VOCABULARY = 50_000  # tokens
WORDS = 50  # of one list, for which a token may take MAX_TOKEN_S more; for five times as many, the whole as much again
CALM = 64  # readings: beyond it they multiply


class GrammarMeter:
    """The cost so far of the grammar of one answer."""

    def __init__(self, n_vocab: int, grammar: str) -> None:
        n_words = max(line.count("|") for line in grammar.split("\n"))
        if n_words >= WORDS and readings(grammar) > CALM:
            n_words = 0
        scale = max(1.0, n_vocab / USUAL_VOCABULARY)
        self._token_s = min(MAX_LIST_S, MAX_TOKEN_S * scale * (1 + n_words / WORDS))
        self._scale = scale * (1 + n_words / (5 * WORDS))
        self._total_s, self._n = 0.0, 0
        self.over = False  # whether an answer's grammar has cost too much

    def add(self, token_s: float) -> None:
        """Add the time that drawing a token took."""
        self._total_s += token_s
        self._n += 1
        most_s = MAX_GRAMMAR_S + self._n * MAX_MEAN_S
        self.over = self.over or token_s > self._token_s or self._total_s > most_s * self._scale

    def error(self) -> FormatError:
        """Return the error for the client."""
        return FormatError(f"Obeying the response format takes too long. {AMBIGUOUS}")


class Sampler:
    """A llama.cpp sampler chain for one answer; freed with `close`.

    It continues where an answer stands: the penalties know the tokens in `answer`, and with a seed the draw of the n-th
    token depends on the seed and n alone, so a continued answer draws what the unbroken one would have drawn.
    """

    def __init__(
        self, request: Generate, n_vocab: int, answer: Sequence[int] = (), *, vocab: Any = None, grammar: str = ""
    ) -> None:
        """Raises FormatError for a grammar that llama.cpp does not understand."""
        self._seed: int | None = None
        self._n_drawn = 0
        self._constraint: Any = None
        self.meter = GrammarMeter(n_vocab, grammar) if grammar else None
        self.greedy = False  # the largest logit, and nothing else
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if grammar:
            constraint = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            if not constraint:
                llama_cpp.llama_sampler_free(chain)
                raise FormatError("llama.cpp does not understand the grammar of the response format.")
            llama_cpp.llama_sampler_chain_add(chain, constraint)
            self._constraint = constraint
        frequency, presence = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
        if frequency or presence:
            penalties = llama_cpp.llama_sampler_init_penalties(n_vocab, PENALTY_WINDOW, 1.0, frequency, presence)
            llama_cpp.llama_sampler_chain_add(chain, penalties)
        temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
        if temperature <= 0:
            self.greedy = not (frequency or presence or grammar)
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        else:
            if request.top_p is None:
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_min_p(DEFAULT_MIN_P, 1))
            elif request.top_p < 1:
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(request.top_p, 1))
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
            self._seed = request.seed
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(llama_cpp.LLAMA_DEFAULT_SEED))
        self.chain = chain
        self._remembers = bool(frequency or presence or grammar)
        try:
            self.follow(answer)
        except FormatError:
            self.close()
            raise

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were drawn elsewhere. Raises FormatError for one that the grammar does not allow."""
        self._n_drawn += len(tokens)
        if not self._remembers:
            return
        for token in tokens:
            if self._constraint is not None and not self._allows(token):  # llama.cpp would end the process
                raise FormatError("The answer so far does not hold to the response format.")
            llama_cpp.llama_sampler_accept(self.chain, token)

    def _allows(self, token: int) -> bool:
        """Whether the grammar allows a token next."""
        data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
        one = llama_cpp.llama_token_data_array(data, 1, -1, False)
        llama_cpp.llama_sampler_apply(self._constraint, ctypes.byref(one))
        return bool(data[0].logit > -math.inf)

    def seed(self) -> None:
        """Make the next draw a function of the seed and of the token's number; without a seed, of chance."""
        if self._seed is not None:
            last = llama_cpp.llama_sampler_chain_n(self.chain) - 1
            llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self.chain, last))
            mixed = zlib.crc32(f"{self._seed} {self._n_drawn}".encode()) & 0x7FFFFFFF  # never LLAMA_DEFAULT_SEED
            llama_cpp.llama_sampler_chain_add(self.chain, llama_cpp.llama_sampler_init_dist(mixed))
        self._n_drawn += 1

    def close(self) -> None:
        """Free the chain; idempotent."""
        if self.chain is not None:
            llama_cpp.llama_sampler_free(self.chain)
            self.chain = None
