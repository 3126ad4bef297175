"""The tokens that a buffer holds, and the pieces in which they leave it. Pure.

They leave in order, each exactly once, and as whole grapheme clusters: a cluster that the next token may extend
(`graphemes`) stays *open* until that token is there. A mark divides them: what comes after it is the *tail*, which can
be taken back as long as it is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ..types import Token
from .cut import merged, split
from .graphemes import extends, settled

# Characters of one cluster that are kept together. Families of emoji have about 10, text that grows wild marks has no
# end: it must neither be held for ever nor cost quadratic time.
MAX_CLUSTER = 64


class HeldTokens:
    """A queue of tokens, and behind it the open cluster at the end of what has left the queue."""

    def __init__(self) -> None:
        self.queue: deque[Token] = deque()
        self.n_queued = 0  # tokens in the queue
        self.open: list[Token] = []  # text and counts of one or more tokens
        self.is_marked = False
        # Of a mark: tokens of the queue and of the open cluster that come before it; None without one.
        self._queue_own: int | None = None
        self._open_own = 0
        self._tail: list[str] = []

    @property
    def n_tokens(self) -> int:
        """All that is held."""
        return self.n_queued + _count(self.open)

    @property
    def n_tail(self) -> int:
        """Tokens of the tail that are still held: what `retract` would take back."""
        if self._queue_own is None:
            return 0
        before = _count(islice(self.queue, self._queue_own))
        return self.n_queued - before + _count(self.open[self._open_own :])

    @property
    def tail_left(self) -> str:
        """The text of the tail that has left."""
        return "".join(self._tail)

    # --- in and out ----------------------------------------------------------------------------------------------

    def append(self, tokens: Iterable[Token], n_tokens: int) -> None:
        """Add tokens that count `n_tokens` together."""
        self.queue.extend(tokens)
        self.n_queued += n_tokens

    def pass_by(self, token: Token, out: list[Token]) -> None:
        """Let a token leave that was never held; nothing else is."""
        out.append(token)
        if self.is_marked:
            self._tail.append(token.text)

    def pop(self, out: list[Token]) -> int:
        """Let the oldest token leave the queue; return its count. What of it is no open cluster goes to `out`."""
        token = self.queue.popleft()
        own = self._queue_own is None or self._queue_own > 0
        if self._queue_own:
            self._queue_own -= 1
        self.n_queued -= token.n_tokens
        if self.open and self._is_ended_by(token):
            self.close(out)
        if not self.open and settled(token.text) == len(token.text):
            out.append(token)
            if not own:
                self._tail.append(token.text)
            return token.n_tokens
        self.open.append(token)
        if self._queue_own is not None and own:
            self._open_own += 1
        text = self._open_text
        at = settled(text)
        self._cut(at if len(text) - at <= MAX_CLUSTER else len(text), out)
        return token.n_tokens

    def resolve(self, out: list[Token]) -> int:
        """If the next token is there, the open cluster is ended by it or goes with it; return what left the queue."""
        n_popped = 0
        while self.open and self.queue:
            if self._queue_own == 0:
                break  # what comes next may be taken back: it does not tell what will follow
            if self._is_ended_by(self.queue[0]):
                self.close(out)
            else:
                n_popped += self.pop(out)
        return n_popped

    def close(self, out: list[Token]) -> None:
        """Let the open cluster leave as it is."""
        self._cut(len(self._open_text), out)

    # --- the tail ------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Begin the tail: all that is added from now on; an earlier mark ends."""
        self.is_marked, self._queue_own, self._open_own = True, len(self.queue), len(self.open)
        self._tail.clear()

    def unmark(self) -> None:
        """End the mark; what is held of the tail is text like any other."""
        self.is_marked, self._queue_own, self._open_own = False, None, 0
        self._tail.clear()

    def retract(self) -> list[Token]:
        """Take back the tail that is still held, and end the mark; return what was taken, in order."""
        if self._queue_own is None:
            return []
        taken = self.open[self._open_own :]
        del self.open[self._open_own :]
        queued = list(self.queue)
        self.queue = deque(queued[: self._queue_own])
        taken += queued[self._queue_own :]
        self.n_queued = _count(self.queue)
        self.unmark()
        return taken

    # --- within --------------------------------------------------------------------------------------------------

    @property
    def _open_text(self) -> str:
        return self.open[0].text if len(self.open) == 1 else "".join(piece.text for piece in self.open)

    def _is_ended_by(self, token: Token) -> bool:
        """Whether `token` shows that the open cluster is whole."""
        return bool(token.text) and not extends(self._open_text, token.text)

    def _cut(self, at: int, out: list[Token]) -> None:
        """Let the first `at` characters of the open cluster go, as one token."""
        before, after = split(self.open, at)
        if not before:
            return
        if self.is_marked:
            self._tail += (piece.text for piece in before[self._open_own :])
        # A token cut in two is still one of those before the mark, or not.
        n_gone = len(self.open) - len(after)
        self.open, self._open_own = after, max(0, self._open_own - n_gone)
        out.append(merged(before))


def _count(tokens: Iterable[Token]) -> int:
    return sum(token.n_tokens for token in tokens)
