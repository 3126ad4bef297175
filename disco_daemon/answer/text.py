"""The text of an answer so far: its pieces, its token ids, and who made how much of it. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..types import Side, Token
from ..types.thought_marks import TAGS


@dataclass(slots=True)
class AnswerText:
    """All tokens of the answer, shown or still in the buffer; `n_generated` is the sum of `tokens`, by side.

    `turns` are the characters from which on it was made by a part of a model alone, and not any more, in turn.
    """

    tokens: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    n_generated: int = 0
    pieces: list[Token] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_plain: bool = True  # nothing but text so far: no tool call, no hidden thought, no log-probabilities
    _has_ids: bool = False  # the source gives token ids, wherever its text is exactly theirs

    def __str__(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def by_choice(self) -> str:
        """The text; of several choices one after the other, with an empty line between them."""
        numbers = sorted({piece.index for piece in self.pieces})
        return "\n\n".join("".join(p.text for p in self.pieces if p.index == number) for number in numbers)

    def add(self, side: Side, token: Token) -> None:
        """Append a token that `side` made."""
        if token.alone is not bool(len(self.turns) % 2):
            self.turns.append(len(str(self)))
        self.pieces.append(token)
        if token.ids:
            self._has_ids = True
        if token.delta or token.logprobs:
            self.is_plain = False
        self.tokens[side] += token.n_tokens
        self.n_generated += token.n_tokens

    def retract(self, mark: int, source: Side, n_removed: int, shown: str) -> None:
        """Replace the pieces from `mark` on by what was `shown` of them; `n_removed` tokens of `source` were not."""
        n_shown = sum(piece.n_tokens for piece in self.pieces[mark:]) - n_removed
        self.tokens[source] -= n_removed
        self.n_generated -= n_removed
        del self.pieces[mark:]
        if shown or n_shown:
            self.pieces.append(Token(shown, n_shown))
        self._has_ids = False  # of the next source nothing is known yet
        n_chars = len(str(self))
        self.turns = [at for at in self.turns if at <= n_chars]

    def is_alone(self, at: int) -> bool:
        """Whether the character `at` was made by a part of a model alone."""
        return bool(bisect.bisect_right(self.turns, at) % 2)

    def marked(self, token: Token, at: int) -> Token:
        """Return a token of which the text has `alone` from the character `at` on: a buffer joins and cuts pieces."""
        alone = self.is_alone(at)
        return token if token.alone is alone else msgspec.structs.replace(token, alone=alone)

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids; empty unless every one is known."""
        return ids_of(self.pieces)

    @property
    def ends_with_a_token(self) -> bool:
        """Whether the text ends where a token does, as far as is known: a cut elsewhere derails a model."""
        return not self.pieces or bool(self.pieces[-1].ids) or not self._has_ids

    @property
    def is_thought(self) -> bool:
        """Whether the text ends within a thought that a model writes as text."""
        text = str(self)
        return any(text.count(opening) > text.count(closing) for opening, closing in TAGS)


def ids_of(pieces: Sequence[Token]) -> tuple[int, ...]:
    """Token ids of these pieces, if all are known: as many as there are tokens, and none cut off at a seam."""
    if any(piece.text and not piece.n_tokens for piece in pieces):
        return ()
    ids = tuple(i for piece in pieces for i in piece.ids)
    return ids if len(ids) == sum(piece.n_tokens for piece in pieces) else ()
