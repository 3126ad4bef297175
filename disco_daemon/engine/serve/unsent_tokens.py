"""What an answer has drawn and its reader has not: tokens whose text waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...types import Likelihood
from ..llama.text import TextStream


@dataclass(slots=True)
class Unsent:
    """Tokens that were drawn and not sent yet, and the stream that makes text of them.

    `has_ids`: the text since the last order is exactly that of the tokens drawn, so their `ids` may go with it.
    `is_alone`: they are drawn from the exit's logits, as `wire.TextPiece` has it. `likelihoods` wait for their text.
    """

    text: TextStream = field(default_factory=TextStream)
    n_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    has_ids: bool = True
    is_alone: bool = False
    likelihoods: list[Likelihood] = field(default_factory=list)

    def take_likelihoods(self, text: str) -> tuple[Likelihood, ...]:
        """Take out those of the tokens of which some of `text` is, the latest text shown.

        Those that are wholly behind it, held back, wait; those before it are of a thought, or tags, and are dropped.
        """
        if not self.likelihoods:
            return ()
        n_left, n_text, n_behind = len(self.text.left), len(text.encode()), 0
        shown: list[Likelihood] = []
        waiting: list[Likelihood] = []
        for token in reversed(self.likelihoods):
            if n_behind >= n_left + n_text:
                break
            n_behind += len(token.piece)
            (waiting if 0 < n_left >= n_behind else shown).append(token)
        self.likelihoods = waiting[::-1]
        return tuple(shown[::-1])
