"""How the next token is drawn: a llama.cpp sampler chain for each answer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import llama_cpp

from .refusals import FormatError
from .wire import Generate

DEFAULT_TEMPERATURE = 0.8  # this and the next as in llama.cpp: small models ramble at OpenAI's 1.0
DEFAULT_MIN_P = 0.05
PENALTY_WINDOW = 1024  # tokens the frequency and presence penalties look back on


class Sampler:
    """A llama.cpp sampler chain for one answer; freed with `close`.

    It goes on where an answer stands: the penalties know the tokens in `answer`, and with a seed the draw of the n-th
    token depends on the seed and n alone, so a continued answer draws what the unbroken one would have drawn.
    """

    def __init__(
        self, request: Generate, n_vocab: int, answer: Sequence[int] = (), *, vocab: Any = None, grammar: str = ""
    ) -> None:
        """Raises FormatError for a grammar that llama.cpp does not understand."""
        self._seed: int | None = None
        self._n_drawn = len(answer)
        self.greedy = False  # the largest logit, and nothing else
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if grammar:
            constraint = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            if not constraint:
                llama_cpp.llama_sampler_free(chain)
                raise FormatError("llama.cpp does not understand the grammar of the response format.")
            llama_cpp.llama_sampler_chain_add(chain, constraint)
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
        if frequency or presence:
            for token in answer[-PENALTY_WINDOW:]:
                llama_cpp.llama_sampler_accept(chain, token)

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
