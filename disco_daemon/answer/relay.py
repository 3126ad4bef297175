"""The way of the source's tokens to the reader: within the limits, part of the answer, through the buffer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..delivery.buffer import TokenBuffer
from ..types import Side, Token
from .limits import Limits
from .loop_watch import LoopWatch
from .text import AnswerText


@dataclass(slots=True)
class Relay:
    """Makes tokens part of an answer.

    What `limits` leaves of them goes into `text`, up to a loop that `watch` finds; `buffer` says when it is shown.
    """

    text: AnswerText
    buffer: TokenBuffer
    limits: Limits
    watch: LoopWatch

    @property
    def is_full(self) -> bool:
        """Whether the answer has all tokens that the client allows."""
        return self.limits.max_tokens is not None and self.text.n_generated >= self.limits.max_tokens

    def take(self, side: Side, token: Token, now: float) -> tuple[list[Token], str | None]:
        """Return what is shown now, and the reason why the answer ends with this token of `side`, if it does."""
        if self.limits.admits(token, self.text.n_generated):  # nearly always
            watch = self.watch
            watch.n_left -= len(token.text)
            if watch.n_left > 0 and token.delta is None:  # nearly always, too
                self.text.add(side, token)
                return self.buffer.put(token, now), None
            last = watch.take(token, self.text.pieces)
            self.text.add(side, last or token)
            return self.buffer.put(last or token, now), None if last is None else "length"
        pieces, reason = self.limits.take(token, self.text.n_generated, self.text.__str__)
        shown = self._keep(side, pieces, now)
        return shown, "length" if self.watch.has_stopped else reason

    def flush(self, side: Side | None, now: float) -> list[Token]:
        """Return all that is left, also what `side` said that might have grown into a stop string, and has not."""
        rest = self.limits.rest()
        if rest and not self.watch.has_stopped:
            assert side is not None
            return self._keep(side, rest, now) + self.buffer.flush(now)
        return self.buffer.flush(now)

    def retract_tail(self, mark: int, source: Side) -> int:
        """Take back what was not shown of the `source`'s tail, from piece `mark` on; return the number of tokens."""
        shown, n_removed = self.buffer.tail_released, sum(t.n_tokens for t in self.buffer.retract())
        self.text.retract(mark, source, n_removed, shown)
        self.buffer.reserve = 0  # it has done its service
        self.begin_anew()
        return n_removed

    def begin_anew(self) -> None:
        """An endpoint goes on after the text so far; what waits for the rest of a stop string, it says again."""
        text = str(self.text)
        self.limits.begin_anew(text)
        self.watch.begin_anew(text, len(self.text.pieces))

    def adopt_tail(self) -> None:
        """Make the source's tail text like any other."""
        self.buffer.reserve = 0
        self.buffer.adopt()

    def _keep(self, side: Side, tokens: Iterable[Token], now: float) -> list[Token]:
        shown = []
        for token in tokens:
            last = self.watch.take(token, self.text.pieces)
            self.text.add(side, last or token)
            shown += self.buffer.put(last or token, now)
            if last is not None:
                break
        return shown
