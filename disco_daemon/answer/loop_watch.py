"""Where an answer says the same again and again: its text, its thoughts, and the arguments of its calls. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ..delivery.repetition import Repetition
from ..types import Token

REPETITION = "repetition"  # why an answer was stopped, in the `disco` object and in the history


@dataclass(slots=True)
class LoopWatch:
    """Looks for a loop in each text of an answer. `strict`: it is data, as its client asks, and as calls always are.

    Of several `choices` none can be ended alone: the answer ends when each of them has ended or is in a loop. A watch
    that is off sees nothing. As long as a token is only text, and `n_left` stays above 0 when its characters are taken
    off, nobody has to ask: it is read when there is more.
    """

    is_on: bool = True
    strict: bool = False
    choices: int = 1
    has_stopped: bool = False
    n_left: float = 0  # characters
    _n_read: int = 0  # tokens of the answer
    _text: Repetition = field(init=False)
    _others: dict[tuple[int, str], Repetition] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)  # choices
    _looping: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._text = Repetition(strict=self.strict)
        self._wait()

    @property
    def is_likely(self) -> bool:
        """Whether the text has just said the same twice, so that a loop may be about to be."""
        return self.is_on and self._text.is_likely

    def begin_anew(self, text: str, n_tokens: int) -> None:
        """Another endpoint goes on after `text`, which is that of `n_tokens` tokens."""
        self._text = Repetition(strict=self.strict, before=text)
        self._others.clear()
        self._n_read = n_tokens
        self._wait()

    def take(self, token: Token, before: Sequence[Token]) -> Token | None:
        """Return a token's part up to where the answer ends for a loop; None where it goes on, as nearly always.

        `before` is the answer so far. What is more than text stays whole.
        """
        if not self.is_on:
            return None
        unread = "".join([earlier.text for earlier in before[self._n_read :]])
        self._n_read = len(before) + 1
        if token.delta is not None or self.choices > 1:
            self._text.add(unread)
            last = self._take_apart(token)
            self._wait()
            return last
        found = self._text.add(unread + token.text)
        self.n_left = self._text.n_left
        if found is None:
            return None
        self.has_stopped = True
        n = found - len(unread)  # which is less than one look
        if n == len(token.text) or token.logprobs is not None:
            return token
        n_tokens = max(1, round(token.n_tokens * n / len(token.text)))
        return structs.replace(token, text=token.text[:n], n_tokens=min(token.n_tokens, n_tokens), ids=())

    def _wait(self) -> None:
        self.n_left = (self._text.n_left if self.choices == 1 else 0) if self.is_on else math.inf

    def _take_apart(self, token: Token) -> Token | None:
        """Take a token that has more than text, or is one of several choices."""
        index = token.index
        for kind, text in _texts(token):
            seen = self._text if self.choices == 1 and not kind else self._others.get((index, kind))
            if seen is None:
                seen = self._others[index, kind] = Repetition(strict=self.strict or kind.isdigit())
            if index not in self._looping and seen.add(text) is not None:
                self._looping.add(index)
        if token.ended is not None:
            self._ended.add(index)
        self.has_stopped = bool(self._looping) and len(self._looping | self._ended) == self.choices
        return token if self.has_stopped else None


def _texts(token: Token) -> Iterator[tuple[str, str]]:
    """Yield the texts of a token with their kinds: "" for the answer's own, a call's by its number."""
    if token.text:
        yield "", token.text
    if delta := token.delta:
        if delta.thought:
            yield "thought", delta.thought
        if delta.refusal:
            yield "refusal", delta.refusal
        for call in delta.calls:
            if call.arguments:
                yield str(call.number), call.arguments
