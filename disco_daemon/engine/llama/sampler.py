"""Sampling: a llama.cpp sampler chain for each answer."""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from ..wire import Generate
from .calls import OpeningMark
from .grammar_sampler import CANDIDATE, Cuts, GrammarMeter, GrammarSampler, Tokens, candidates
from .hidden import FloatRows
from .refusals import FormatError, ToolsError
from .thinking import ThoughtBudget

DEFAULT_TEMPERATURE = 0.8  # this and the next as in llama.cpp: small models ramble at OpenAI's 1.0
DEFAULT_MIN_P = 0.05  # as in llama.cpp
PENALTY_WINDOW = 1024  # tokens the frequency and presence penalties look back on
BANNED = -1e6  # added to a logit; finite, since nothing could be drawn if all were infinite
POSSIBLE = 1e-30  # of the likeliest token's share: llama.cpp's typical sampling and mirostat divide by that of each
MIROSTAT_M = 100  # tokens by which mirostat 1 estimates, as in llama.cpp


class Sampler:
    """A llama.cpp sampler chain for one answer; freed with `close`.

    It continues where an answer stands: the penalties know the tokens in `answer`, those of repetitions the `prompt`'s
    too, and with a seed the draw of the n-th token depends on the seed and n alone, so a continued answer draws what
    the unbroken one would have drawn. Not with mirostat, which goes by all that it drew. `ends` are the tokens that end
    a text; `window` is as many tokens as a text may have. With `mark` the grammar holds from that mark on. With a
    `budget` a thought that is too long is closed. `initials` are the vocabulary's, for the grammar.
    """

    def __init__(
        self,
        request: Generate,
        n_vocab: int,
        answer: Sequence[int] = (),
        *,
        vocab: Any = None,
        grammar: str = "",
        prompt: Sequence[int] = (),
        ends: Sequence[int] = (),
        window: int = PENALTY_WINDOW,
        mark: OpeningMark | None = None,
        budget: ThoughtBudget | None = None,
        initials: Tokens | None = None,
    ) -> None:
        """Raises FormatError for a grammar that llama.cpp does not understand."""
        self._draws, self._n_vocab, self._window = request.drawing, n_vocab, window
        self._temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
        self._seed: int | None = None
        self._n_drawn = self._n_tail = 0
        self._constraint: GrammarSampler | None = None
        self._keeps_on = False  # whether the first sampler bans what ends the text, until it has `min_tokens`
        self._kind = ToolsError if request.tools is not None else FormatError
        self._vocab, self._grammar, self.mark, self._budget = vocab, grammar, mark, budget
        self._initials = initials
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if grammar and mark is None:
            try:
                self._constraint = self._new_constraint()
            except FormatError:
                self.close()
                raise
        self._add_biases(ends)
        frequency, presence = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
        if frequency or presence:
            last_n = self._n_last(self._draws.repeat_last_n, PENALTY_WINDOW)
            self._add(llama_cpp.llama_sampler_init_penalties(n_vocab, last_n, 1.0, frequency, presence))
        self._add_repetition(vocab, [token for token in prompt[-window:] if 0 <= token < n_vocab])
        self._n_adding = llama_cpp.llama_sampler_chain_n(self.chain)  # samplers that add to logits, and cut none off
        self._remembers = bool(frequency or presence or grammar or self._draws.repeats)
        self._seed = None if request.seed is None else request.seed
        self._cuts: Cuts | None = None  # if they alone decide what is left for chance
        if self._temperature > 0 and self._draws.mirostat:
            self._add_mirostat()
        else:
            self._add_truncation(request.top_p)
            self._add_tail()
        n_others = llama_cpp.llama_sampler_chain_n(self.chain) - self._n_adding
        self._takes_largest = self._temperature <= 0 and n_others == 1
        self._takes_any = self._temperature > 0 and n_others == 2  # by chance alone: temperature, and the draw
        try:
            self.follow(answer)
        except FormatError:
            self.close()
            raise

    # --- the chain, in llama.cpp's order -------------------------------------------------------------------------

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self.chain, sampler)

    def _new_constraint(self) -> GrammarSampler:
        """Make a sampler of the grammar. Raises FormatError."""
        return GrammarSampler(self._vocab, self._grammar, self._n_vocab, self._kind, self._initials)

    def _drop_constraint(self) -> None:
        if self._constraint is not None:
            self._constraint.close()
            self._constraint = None

    @property
    def meter(self) -> GrammarMeter | None:
        """What the grammar has cost so far; None while none holds."""
        return None if self._constraint is None else self._constraint.meter

    @property
    def greedy(self) -> bool:
        """Whether it is the largest logit, and nothing else."""
        return self._takes_largest and not self._n_adding and self._constraint is None

    def _n_last(self, wanted: int | None, usual: int) -> int:
        """Return how many tokens a penalty looks back on."""
        n = usual if wanted is None else self._window if wanted < 0 else wanted
        return min(n, max(self._window, PENALTY_WINDOW))

    def _add_biases(self, ends: Sequence[int]) -> None:
        """Ban what would end the text too early, and add the client's biases."""
        draws = self._draws
        if draws.min_tokens:
            self._add(self._bias(dict.fromkeys([*ends, *draws.stop_token_ids], BANNED)))
            self._keeps_on = True
        biases = dict(draws.logit_bias) | (dict.fromkeys(ends, BANNED) if draws.ignore_eos else {})
        if biases:
            self._add(self._bias(biases))

    def _bias(self, biases: dict[int, float]) -> Any:
        there = [(token, bias) for token, bias in biases.items() if 0 <= token < self._n_vocab]
        rows = (llama_cpp.llama_logit_bias * max(1, len(there)))(*there)
        return llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(there), rows)

    def _add_repetition(self, vocab: Any, prompt: Sequence[int]) -> None:
        """Add the penalties for repeating what the prompt and the answer have."""
        draws, added = self._draws, []
        if draws.penalizes:
            last_n = self._n_last(draws.repeat_last_n, self._window)
            added.append(llama_cpp.llama_sampler_init_penalties(self._n_vocab, last_n, draws.repeat_penalty, 0.0, 0.0))
        if draws.dry_multiplier and draws.dry_penalty_last_n:
            breakers = [text.encode("utf-8", "replace") for text in draws.dry_sequence_breakers]
            texts = (ctypes.c_char_p * max(1, len(breakers)))(*breakers)
            last_n = self._n_last(draws.dry_penalty_last_n, self._window)
            added.append(
                llama_cpp.llama_sampler_init_dry(
                    vocab, draws.dry_multiplier, draws.dry_base, draws.dry_allowed_length, last_n, texts, len(breakers)
                )
            )
        for sampler in added:
            for token in prompt:
                llama_cpp.llama_sampler_accept(sampler, token)
            self._add(sampler)

    def _add_truncation(self, top_p: float | None) -> None:
        """Cut off what is unlikely; of these samplers only the typical one may cut off the likeliest token."""
        draws, drawn = self._draws, self._temperature > 0
        if drawn and draws.top_k is not None and draws.top_k > 0:
            self._add(llama_cpp.llama_sampler_init_top_k(draws.top_k))
        if draws.typical_p is not None and draws.typical_p < 1:
            self._add(llama_cpp.llama_sampler_init_min_p(POSSIBLE, 1))
            self._add(llama_cpp.llama_sampler_init_typical(draws.typical_p, 1))
        if not drawn:
            return
        if top_p is not None and top_p < 1:
            self._add(llama_cpp.llama_sampler_init_top_p(top_p, 1))
        min_p = (DEFAULT_MIN_P if top_p is None else 0.0) if draws.min_p is None else draws.min_p
        if min_p > 0:
            self._add(llama_cpp.llama_sampler_init_min_p(min_p, 1))
        if draws.typical_p is None or draws.typical_p >= 1:
            self._cuts = Cuts(max(0, draws.top_k or 0), 1.0 if top_p is None else top_p, min_p)

    def _add_tail(self) -> None:
        """Add what draws by chance: the samplers that are made anew for each token where there is a seed."""
        draws, before = self._draws, llama_cpp.llama_sampler_chain_n(self.chain)
        if draws.xtc_probability > 0 and draws.xtc_threshold <= 0.5:  # above it llama.cpp's does nothing
            seed = self._mixed("xtc ")
            self._add(llama_cpp.llama_sampler_init_xtc(draws.xtc_probability, draws.xtc_threshold, 1, seed))
        if self._temperature <= 0:
            self._add(llama_cpp.llama_sampler_init_greedy())
        else:
            self._add(llama_cpp.llama_sampler_init_temp(self._temperature))
            self._add(llama_cpp.llama_sampler_init_dist(self._mixed("")))
        self._n_tail = llama_cpp.llama_sampler_chain_n(self.chain) - before

    def _add_mirostat(self) -> None:
        """Draw by mirostat, which has a state: its seed is for all tokens together."""
        draws, seed = self._draws, self._mixed("")
        self._add(llama_cpp.llama_sampler_init_min_p(POSSIBLE, 1))
        self._add(llama_cpp.llama_sampler_init_temp(self._temperature))
        tau, eta = draws.mirostat_tau, draws.mirostat_eta
        if draws.mirostat == 1:
            self._add(llama_cpp.llama_sampler_init_mirostat(self._n_vocab, seed, tau, eta, MIROSTAT_M))
        else:
            self._add(llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta))

    def _mixed(self, purpose: str) -> int:
        """Return a seed for the next draw, or llama.cpp's word for chance."""
        if self._seed is None:
            return int(llama_cpp.LLAMA_DEFAULT_SEED)
        return zlib.crc32(f"{purpose}{self._seed} {self._n_drawn}".encode()) & 0x7FFFFFFF  # never LLAMA_DEFAULT_SEED

    # --- drawing -------------------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were drawn elsewhere.

        Raises FormatError for one that the grammar does not allow, and where it takes too long to follow them.
        """
        self._n_drawn += len(tokens)
        for token in tokens if self._budget is not None else ():
            self.count(token)
        if not self._remembers:
            return
        for token in tokens:
            began = time.thread_time()
            if self._constraint is not None and not self._constraint.allows(token):
                # llama.cpp would end the process
                if self.mark is None:
                    raise self._kind(f"The answer so far does not hold to {self._kind.whose}.")
                self._drop_constraint()  # what began like a call is none
            self.accept(token)
            self.watch(token)
            if self.meter is not None:
                self.meter.add(time.thread_time() - began, is_drawn=False)
                if self.meter.over:
                    raise self.meter.error()

    def accept(self, token: int) -> None:
        """Go on behind a token that the grammar allows."""
        if self._constraint is not None:
            self._constraint.accept(token)
        llama_cpp.llama_sampler_accept(self.chain, token)

    def watch(self, token: int) -> None:
        """Look whether a call has begun by a token that was accepted: from here on the grammar holds.

        llama.cpp's own lazy grammar ends the process where the text behind a mark is none of the grammar's.
        """
        if self.mark is None or self._constraint is not None or not (text := self.mark.push(token)):
            return
        constraint = self._new_constraint()
        for begun in self.mark.tokens(text):
            if not constraint.allows(begun):
                constraint.close()
                return  # it is no call, and another one may begin
            constraint.accept(begun)
        self._constraint = constraint

    @property
    def forced(self) -> int | None:
        """The token that has to come next, None for any."""
        token = None if self._budget is None else self._budget.forced
        if token is not None and self._constraint is not None and not self._constraint.allows(token):
            self._budget = token = None  # the grammar has no room for a thought, and llama.cpp would end the process
        return token

    def count(self, token: int) -> None:
        """Count a token of the answer that may be part of a thought."""
        if self._budget is not None:
            self._budget.push(token)
            if self._budget.is_over:
                self._budget = None

    def begin_draw(self) -> None:
        """Make the next draw a function of the seed and of the token's number; without a seed, of chance."""
        if self._keeps_on and self._n_drawn >= self._draws.min_tokens:
            self._remove(0)
            self._n_adding -= 1
            self._keeps_on = False
        if self._seed is not None and self._n_tail:
            last = llama_cpp.llama_sampler_chain_n(self.chain) - 1
            for i in range(self._n_tail):
                self._remove(last - i)
            self._add_tail()
        self._n_drawn += 1

    def draw(self, logits: FloatRows, among: Sequence[int] = ()) -> int:
        """Draw the next token from a row's logits, [n_vocab]; if `among` has ids, one of those."""
        tokens = np.asarray(among, np.int32) if among else np.arange(len(logits), dtype=np.int32)
        token = self._draw(tokens, logits[tokens] if among else logits)
        if self.meter is None or not self.meter.over:
            self.accept(token)
        return token

    def _draw(self, tokens: Tokens, logits: FloatRows) -> int:
        n = llama_cpp.llama_sampler_chain_n(self.chain)
        if self._constraint is None:
            return self._apply(range(n), _rows(tokens, logits))
        added = logits
        if self._n_adding:
            self._apply(range(self._n_adding), rows := _rows(tokens, logits))
            added = rows["logit"]
        is_first = self._takes_largest or self._takes_any
        if is_first:
            left = self._constraint.first(tokens, added if self._takes_largest else self._by_chance(added))
        else:
            left = self._constraint.those_left(tokens, added, self._cuts)
        if not len(left):
            if self.mark is None:
                self._constraint.meter.stop()
                return int(tokens[0])
            self._drop_constraint()  # what began like a call is none
            return self._apply(range(n), _rows(tokens, logits))
        if is_first:
            return int(tokens[left[0]])
        return self._apply(range(self._n_adding, n), _rows(tokens[left], added[left]))

    def _by_chance(self, logits: FloatRows) -> FloatRows:
        """Return scores whose largest one is a draw from the softmax of logits, or of any part of them.

        Source: Maddison, Tarlow and Minka (2014), "A* Sampling", on the Gumbel-Max trick.
        """
        chance = np.random.default_rng(None if self._seed is None else self._mixed("noise "))
        noise = np.log(chance.standard_exponential(len(logits)))  # in 64 bits: 32 make each token likelier than 2^-24
        found: FloatRows = logits / self._temperature - noise
        return found

    def _apply(self, samplers: Iterable[int], rows: Any) -> int:
        """Apply samplers of the chain to candidates, in place; return the token that one of them has selected."""
        data = candidates(rows)
        for i in samplers:
            llama_cpp.llama_sampler_apply(llama_cpp.llama_sampler_chain_get(self.chain, i), ctypes.byref(data))
        return int(data.data[max(0, data.selected)].id)

    def _remove(self, index: int) -> None:
        llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self.chain, index))

    def close(self) -> None:
        """Free the chain and the grammar; idempotent."""
        self._drop_constraint()
        if self.chain is not None:
            llama_cpp.llama_sampler_free(self.chain)
            self.chain = None


def _rows(tokens: Tokens, logits: FloatRows) -> Any:
    """Return candidates for llama.cpp."""
    rows = np.zeros(len(tokens), CANDIDATE)
    rows["id"], rows["logit"] = tokens, logits
    return rows
