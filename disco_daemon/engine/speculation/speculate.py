"""Speculative decoding: several next tokens are guessed, one llama_decode computes them all, and the model judges.

A row for each guessed token goes behind the row of the last one. Then the rows are sampled in order, by the sampler
that would have drawn these tokens one by one, as long as the drawn token is the guessed one (Leviathan et al. 2023,
arXiv 2211.17192, with a guess that is certain of itself). So an answer is what it would have been, token for token if
it is greedy or has a seed, in distribution if not. Wrong guesses are cut from the KV cache.

Rows are not free, least of all on a CPU. So a guess is computed only if, by its chance to be right and by what rows
have cost so far, the iteration then yields more tokens per second, of all answers together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

from ...scheduler.latency import IterationLatency, IterationLoad
from ..kv.cells import Cells
from ..llama.model import Llama
from ..serve.sequence import Sequence
from .prompt_lookup import PromptLookup

SIZES = (3, 7, 15)  # guessed tokens in one iteration; with the last one these are whole blocks of llama.cpp's kernels
MAX_BESIDE = 4  # answers; with more of them rows are better spent on another answer
MAX_GUESSED = 32  # tokens in one iteration, of all answers
MARGIN = 1.1  # by which guesses have to be worth their cost: both are estimates
PLAIN_EVERY = 32  # iterations; one of them is without guesses, so that it is known how long that takes
ENOUGH_S = 1.0  # a reader with this much text in hand gains nothing by more
NEWEST = 0.2  # weight of the newest measurement of what rows cost
CHEAPEST, DEAREST = 0.02, 1.5  # a row beside others, in iterations of one answer; beyond it is another process' doing
RELAX, LIKELY = 0.9995, 0.8  # what rows cost, each time a likely guess was not worth it: it is tried again some time
KEEP, DOUBTS = 0.95, 10.0  # of what look-ups were worth, at each of them; tokens that their promise is taken for good
TRY_EVERY, TRY_CHANCE = 64, 0.9  # iterations; in one of them the draft model is thought to be better than it was


class Drafting(Protocol):
    """A small model that continues a text."""

    @property
    def token_s(self) -> float:
        """How long it takes for a token, s."""

    def draft(self, key: str, tokens: Tokens[int], n: int) -> list[int]:
        """Guess at most `n` tokens; none while it has not read the text of `key` yet."""


class Option(NamedTuple):
    """A guess of `size` tokens: `more` are n_expected to be right, it costs `cost_s`; `of_model`: the draft model's."""

    size: int
    more: float
    cost_s: float
    of_model: bool


