"""The token buffer: what the reader gets, and when (docs/design.md#delivery). Pure: the clock's value is passed in.

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
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import islice

from ..types import Delivery, Token
from .cut import merged, split, words
from .graphemes import extends, settled

MAX_BUFFERED = 8192  # tokens held; beyond them the oldest pass: half an hour of reading, and of bounded memory
# Characters of one cluster that are kept together. Families of emoji have about 10, text that grows wild marks has no
# end: it must neither be held for ever nor cost quadratic time.
MAX_CLUSTER = 64


class TokenBuffer:
    """Releases the tokens of one answer. `now` is monotonic, in s; `pace_tps` in tokens/s."""

    def __init__(self, delivery: Delivery, pace_tps: float) -> None:
        """Raises ValueError for a pace that is not finite and positive."""
        self.puts = array("d")  # when each token was put, s; nothing is left of those taken back
        self.arrivals = array("d")  # when each token was released, s
        self._delivery = delivery
        self._step = _step(pace_tps)  # s a token
        self._reserve = 0
        self._queue: deque[Token] = deque()
        self._n_queued = 0  # tokens in the queue
        # The open cluster at the end of what has left the queue; text and counts of one or more tokens.
        self._open: list[Token] = []
        # The grid: the last scheduled time, the tokens let go then, and when the next is due. `_fresh`: it was not kept
        # up to now, and what lies in the past on it is not to be caught up with.
        self._last, self._n_last, self._due, self._fresh = -math.inf, 0, -math.inf, False
        # Of a mark: tokens of the queue and of the open cluster that come before it; None without one.
        self._queue_own: int | None = None
        self._open_own = 0
        self._tail: list[str] = []
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
        return self._n_queued + _count(self._open)

    @property
    def level(self) -> float:
        """How long the held tokens last at pace, s."""
        return self.n_held * self._step

    @property
    def n_tail(self) -> int:
        """Tokens of the tail that are still held: what `retract` would take back."""
        if self._queue_own is None:
            return 0
        before = _count(islice(self._queue, self._queue_own))
        return self._n_queued - before + _count(self._open[self._open_own :])

    @property
    def tail_released(self) -> str:
        """The text of the tail that the reader has; empty without a mark."""
        return "".join(self._tail)

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
        if not self._queue:
            return None
        if self._on_grid:
            return self._due
        return (self.arrivals[-1] if self.arrivals else 0.0) if self._passes() else None

    # --- tokens in, tokens out -----------------------------------------------------------------------------------

    def put(self, token: Token, now: float) -> list[Token]:
        """Add a generated token; return what is released now. One with `delta` or `logprobs` flushes, and passes."""
        text = token.text
        if token.n_tokens == 1:
            self.puts.append(now)
        else:
            self.puts.extend((now,) * token.n_tokens)
        if self._direct and settled(text) == len(text):
            self._stamp(token, now)
            return [token]
        if token.delta is not None or token.logprobs is not None:
            out = self.flush(now)
            self._show(token, now, out, "" if self._queue_own is None else text)
            return out
        # What was due before this one came is let go first, since it may leave the buffer empty.
        out = self.release(now) if self._queue and self._due <= now else []
        if not self._queue:
            self._due, self._fresh = max(self._due, now), False
        self._queue.extend(words(token) if self._on_grid else (token,))
        self._n_queued += token.n_tokens
        out += self.release(now)
        return out

    def release(self, now: float) -> list[Token]:
        """Return what has become due."""
        out: list[Token] = []
        if self._fresh:
            self._due, self._fresh = max(self._due, now), False
        if self._on_grid:
            while self._queue and self._due <= now:
                self._last, self._n_last = self._due, 0
                self._take_step(self._pop(now, out))
        else:
            while self._queue and self._passes():
                self._pop(now, out)
        while self._n_queued > MAX_BUFFERED:
            self._pop(now, out)  # in the next one's place: the grid stays
        self._resolve(now, out)
        self._note()
        return out

    def flush(self, now: float) -> list[Token]:
        """Return all that is left, the tail too: the end of the answer, or of its plain text."""
        out: list[Token] = []
        while self._queue:
            self._pop(now, out)
        self._close(now, out)
        if out:
            self._last, self._n_last, self._due = now, 1, now + self._step
        self._note()
        return out

    # --- the tail ------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Begin the tail: all that is put from now on; an earlier mark ends."""
        if not self._on_grid:
            self._begin_grid()
        self._queue_own, self._open_own = len(self._queue), len(self._open)
        self._tail.clear()
        self._note()

    def retract(self) -> list[Token]:
        """Take back the tail that is still held, and end the mark; return what was taken, in order."""
        if self._queue_own is None:
            return []
        taken = self._open[self._open_own :]
        del self._open[self._open_own :]
        queued = list(self._queue)
        self._queue = deque(queued[: self._queue_own])
        taken += queued[self._queue_own :]
        self._n_queued = _count(self._queue)
        # Tokens leave in the order in which they came: those of the tail that are still held came last.
        del self.puts[len(self.puts) - _count(taken) :]
        self.adopt()
        return taken

    def adopt(self) -> None:
        """End the mark; what is held of the tail is text like any other."""
        self._queue_own, self._open_own = None, 0
        self._tail.clear()
        self._note()

    # --- settings ------------------------------------------------------------------------------------------------

    def set_pace(self, pace_tps: float, now: float) -> None:
        """Another pace from the next token on; the past is not caught up with. Raises ValueError."""
        self._step = _step(pace_tps)
        self._due = max(self._last + self._n_last * self._step, min(self._due, now))

    def set_delivery(self, delivery: Delivery, now: float) -> None:
        """Another mode from now on; call `release` after it."""
        was_on_grid = self._on_grid
        self._delivery = delivery
        if self._on_grid and not was_on_grid:
            self._begin_grid()
            self._due, self._fresh = max(self._due, now), False
        self._note()

    # --- within --------------------------------------------------------------------------------------------------

    @property
    def _on_grid(self) -> bool:
        """Whether tokens leave at pace."""
        if self._delivery is Delivery.PACED:
            return True
        return self._delivery is Delivery.RESERVE and self._queue_own is not None

    def _begin_grid(self) -> None:
        """Begin the grid anew: the next token is due a step after the last one was released."""
        self._last, self._n_last = self.arrivals[-1] if self.arrivals else -math.inf, 1
        self._due, self._fresh = self._last + self._step, True

    def _take_step(self, n: int) -> None:
        self._n_last += n
        self._due = self._last + self._n_last * self._step

    def _passes(self) -> bool:
        """Off the grid: whether the oldest token may leave at once."""
        if self._delivery is Delivery.OFF or not self.arrivals:
            return True
        return self._n_queued - self._queue[0].n_tokens >= self._reserve

    def _note(self) -> None:
        """Whether plain text may pass by everything: the common case costs nothing."""
        at_once = self._delivery is Delivery.OFF or (self._delivery is Delivery.RESERVE and self._reserve == 0)
        self._direct = at_once and self._queue_own is None and not self._queue and not self._open

    def _pop(self, now: float, out: list[Token]) -> int:
        """The oldest token leaves the queue; returns its count."""
        token = self._queue.popleft()
        own = self._queue_own is None or self._queue_own > 0
        if self._queue_own:
            self._queue_own -= 1
        self._n_queued -= token.n_tokens
        if self._open and self._is_ended_by(token):
            self._close(now, out)
        if not self._open and settled(token.text) == len(token.text):
            self._show(token, now, out, tail="" if own else token.text)
            return token.n_tokens
        self._open.append(token)
        if self._queue_own is not None and own:
            self._open_own += 1
        text = "".join(piece.text for piece in self._open)
        at = settled(text)
        self._emit(at if len(text) - at <= MAX_CLUSTER else len(text), now, out)
        return token.n_tokens

    def _resolve(self, now: float, out: list[Token]) -> None:
        """If the next token is there, the open cluster is ended by it or goes with it."""
        while self._open and self._queue:
            if self._queue_own == 0:
                return  # what comes next may be taken back: it does not tell what will follow
            if self._is_ended_by(self._queue[0]):
                self._close(now, out)
            else:
                self._take_step(self._pop(now, out))

    def _is_ended_by(self, token: Token) -> bool:
        """Whether `token` shows that the open cluster is whole."""
        return bool(token.text) and not extends("".join(piece.text for piece in self._open), token.text)

    def _close(self, now: float, out: list[Token]) -> None:
        self._emit(sum(len(piece.text) for piece in self._open), now, out)

    def _emit(self, at: int, now: float, out: list[Token]) -> None:
        """Let the first `at` characters of the open cluster go, as one token."""
        before, after = split(self._open, at)
        if not before:
            return
        marked = self._queue_own is not None
        tail = "".join(piece.text for piece in before[self._open_own :]) if marked else ""
        # A token cut in two is still one of those before the mark, or not.
        n_gone = len(self._open) - len(after)
        self._open, self._open_own = after, max(0, self._open_own - n_gone)
        self._show(merged(before), now, out, tail)

    def _show(self, token: Token, now: float, out: list[Token], tail: str = "") -> None:
        out.append(token)
        if tail:
            self._tail.append(tail)
        self._stamp(token, now)

    def _stamp(self, token: Token, now: float) -> None:
        if token.n_tokens == 1:
            self.arrivals.append(now)
        else:
            self.arrivals.extend((now,) * token.n_tokens)


def _step(pace_tps: float) -> float:
    if not 0 < pace_tps < math.inf:
        msg = f"a pace is finite and positive: {pace_tps} token/s"
        raise ValueError(msg)
    return 1.0 / pace_tps


def _count(tokens: Iterable[Token]) -> int:
    return sum(token.n_tokens for token in tokens)
