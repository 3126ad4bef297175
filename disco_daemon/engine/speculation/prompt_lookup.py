"""Prompt lookup: guesses at the next tokens from the text itself. Pure.

A text that is edited, quoted or filled in repeats what was said before. So the end of a text is looked up in the text,
and what followed there is guessed to follow here (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; LLMA,
Yang et al. 2023, arXiv 2304.04487). A guess costs nothing but the look-up, so it is compared with the tokens that
came whether or not it was used: the quality of guesses is known before the first one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST, LONGEST = 2, 8  # tokens at the end of the text that are looked up; the longest match counts, then the newest
MAX_TRIES = 16  # places that are compared with the end of the text
# Classes of guesses by how many tokens have been right in a row, and the chances to begin with: after a long agreement
# the next token is nearly certain, after a short one it is not.
CLASSES = (2, 4, 8, 16)
PRIOR = (0.3, 0.5, 0.75, 0.9)
PRIOR_TRIES = 3.0  # that the prior is worth
MODEL_PRIOR = 0.7  # chance of a draft model's guesses to begin with
KEEP = 0.97  # of what is known, at each guess: a window of some 30


class Chance:
    """The chance that a guess is right, learned from guesses; old ones fade."""

    __slots__ = ("_hits", "_tries")

    def __init__(self, prior: float) -> None:
        self._hits, self._tries = prior * PRIOR_TRIES, PRIOR_TRIES

    @property
    def value(self) -> float:
        """The chance that the next guess is right, 0 to 1."""
        return self._hits / self._tries

    def observe(self, *, right: bool) -> None:
        """Learn from a guess."""
        self._hits = KEEP * self._hits + right
        self._tries = KEEP * self._tries + 1.0

    def observe_run(self, n_right: int, n: int) -> None:
        """Learn from `n` guesses in a row, the first `n_right` right; those behind a wrong one teach nothing."""
        for i in range(min(n_right + 1, n)):
            self.observe(right=i < n_right)


class PromptLookup:
    """The guess for one growing text. State: where the text's end is repeated, the chances, and each pair's places.

    `_newest` has the place behind the newest occurrence of each pair of tokens, `_older` behind the one before it for
    each place: chains as in deflate's string matching (RFC 1951, section 4). Takes about 250 bytes and 1 us a token.
    """

    __slots__ = ("_at", "_chances", "_newest", "_older", "_run", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        """Begin with a text; its own repetitions say nothing about the answer to come, and are not counted."""
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._older: list[int] = [0]
        self._at = 0  # the token that is guessed next; 0: there is no guess
        self._run = 0  # tokens before it that agree with the end of the text
        self._chances = [Chance(p) for p in PRIOR]
        for token in tokens:
            self._add(token)
        self._find()

    def follow(self, tokens: Sequence[int]) -> None:
        """Add the tokens that the text has gained; each one judges its guess."""
        for i in range(len(self._tokens), len(tokens)):
            token = tokens[i]
            right = self._at > 0 and self._tokens[self._at] == token
            if self._at:
                self._chances[self._class].observe(right=right)
            self._add(token)
            if right:
                self._at += 1
                self._run += 1
            else:
                self._find()

    @property
    def chance(self) -> float:
        """The chance that the next guess is right, 0 to 1; 0 if there is none."""
        return self._chances[self._class].value if self._at else 0.0

    def guess(self, n: int) -> list[int]:
        """Return the next `n` tokens if the text goes on as before; none if it repeats nothing."""
        if not self._at:
            return []
        known = self._tokens
        guess: list[int] = []
        for i in range(self._at, self._at + n):  # what overtakes the end of the text repeats the guess
            guess.append(known[i] if i < len(known) else guess[i - len(known)])
        return guess

    @property
    def _class(self) -> int:
        return sum(self._run >= least for least in CLASSES) - 1

    def _add(self, token: int) -> None:
        """Add a token; its pair with the one before is known from the next look-up on."""
        tokens, n = self._tokens, len(self._tokens)
        if n >= LEAST:
            pair = tokens[-2], tokens[-1]
            self._older.append(self._newest.get(pair, 0))
            self._newest[pair] = n
        elif n:
            self._older.append(0)
        tokens.append(token)

    def _find(self) -> None:
        """Look the end of the text up: the longest match, and of those the newest."""
        tokens, n = self._tokens, len(self._tokens)
        self._at = self._run = 0
        if n <= LEAST:
            return
        place = self._newest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(MAX_TRIES):
            if not place or self._run == LONGEST:
                return
            run = LEAST
            while run < LONGEST and run < place and tokens[place - run - 1] == tokens[n - run - 1]:
                run += 1
            if run > self._run:
                self._at, self._run = place, run
            place = self._older[place]
