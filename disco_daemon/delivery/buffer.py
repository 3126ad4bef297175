"""The token buffer: what the reader gets, and when (docs/explain/design.md#delivery). Pure: the time is passed in.

Generated tokens come in by `put` and leave it in order, each exactly once. When they leave is the delivery's mode:

- OFF: at once.
- RESERVE: all but the newest `reserve` tokens at once. While a handoff runs (`mark`) nothing new is certain, and what
  was kept is let go at the reader's pace.
- PACED: token i not before it was generated, nor before the one before it was due plus 1/pace. What is due is a grid of
  *scheduled* times, so that a late timer delays one release and no more; the grid begins anew where the buffer ran
  empty.

`mark` begins the *tail*: what the source of a handoff generates beyond the place where the target goes on. It stays
behind everything else, is released only when it is due at pace, and what is left of it can be taken back (`retract`).

Of a piece of several tokens, as servers send them, the words leave one by one where there is a pace to keep.

The first token is never delayed. Whatever the mode, a cluster that the next token may extend (`graphemes`) waits for
that token or for the flush; if the next one is there and does extend it, both go together.

What is held, and in which pieces it leaves, is `held_tokens`'s; when tokens are due at pace, `grid`'s.
"""

from __future__ import annotations

import math
from array import array

from ..types import Delivery, Token
from .cut import words
from .graphemes import settled
from .grid import PaceGrid
from .held_tokens import HeldTokens

MAX_BUFFERED = 8192  # tokens held; beyond them the oldest pass: half an hour of reading, and of bounded memory


