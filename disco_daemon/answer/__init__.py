"""The lifecycle of one answer. PURE: an event goes in, a list of effects comes out, nothing is awaited or logged.

Theory of operation
-------------------
An answer has at most one *source*: the endpoint whose tokens the reader gets. Until the first token there is none, and
every started endpoint may become it (RACING). The first token decides: the other endpoint is cancelled in the same
step (RELAYING). From then on the answer may move to a *target* (HANDOFF): because that is cheaper, because the source
says nothing, or because it has died. It is the same machinery; only in the last case there is no source any more.

While the answer moves, the source goes on as insurance. The target continues from a certain token on, the *mark*; what
the source makes after it is the *tail*. The tail is shown only when the reader would have nothing else to read. The
target takes over as soon as its text covers what was shown of the tail; the rest of the tail is thrown away. A target
that fails, is late, or says something else than what was shown, is dropped, and the tail was the answer.

A target that can be held (the device) *follows*: it is given the answer so far, then what came meanwhile, until it has
caught up; the mark is set when it is told to go, so that little is thrown away. Any other target has its mark where
the handoff began.

Rules that hold in every state:
1. What the reader has is never changed, and is always the beginning of the answer.
2. An event of an endpoint that is not running for this answer any more changes nothing: cancelling is not
   instantaneous, and what was under way may still arrive.
3. An event that the table does not allow raises IllegalEvent and changes nothing.
4. DONE and FAILED are final, and are entered exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..delivery.buffer import TokenBuffer
from ..delivery.cut import first
from ..delivery.seam import Diverged, Seam, StopScan
from ..errors import DiscoError, EndpointError, Unavailable
from ..types import BOTH, Continuation, Delivery, Finish, Handoff, Plan, Side, Token
from .events import (
    Arrived,
    Begin,
    Broke,
    Cancel,
    Complete,
    Deliver,
    Due,
    Effect,
    Ended,
    Event,
    Fail,
    Feed,
    Followed,
    Move,
    Note,
    SetTimer,
    Start,
    Tick,
)
from .table import TRANSITIONS, IllegalEvent, State

__all__ = [
    "MAX_HANDOFFS",
    "MAX_MOVES",
    "MAX_STALLS",
    "TRANSITIONS",
    "Answer",
    "Arrived",
    "Begin",
    "Broke",
    "Cancel",
    "Complete",
    "Deliver",
    "Due",
    "Effect",
    "Ended",
    "Event",
    "Fail",
    "Feed",
    "Followed",
    "IllegalEvent",
    "Move",
    "Note",
    "SetTimer",
    "Start",
    "State",
    "Tick",
]

MAX_HANDOFFS = 2  # moves of one answer, the last kept for a failure: it does not move for ever
MAX_MOVES = MAX_HANDOFFS - 1  # for money: the last one is kept for a failure
MAX_STALLS = 2  # moves for a source's silence, done or not: each start of a target may cost the whole prompt
FULL = "context_full"  # why an endpoint could not go on
GO_WITHIN = 8  # tokens; a follower that lacks no more is told to go: it prefills them in one step
MAX_CHASES = 8  # feeds of a follower; then it goes however much it lacks: the source is as fast as it can prefill


@dataclass(slots=True)
class _Moving:
    """A handoff under way. `mark`, the number of the first entry of the tail, is None while a follower follows."""

    target: Side
    reason: str
    begun_s: float
    at: int  # tokens generated when it was begun
    at_char: int
    follows: bool
    n_fed: int  # entries the target was given
    n_chases: int = 0
    mark: int | None = None
    seam: Seam | None = None
    overlap: str | None = None  # what the target was asked to repeat
    n_chars: int = 0  # of the target's text so far


@dataclass(slots=True)
class Answer:
    """One answer.

    `available` are the endpoints that can serve this request, `max_tokens` is what the client allows, `stop` its stop
    strings, `continuation` how well each endpoint continues a partial answer, `followers` those that can be held,
    `joinable` whether two endpoints may share this one at all, `before` how the client has begun it, `overlap` what a
    side repeats of `before` and a text after it. What else is public is for reading.
    """

    plan: Plan
    available: frozenset[Side]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    continuation: Mapping[Side, Continuation] = field(default_factory=lambda: dict.fromkeys(Side, Continuation.EXACT))
    followers: frozenset[Side] = frozenset()
    joinable: bool = True
    before: str = ""
    overlap: Callable[[Side, str], str | None] = lambda side, text: None
    buffer: TokenBuffer = field(default_factory=lambda: TokenBuffer(Delivery.OFF, 1.0))
    state: State = State.PLANNED
    source: Side | None = None
    winner: Side | None = None
    handoffs: int = 0
    moves: list[Handoff] = field(default_factory=list)
    tokens: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    errors: list[EndpointError] = field(default_factory=list)
    _entries: list[Token] = field(default_factory=list)  # all tokens of the answer, shown or not
    _ids_come: bool = False  # the source tells its token ids, wherever its text is exactly theirs
    _running: set[Side] = field(default_factory=set)
    _pending: set[Side] = field(default_factory=set)
    _moving: _Moving | None = None
    _scan: StopScan | None = None
    _openings: dict[Side, Seam] = field(default_factory=dict)  # of those who may repeat what the client has begun
    _dropped: set[Side] = field(default_factory=set)  # targets that a move for money was tried with in vain
    _n_generated: int = 0  # the sum of `tokens`
    _n_died_midway: int = 0  # deaths of the engine after the reader had got something
    _n_stalls: int = 0  # moves begun since the source was silent
    _cut: bool = False  # at `max_tokens`, since an endpoint said more
    _now: float = 0.0

    @property
    def text(self) -> str:
        """The answer so far, shown or still in the buffer."""
        return "".join(token.text for token in self._entries)

    @property
    def n_generated(self) -> int:
        """Tokens of the answer so far, shown or still in the buffer."""
        return self._n_generated

    @property
    def movable(self) -> bool:
        """Whether a move for money is possible now."""
        return (
            self.state is State.RELAYING
            and self.joinable
            and self.handoffs < MAX_MOVES
            and self.source is not None
            and self._may_take_over(self.source.other)
            and self.continuation[self.source.other] is not Continuation.UNTRIED
            and self.source.other not in self._dropped
            and self._at_token_end
        )

    @property
    def _at_token_end(self) -> bool:
        """Whether the text so far ends where a token does, as far as is known: a cut elsewhere derails a model."""
        return not self._entries or bool(self._entries[-1].ids) or not self._ids_come

    def maker(self, at: int) -> Side:
        """The side that made the character `at` of the answer; of what the reader has it is never another one later.

        Not the `source`: what it made before a handoff may be shown after it.
        """
        side = self.winner
        assert side is not None
        for move in self.moves:
            if move.dropped is None and move.at_char <= at:
                side = move.target
        return side

    def __repr__(self) -> str:
        where = f"{self.source}→{self._moving.target}" if self._moving else f"{self.source}"
        return f"<Answer {self.state} {where} {self.n_generated} tok, buffer {self.buffer.n_held}>"

    def on(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now`, s; return the effects to carry out, in order.

        Raises IllegalEvent and then changes nothing.
        """
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            msg = f"{type(event).__name__} is not allowed in state {self.state}"
            raise IllegalEvent(msg)
        if self.state in (State.DONE, State.FAILED):
            return []
        self._now = now
        effects = list(self._dispatch(event))
        assert self.state in allowed, (event, self.state)
        return effects

    def _dispatch(self, event: Event) -> Iterable[Effect]:
        match event:
            case Arrived(side=side, token=token):
                return self._arrived(side, token) if side in self._running else ()
            case Tick():
                return (Deliver(token) for token in self.buffer.release(self._now))
            case Ended(side=side, finish=finish):
                return self._ended(side, finish) if side in self._running else ()
            case Broke(side=side, error=error):
                return self._broke(side, error) if side in self._running else ()
            case Followed(side=side):
                return self._followed(side) if side in self._running else ()
            case Move(target=target, reason=reason):
                return self._move(target, reason)
            case Begin():
                return self._begin()
            case Due(side=side):
                return self._start(side) if side in self._pending else ()

    # --- racing --------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterable[Effect]:
        plan = self.plan = self.plan.restricted(self.available)
        if not self.available:
            yield from self._fail(Unavailable("no endpoint can serve this request"))
            return
        self.state = State.RACING
        for side in sorted(self.available, key=lambda side: (plan.delay(side), side)):
            delay = plan.delay(side)
            if delay == 0:
                yield from self._start(side)
            elif math.isfinite(delay):
                self._pending.add(side)
                yield SetTimer(side, delay)

    def _start(self, side: Side, *, held: bool = False) -> Iterable[Effect]:
        self._pending.discard(side)
        self._running.add(side)
        if self.before and not self._entries:
            guarded, overlap = self.continuation.get(side) is not Continuation.EXACT, self.overlap(side, "")
            if guarded or overlap:
                self._openings[side] = Seam(self.before, guarded=guarded, overlap=overlap, least=1)
        yield Start(side, self.text, self._ids(self._entries), self.n_generated, held)

    def _cancel(self, side: Side) -> Iterable[Effect]:
        if side in self._running or side in self._pending:
            self._running.discard(side)
            self._pending.discard(side)
            self._openings.pop(side, None)
            yield Cancel(side)

    @staticmethod
    def _ids(entries: list[Token]) -> tuple[int, ...]:
        """Token ids of these entries, if all are known: as many as there are tokens, and none cut off at a seam."""
        if any(token.text and not token.n_tokens for token in entries):
            return ()
        ids = tuple(i for token in entries for i in token.ids)
        return ids if len(ids) == sum(token.n_tokens for token in entries) else ()

    def _arrived(self, side: Side, token: Token) -> Iterable[Effect]:
        opening = self._openings.get(side)
        if opening is not None and not (token.delta is not None and not token.text):  # a thought comes before the text
            return self._opens(side, opening, token)
        return self._heard(side, token)

    def _opens(self, side: Side, opening: Seam, token: Token) -> Iterable[Effect]:
        """A token that may still repeat how the client has begun the answer: it neither counts nor wins until then."""
        opening.feed(token)
        try:
            joined = opening.join("")
        except Diverged as e:
            yield from self._cancel(side)
            yield from self._next(side, EndpointError(side, "diverged", str(e)))
            return
        if joined is not None:
            del self._openings[side]
            for piece in joined:
                if side in self._running:
                    yield from self._heard(side, piece)

    def _heard(self, side: Side, token: Token) -> Iterable[Effect]:
        if self.state is State.RACING:
            return self._begins(side, token)
        moving = self._moving
        if moving is not None and side is moving.target:
            return self._join(moving, token)
        if self._scan is not None and side is self.source:
            return self._scanned(side, token)
        return self._accept(side, token)

    def _begins(self, side: Side, token: Token) -> Iterable[Effect]:
        """The first token of all."""
        yield from self._wins(side)
        yield from self._heard(side, token)

    def _wins(self, side: Side) -> Iterable[Effect]:
        yield from self._cancel(side.other)
        self.state, self.source, self.winner = State.RELAYING, side, side

    def _accept(self, side: Side, token: Token) -> Iterable[Effect]:
        """A token of the source; it may be the last one."""
        return self._counted(side, token) if self.handoffs else self._kept(side, token)

    def _counted(self, side: Side, token: Token) -> Iterable[Effect]:
        """A token behind a seam, where nobody else counts."""
        yield from self._kept(side, token)
        if side in self._running:
            yield from self._limited(side)

    def _kept(self, side: Side, token: Token) -> Iterable[Effect]:
        """As much of a token as `max_tokens` leaves room for: nearly always all of it."""
        if self.max_tokens is None or self.n_generated + token.n_tokens <= self.max_tokens:
            return self._keep(side, token)
        return self._cut_off(side, token, self.max_tokens)

    def _cut_off(self, side: Side, token: Token, max_tokens: int) -> Iterable[Effect]:
        """An endpoint that keeps to its limit ends by itself, and tells how it was; one that goes beyond it is cut."""
        within = first(token, max_tokens - self.n_generated)
        if within is not None:
            yield from self._keep(side, within)
        self._cut = True
        if side in self._running:
            self._scan = None  # what it holds back is beyond the limit
            yield from self._stop(side, "length")

    def _keep(self, side: Side, token: Token) -> list[Effect]:
        """Make the token part of the answer; the buffer says what of it is shown now."""
        self._entries.append(token)
        self._ids_come |= bool(token.ids)
        self.tokens[side] += token.n_tokens
        self._n_generated += token.n_tokens
        effects: list[Effect] = []
        if token.delta or token.logprobs:
            self.joinable = False  # half a tool call, or a hidden thought, cannot be continued by somebody else
            if self._moving is not None and side is self.source:
                effects += self._drop("the answer is no plain text any more")
        effects += map(Deliver, self.buffer.put(token, self._now))
        return effects

    def _limited(self, side: Side) -> Iterable[Effect]:
        """Across a seam nobody else counts: a follower cannot know how much it will have been given."""
        n = self.n_generated + (self._scan.n_waiting if self._scan is not None else 0)
        if self.max_tokens is not None and n >= self.max_tokens and self.state in (State.RELAYING, State.HANDOFF):
            yield from self._stop(side, "length")

    def _stop(self, side: Side, reason: str) -> Iterable[Effect]:
        """The source has said enough."""
        if self._moving is not None:
            yield from self._drop("the source had finished before")
        yield from self._cancel(side)
        yield from self._complete(reason)

    def _scanned(self, side: Side, token: Token) -> Iterable[Effect]:
        """A token behind a seam: a stop string may have begun before it."""
        assert self._scan is not None
        said, stopped = self._scan.take(token)
        for piece in said:
            if self.state in (State.RELAYING, State.HANDOFF):
                yield from self._kept(side, piece)
        if self.state is State.DONE:
            return
        if stopped:
            yield from self._stop(side, "stop")
        elif side in self._running:
            yield from self._limited(side)

    # --- handoff -------------------------------------------------------------------------------------------------

    def _may_take_over(self, target: Side) -> bool:
        failed = any(e.side is target for e in self.errors)
        return target in self.available and not failed and self.continuation.get(target) is not Continuation.NONE

    def _move(self, target: Side, reason: str) -> Iterable[Effect]:
        """Begin a handoff with a living source; what cannot be is left."""
        text = self.text
        plain = self.joinable and self.handoffs < MAX_HANDOFFS and not _thinking(text)
        if self.continuation.get(target) is not Continuation.EXACT and len(self.before + text) < Seam.MIN_RESTART:
            return  # so short a beginning does not tell a restart from chance
        if reason == "stall" and self._n_stalls >= MAX_STALLS:
            return
        if self.max_tokens is not None and self.n_generated >= self.max_tokens:
            return
        if self.state is not State.RELAYING or target is self.source or not (plain and self._may_take_over(target)):
            return
        self._n_stalls += reason == "stall"
        yield from self._hand_over(target, reason)

    def _hand_over(self, target: Side, reason: str) -> Iterable[Effect]:
        follows = target in self.followers and self.source in self._running
        n = len(self._entries)
        self.state = State.HANDOFF
        self._moving = _Moving(target, reason, self._now, self.n_generated, len(self.text), follows, n)
        if not follows:
            self._set_mark(self._moving)
        yield from self._start(target, held=follows)

    def _set_mark(self, moving: _Moving) -> None:
        """From here on the target continues; later tokens of the source are the tail."""
        moving.mark = len(self._entries)
        guarded = self.continuation[moving.target] is not Continuation.EXACT
        text = self.text
        moving.overlap = self.overlap(moving.target, text)
        moving.seam = Seam(self.before + text, guarded=guarded, overlap=moving.overlap)
        self.buffer.mark()

    def _followed(self, side: Side) -> Iterable[Effect]:
        """The follower has prefilled all it was given: give it the rest, and let it go when that is little."""
        moving = self._moving
        if moving is None or moving.target is not side or not moving.follows or moving.mark is not None:
            return
        rest = self._entries[moving.n_fed :]
        moving.n_chases += 1
        dead = self.source not in self._running
        go = dead or sum(t.n_tokens for t in rest) <= GO_WITHIN or moving.n_chases > MAX_CHASES
        moving.n_fed = len(self._entries)
        if go:
            self._set_mark(moving)
        known = bool(self._ids(self._entries))  # of all: a piece's ids may belong to pieces before it
        yield Feed(side, "".join(t.text for t in rest), self._ids(rest) if known else (), go)

    def _join(self, moving: _Moving, token: Token) -> Iterable[Effect]:
        if moving.seam is None:
            return  # a follower that was not told to go
        moving.seam.feed(token)
        moving.n_chars += len(token.text)
        try:
            joined = moving.seam.join(self.buffer.tail_released)
        except Diverged as e:
            yield from self._diverged(moving, e)
            return
        if joined is not None:
            yield from self._take_over(moving, joined)

    def _take_over(self, moving: _Moving, joined: list[Token]) -> Iterable[Effect]:
        """The target is the source from now on; what nobody has seen of the old one's tail is thrown away."""
        assert moving.mark is not None
        source, target = self.source, moving.target
        assert source is not None
        shown, tail = self.buffer.tail_released, self._entries[moving.mark :]
        removed = self.buffer.retract()
        n_removed = sum(t.n_tokens for t in removed)
        self.tokens[source] -= n_removed
        self._n_generated -= n_removed
        del self._entries[moving.mark :]
        n_shown = sum(t.n_tokens for t in tail) - n_removed
        if shown or n_shown:
            self._entries.append(Token(shown, n_shown))
        self._moving, self.state, self.source, self._ids_come = None, State.RELAYING, target, False
        self.buffer.reserve = 0  # it has done its service
        self.handoffs += 1
        at, took_s = self.n_generated, self._now - moving.begun_s
        self.moves.append(Handoff(at, source, target, moving.reason, took_s, n_removed, at_char=len(self.text)))
        self._scan = StopScan(self.stop, self.text) if self.stop else None
        if source is not target:  # a restarted device continues its own answer
            yield from self._cancel(source)
        yield Note(f"handoff {source} to {target} after {at} tokens ({moving.reason})")
        if target in self._running:
            yield from self._limited(target)
        for token in joined:
            if token.n_tokens:
                yield from self._limited(target)
            if self.state is not State.RELAYING:
                return
            yield from (self._scanned(target, token) if self._scan is not None else self._accept(target, token))

    def _drop(self, why: str) -> Iterable[Effect]:
        """The handoff is off: the source's tail is the answer."""
        moving, self._moving = self._moving, None
        assert moving is not None
        assert self.source is not None
        self._dropped.add(moving.target)
        self.buffer.reserve = 0
        self.buffer.adopt()
        took_s = self._now - moving.begun_s
        self.moves.append(
            Handoff(moving.at, self.source, moving.target, moving.reason, took_s, 0, why, at_char=moving.at_char)
        )
        self.state = State.RELAYING
        yield from self._cancel(moving.target)

    def _diverged(self, moving: _Moving, e: Diverged) -> Iterable[Effect]:
        """The target says something else, or has no room. In the second case, or if it began again, it is out."""
        error = EndpointError(moving.target, FULL if e.reason == FULL else "diverged", str(e))
        yield from self._drop(e.reason)
        if self.source in self._running:
            if e.reason in ("restart", FULL):
                self.errors.append(error)
            return
        yield from self._next(moving.target, error)

    # --- the end -------------------------------------------------------------------------------------------------

    def _ended(self, side: Side, finish: Finish) -> Iterable[Effect]:
        self._running.discard(side)
        moving = self._moving
        if moving is not None and side is moving.target:
            yield from self._target_ended(moving, finish)
            return
        if (opening := self._openings.pop(side, None)) is not None:
            yield from self._opening_ended(side, opening, finish)
            return
        if finish.full and self.available != {side}:
            yield from self._broke(side, EndpointError(side, FULL, str(_no_room(side))))
            return
        yield from self._cancel(side.other)
        if self.state is State.RACING:
            self.source = self.winner = side
        if moving is not None:
            yield from self._drop("the source had finished before")
        yield from self._complete(finish.reason)

    def _opening_ended(self, side: Side, opening: Seam, finish: Finish) -> Iterable[Effect]:
        """A side has ended while its text could still be a repetition of how the client has begun the answer."""
        why, joined = "the continuation is nothing new", []
        try:
            joined = opening.ended("")
        except Diverged as e:
            why = str(e)
            finish = Finish("length")
        if not joined and finish.reason == "length":
            yield from self._next(side, EndpointError(side, "diverged", why))
            return
        if self.state is State.RACING:
            yield from self._wins(side)
        for piece in joined:
            yield from self._accept(side, piece)
        yield from self._ended(side, finish)

    def _target_ended(self, moving: _Moving, finish: Finish) -> Iterable[Effect]:
        if moving.seam is None:  # held, and ended all the same: it has no room for more
            refused = Diverged("refused", "the target cannot take so long an answer")
            yield from self._diverged(moving, _no_room(moving.target) if finish.full else refused)
            return
        try:
            joined = moving.seam.ended(self.buffer.tail_released)
        except Diverged as e:
            yield from self._diverged(moving, e)
            return
        if finish.full and (not joined or self.source in self._running):
            yield from self._diverged(moving, _no_room(moving.target))
            return
        exact = self.continuation[moving.target] is Continuation.EXACT
        within = moving.n_chars and not (moving.seam.swallowed or moving.overlap or self.buffer.tail_released)
        # It said what was there already: up to its limit, or not even all of it.
        if not (joined or exact) and (finish.reason == "length" or within):
            yield from self._diverged(moving, Diverged("restart", "the continuation is nothing new"))
            return
        yield from self._take_over(moving, joined)
        if self.state is State.RELAYING:
            yield from self._ended(moving.target, finish)

    def _complete(self, reason: str) -> Iterable[Effect]:
        yield from self._rest_of_scan()
        for token in self.buffer.flush(self._now):
            yield Deliver(token)
        self.state = State.DONE
        yield Complete("length" if self._cut else reason)

    def _rest_of_scan(self) -> Iterable[Effect]:
        """What might have grown into a stop string, and has not."""
        scan, self._scan = self._scan, None
        for token in scan.rest() if scan is not None else ():
            assert self.source is not None
            yield from self._keep(self.source, token)

    def _broke(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        self._running.discard(side)
        self._openings.pop(side, None)
        if self._entries and error.reason == "engine_gone":
            self._n_died_midway += 1
        moving = self._moving
        if moving is None:
            yield from self._next(side, error)
        elif side is moving.target:
            yield from self._drop(error.reason)
            if self.source in self._running:
                self.errors.append(error)
            else:
                yield from self._next(side, error)
        else:
            self.errors.append(error)  # the target goes on, now for this reason
            moving.reason = _why(error)

    def _next(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        """`side` has failed: wait for what still runs, else start what is left, else fail."""
        self.errors.append(error)
        if self._running:
            return
        if self._entries and self.max_tokens is not None and self.n_generated >= self.max_tokens:
            yield from self._complete("length")
            return
        target = self._target(side)
        if target is None:
            yield from self._fail(self._blame())
        elif self._entries:
            yield from self._hand_over(target, _why(error))
        else:
            yield from self._start(target)

    def _target(self, side: Side) -> Side | None:
        """Who goes on after `side` has failed.

        1. Nobody, when the reader's part cannot be continued or moved too often.
        2. The other endpoint, if it has not failed for this answer; it may have lost the race.
        3. The device once more, if its engine died in mid-answer and the server has failed since or cannot continue:
           it is restarted within seconds. Alone it gets no second chance: a request that kills the engine would kill
           it again.
        """
        if self._entries and (self.handoffs >= MAX_HANDOFFS or not self.joinable):
            return None
        failed = {e.side for e in self.errors}
        mute = self._entries and self.continuation.get(side.other) is Continuation.NONE
        if side.other in self.available and side.other not in failed and not mute:
            return side.other
        died_now = self.errors[-1].reason == "engine_gone"
        if self._n_died_midway == 1 and self.available == BOTH and ((mute and died_now) or side is Side.SERVER):
            return Side.DEVICE
        return None

    def _blame(self) -> DiscoError:
        """The error to show: the request's own fault if an endpoint says so, else the first side that failed.

        Where one failed since its context was full, why the other one could not go on is told with it.
        """
        full = next((e for e in self.errors if e.reason in (FULL, "context_length_exceeded")), None)
        if self._entries and full is not None:
            other, why = full.side.other, next((f": {e}" for e in self.errors if e.side is not full.side), "")
            return EndpointError(full.side, FULL, f"{full}, and the {other} cannot go on with it{why}")
        return next((e for e in self.errors if e.your_fault), self.errors[0])

    def _fail(self, error: DiscoError) -> Iterable[Effect]:
        """What was generated is shown, then the error."""
        yield from self._rest_of_scan()
        for token in self.buffer.flush(self._now):
            yield Deliver(token)
        self.state = State.FAILED
        yield Fail(error)


def _no_room(side: Side) -> Diverged:
    return Diverged(FULL, f"the answer fills the context of the {side}")


def _why(error: EndpointError) -> str:
    """Why the answer moves after this error."""
    return "context" if error.reason == FULL else "failure"


def _thinking(text: str) -> bool:
    """Whether the answer is within a thought that a model writes as text."""
    return text.count("<think>") > text.count("</think>")