class Speculator:
    """Decides which guesses to compute, and learns what they are worth.

    State: counters of tokens `n_drafted` and `n_accepted`; of the latest iteration the time that the draft model
    `took_s`, and the guesses; what the rows of a guess of each size cost, in units of an iteration of one answer, with
    the number of measurements; and how many tokens look-ups promised lately, and how many were right.
    """

    def __init__(
        self,
        llama: Llama,
        latency: IterationLatency,
        cells: Cells,
        model: Drafting | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.n_drafted = self.n_accepted = 0
        self.took_s = 0.0
        self.costs: dict[int, tuple[float, int]] = {}
        self._options: dict[Sequence, Option] = {}
        self._promised = self._kept = 0.0
        self._llama, self._latency, self._cells, self._model, self._clock = llama, latency, cells, model, clock

    # --- guessing ------------------------------------------------------------------------------------------------

    def drafts(self, decoding: Tokens[Sequence], n_iterations: int) -> dict[Sequence, list[int]]:
        """Return the guesses to compute behind the last tokens of these answers; mostly none."""
        found: dict[Sequence, list[int]] = {}
        self.took_s = 0.0
        self._options.clear()
        most = MAX_BESIDE if self._llama.retracts else 1  # a state goes back behind a decode of one text
        if not 0 < len(decoding) <= most or n_iterations % PLAIN_EVERY == PLAIN_EVERY - 1:
            return found
        now, n_tokens, n_guessed = self._clock(), float(len(decoding)), 0
        took_s = self._latency.predict(len(decoding), 0, sum(s.n_past for s in decoding))
        for s in decoding:
            if (
                s.draw.candidates
                or self._may_change_answer(s)
                or (s.request.pace_tps and s.timeline.stock_s(now) > ENOUGH_S)
            ):
                continue
            limit = min(MAX_GUESSED - n_guessed, self._n_useful(s))
            best = self._best(self._possible(s, limit, trial=n_iterations % TRY_EVERY == 0), n_tokens / took_s)
            # Guesses take no cell that an answer may need before the next decision.
            if best is None or not self._cells.make_room(best.size + 2 * len(decoding)):
                continue
            if draft := self._ask_model(s, best.size) if best.of_model else lookup_of(s).guess(best.size):
                found[s], self._options[s] = draft, best
                n_tokens, took_s, n_guessed = n_tokens + best.more, took_s + best.cost_s, n_guessed + len(draft)
        return found

    def _possible(self, s: Sequence, limit: int, *, trial: bool) -> list[Option]:
        """List the guesses of at most `limit` tokens."""
        sizes, found = [size for size in SIZES if size <= limit], []
        if chance := lookup_of(s).chance:
            found += [Option(size, self.trust * n_expected(chance, size), self.cost_s(size), False) for size in sizes]
        if self._model is not None:
            chance, token_s = max(s.drafting.value, TRY_CHANCE * trial), self._model.token_s
            found += [
                Option(size, n_expected(chance, size), self.cost_s(size) + size * token_s, True) for size in sizes
            ]
        return found

    @property
    def trust(self) -> float:
        """Right guesses per promised one of prompt lookup, 1 at most: it is chosen where it promises too much."""
        return min(1.0, (self._kept + DOUBTS) / (self._promised + DOUBTS))

    def _best(self, options: list[Option], rate: float) -> Option | None:
        """Return the guess that yields most beyond the same time without it, at `rate` tokens/s; None if none does."""
        best = max(options, key=lambda o: o.more - MARGIN * rate * o.cost_s, default=None)
        if best is None or best.more > MARGIN * rate * best.cost_s:
            return best
        if any(o.more >= self.trust * n_expected(LIKELY, o.size) for o in options):
            self.costs = {size: (RELAX * cost, n) for size, (cost, n) in self.costs.items()}
            self._promised, self._kept = RELAX * self._promised, RELAX * self._kept
        return None

    def _may_change_answer(self, s: Sequence) -> bool:
        """Whether guesses might change the answer: the product with an adapter depends on how many rows there are."""
        return self._llama.exact and bool(s.request.adapter)

    def _n_useful(self, s: Sequence) -> int:
        """Count how many guessed tokens may be of use, and can be cut; the token drawn in any case is none."""
        limit = math.inf if s.n_left is None else s.n_left - 1
        return int(min(limit, self._llama.n_ctx - len(s.tokens) - 1, self._llama.n_retractable))

    def _ask_model(self, s: Sequence, size: int) -> list[int]:
        assert self._model is not None
        began = self._clock()
        draft = self._model.draft(s.request.id, s.tokens, size)
        took_s = self._clock() - began
        self.took_s += took_s
        s.busy_s += took_s
        return draft

    # --- judging -------------------------------------------------------------------------------------------------

    def draw(self, s: Sequence, draft: list[int], row: int) -> list[int]:
        """Draw the next tokens from the rows of the last token and of the draft, and learn; see `draw_run`."""
        tokens = draw_run(self._llama, self._cells, s, draft, row)
        self.judge(s, len(tokens) - 1, len(draft))
        return tokens

    def judge(self, s: Sequence, n_right: int, n: int) -> None:
        """Learn that of the latest guess of `n` tokens for a sequence the first `n_right` were right."""
        self.n_drafted += n
        self.n_accepted += n_right
        if self._options[s].of_model:
            s.drafting.observe_run(n_right, n)
        else:
            promised = self._options[s].more / self.trust
            self._promised, self._kept = KEEP * self._promised + promised, KEEP * self._kept + n_right

    def cost_s(self, size: int) -> float:
        """Predict what the rows of a guess take, s; the least they may, until a guess of this size was computed."""
        unit_s = self._latency.predict(1)
        if size in self.costs:
            return self.costs[size][0] * unit_s
        _, c1, c2, _ = self._latency.coefficients
        return size * max(c1, c2, CHEAPEST * unit_s)

    def observe(self, load: IterationLoad, sizes: Iterable[int], took_s: float) -> None:
        """Learn from an iteration of this load with guesses of these sizes beside it, which took `took_s`."""
        unit_s = self._latency.predict(1)
        # An edge's drafts may be longer than the longest of ours.
        known = [min((size for size in SIZES if size >= n), default=SIZES[-1]) for n in sizes]
        thought_s = sum(map(self.cost_s, known))
        spent_s = took_s - self._latency.predict(load.n_decode, load.n_prefill, load.n_context)
        for size in set(known):
            cost, n = self.cost_s(size) / unit_s, self.costs.get(size, (0.0, 0))[1]
            measured = min(max(cost * spent_s / thought_s, CHEAPEST * size), DEAREST * size)
            self.costs[size] = cost + max(NEWEST, 1 / (n + 2)) * (measured - cost), n + 1


def draw_run(llama: Llama, cells: Cells, s: Sequence, draft: list[int], row: int) -> list[int]:
    """Draw the next tokens from the rows of the last token and of the draft; `row` is the last row.

    As many as were guessed right, and one more: nothing is drawn from behind a wrong guess, or behind an end. Wrong
    guesses are cut from the KV cache.
    """
    assert s.draw.sampler is not None
    tokens: list[int] = []
    for i, guessed in enumerate((*draft, None), row - len(draft)):
        tokens.append(llama.sample(s.draw.sampler, i, s.draw.candidates))
        if tokens[-1] != guessed or llama.vocabulary.ends(guessed) or guessed in s.request.drawing.stop_token_ids:
            break
        if s.draw.sampler.meter is not None and s.draw.sampler.meter.over:
            break  # its grammar takes too long: the answer ends here
    n_wrong = len(draft) - (len(tokens) - 1)
    if n_wrong:
        cells.cut(s, s.n_past - n_wrong)
    return tokens


def n_expected(chance: float, size: int) -> float:
    """Expect how many of `size` guessed tokens are right before the first wrong one, each with this chance."""
    return float(size) if chance >= 1 else chance * (1 - chance**size) / (1 - chance)


def lookup_of(s: Sequence) -> PromptLookup:
    """Return the sequence's prompt lookup, up to date."""
    if s.lookup is None:
        s.lookup = PromptLookup(s.tokens)
    s.lookup.follow(s.tokens)
    return s.lookup