class TokenBuffer:
    """Releases the tokens of one answer. `now` is monotonic, in s; `pace_tps` in tokens/s."""

    def __init__(self, delivery: Delivery, pace_tps: float) -> None:
        """Raises ValueError for a pace that is not finite and positive."""
        self.puts = array("d")  # when each token was put, s; nothing is left of those taken back
        self.arrivals = array("d")  # when each token was released, s
        self._delivery = delivery
        self._reserve = 0
        self._held, self._grid = HeldTokens(), PaceGrid(pace_tps)
        self._direct = False
        self._note()

    def __repr__(self) -> str:
        return f"<TokenBuffer {self._delivery} released={self.n_released} held={self.n_held} tail={self.n_tail}>"

    # --- what it holds -------------------------------------------------------------------------------------------

    @property
    def n_released(self) -> int:
        """Tokens released; one counts with its last character."""
        return len(self.arrivals)

    @property
    def n_held(self) -> int:
        """Tokens put and neither released nor retracted."""
        return self._held.n_tokens

    @property
    def level(self) -> float:
        """How long the held tokens last at pace, s."""
        return self.n_held * self._grid.step_s

    @property
    def n_tail(self) -> int:
        """Tokens of the tail that are still held: what `retract` would take back."""
        return self._held.n_tail

    @property
    def tail_released(self) -> str:
        """The text of the tail that the reader has; empty without a mark."""
        return self._held.tail_left

    @property
    def reserve(self) -> int:
        """Tokens held back in RESERVE mode; lowering it releases at the next `put` or `release`."""
        return self._reserve

    @reserve.setter
    def reserve(self, n: int) -> None:
        self._reserve = max(0, n)
        self._note()

    @property
    def due_at(self) -> float | None:
        """When `release` has something to do, s (it may be past); None: nothing waits for the clock."""
        if not self._held.queue:
            return None
        if self._on_grid:
            return self._grid.due
        return (self.arrivals[-1] if self.arrivals else 0.0) if self._passes([]) else None

    # --- tokens in, tokens out -----------------------------------------------------------------------------------

    def put(self, token: Token, now: float) -> list[Token]:
        """Add a generated token; return what is released now. One with `delta` or `logprobs` flushes, and passes."""
        text, n_tokens = token.text, token.n_tokens
        if n_tokens == 1:
            self.puts.append(now)
        else:
            self.puts.extend((now,) * n_tokens)
        if self._direct and settled(text) == len(text):
            self._stamp(n_tokens, now)
            return [token]
        held = self._held
        if token.delta is not None or token.logprobs is not None:
            out = self.flush(now)
            held.pass_by(token, out)
            self._stamp(n_tokens, now)
            return out
        # What was due before this one came is let go first, since it may leave the buffer empty.
        out = self.release(now) if held.queue and self._grid.due <= now else []
        if not held.queue:
            self._grid.begin_at(now)
        held.append(words(token) if self._on_grid else (token,), n_tokens)
        out += self.release(now)
        return out

    def release(self, now: float) -> list[Token]:
        """Return what has become due."""
        held, grid = self._held, self._grid
        out: list[Token] = []
        if grid.is_fresh:
            grid.begin_at(now)
        if self._on_grid:
            while held.queue and grid.due <= now:
                grid.let_go(held.pop(out))
        else:
            while held.queue and self._passes(out):
                held.pop(out)
        while held.n_queued > MAX_BUFFERED:
            held.pop(out)  # in the next one's place: the grid stays
        if held.open and held.queue and (n_more := held.resolve(out)):
            grid.let_go_too(n_more)
        for token in out:
            self._stamp(token.n_tokens, now)
        self._note()
        return out

    def flush(self, now: float) -> list[Token]:
        """Return all that is left, the tail too: the end of the answer, or of its plain text."""
        out: list[Token] = []
        while self._held.queue:
            self._held.pop(out)
        self._held.close(out)
        if out:
            self._grid.begin_after(now)
        for token in out:
            self._stamp(token.n_tokens, now)
        self._note()
        return out

    # --- the tail ------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Begin the tail: all that is put from now on; an earlier mark ends."""
        if not self._on_grid:
            self._begin_grid()
        self._held.mark()
        self._note()

    def retract(self) -> list[Token]:
        """Take back the tail that is still held, and end the mark; return what was taken, in order."""
        taken = self._held.retract()
        # Tokens leave in the order in which they came: those of the tail that are still held came last.
        del self.puts[len(self.puts) - sum(token.n_tokens for token in taken) :]
        self._note()
        return taken

    def adopt(self) -> None:
        """End the mark; what is held of the tail is text like any other."""
        self._held.unmark()
        self._note()

    # --- settings ------------------------------------------------------------------------------------------------

    def set_pace(self, pace_tps: float, now: float) -> None:
        """Another pace from the next token on; the past is not caught up with. Raises ValueError."""
        self._grid.set_pace(pace_tps, now)

    def set_delivery(self, delivery: Delivery, now: float) -> None:
        """Another mode from now on; call `release` after it."""
        was_on_grid = self._on_grid
        self._delivery = delivery
        if self._on_grid and not was_on_grid:
            self._begin_grid()
            self._grid.begin_at(now)
        self._note()

    # --- within --------------------------------------------------------------------------------------------------

    @property
    def _on_grid(self) -> bool:
        """Whether tokens leave at pace."""
        if self._delivery is Delivery.PACED:
            return True
        return self._delivery is Delivery.RESERVE and self._held.is_marked

    def _begin_grid(self) -> None:
        """Begin the grid anew: the next token is due a step after the last one was released."""
        self._grid.begin_after(self.arrivals[-1] if self.arrivals else -math.inf)
        self._grid.is_fresh = True

    def _passes(self, out: list[Token]) -> bool:
        """Off the grid: whether the oldest token may leave at once, after those of `out`."""
        if self._delivery is Delivery.OFF or not (self.arrivals or out):
            return True
        return self._held.n_queued - self._held.queue[0].n_tokens >= self._reserve

    def _note(self) -> None:
        """Whether plain text may pass by everything: the common case costs nothing."""
        at_once = self._delivery is Delivery.OFF or (self._delivery is Delivery.RESERVE and self._reserve == 0)
        self._direct = at_once and not (self._held.is_marked or self._held.queue or self._held.open)

    def _stamp(self, n_tokens: int, now: float) -> None:
        if n_tokens == 1:
            self.arrivals.append(now)
        else:
            self.arrivals.extend((now,) * n_tokens)
