"""What the next turn of a conversation begins with, computed while nobody waits.

A chat template puts the same few tokens between an answer and the next question, and the last token of an answer has
not been through the model yet. Some time behind a whole answer they are computed, as part of its cached prefix: six of
the 27 rows of a short second question with ChatML. A request that comes meanwhile waits no longer than for an iteration
of a running answer; if it is the next turn, the work is its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..kv.cells import Cells
from ..kv.holder import Held
from ..llama.model import Llama
from .sequence import Sequence

MOST_TOKENS = 16  # that a template may put in between: an iteration of some rows, not a prompt
PAUSE_S = 0.1  # without a request before it is done: a program that asks on at once has all its rows in one iteration
KEPT = 4  # latest answers for which that is still to be done; older ones were answered under load


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """The tokens of a chat's prompt and its whole answer."""

    tokens: list[int]
    private: bool


@dataclass(slots=True)
class NextTurns:
    """The answers that have ended, and what is computed behind them. Used by the thread that computes."""

    ended: deque[EndedAnswer] = field(default_factory=lambda: deque(maxlen=KEPT))

    def note(self, s: Sequence) -> None:
        """Note a chat's whole answer, of the model itself: under an adapter the cells are others."""
        if s.request.prompt is None and not s.salt and s.slot >= 0 and s.n_past >= len(s.tokens) - 1:
            self.ended.append(EndedAnswer(list(s.tokens), s.request.private))

    def compute(self, llama: Llama, cells: Cells) -> bool:
        """Compute what follows the latest answer; False if there is none left."""
        if not self.ended:
            return False
        answer = self.ended.pop()
        between = llama.vocabulary.between_turns
        tokens = answer.tokens + between
        if not 0 < len(between) <= MOST_TOKENS or llama.adapters or len(tokens) >= llama.n_ctx:
            return True
        if not llama.retracts and cells.n_taken:
            return True  # a request that ends this decode would spoil the states of those that wait
        if len(tokens) - cells.count_cached(tokens) > len(between) + 1 or cells.n_free <= len(between):
            return True  # its cells have gone, or others would have to
        taken = cells.take(tokens, private=answer.private)
        if taken is None:
            return True
        seq, n = taken
        cells.n_reused -= n  # no answer has saved anything yet
        rows = [(token, n + i, seq, False) for i, token in enumerate(tokens[n:])]
        cells.advance(len(rows))
        if llama.decode(rows) == 0:
            cells.grow(seq, tokens[n:])
        elif llama.retracts:
            cells.cut(Held(seq, n), n)
        else:
            cells.go_back(Held(seq, n), n)
        cells.leave(seq)
        return True
