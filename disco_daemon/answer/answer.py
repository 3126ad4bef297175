"""One answer as a state machine; the package's docstring has its theory of operation.

It is longer than most files here, since every event meets one state: what has parts of its own is a handoff, the
failures, the limits and the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..delivery.buffer import TokenBuffer
from ..delivery.seam import Diverged, Seam
from ..errors import DiscoError, EndpointError, Unavailable
from ..types import Continuation, Delivery, Finish, HandoffRecord, Plan, Side, Token
from .events import (
    Arrived,
    Begin,
    Broke,
    CalledOff,
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
    HandoffEvent,
    Move,
    Note,
    SetTimer,
    SourceGone,
    Start,
    Tick,
)
from .failures import CONTEXT_FULL, MAX_HANDOFFS, Failures, no_room, reason_to_move
from .handoff import Dropped, Handoff, Joined
from .limits import Limits
from .states import TRANSITIONS, HandoffState, IllegalEvent, State
from .text import AnswerText

MAX_MOVES = MAX_HANDOFFS - 1  # for money: the last one is kept for a failure
MAX_STALLS = 2  # moves for a source's silence, done or not: each start of a target may cost the whole prompt


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
    moves: list[HandoffRecord] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    generated: AnswerText = field(default_factory=AnswerText)
    _running: set[Side] = field(default_factory=set)
    _pending: set[Side] = field(default_factory=set)
    _handoff: Handoff | None = None
    _openings: dict[Side, Seam] = field(default_factory=dict)  # of sides that may repeat what the client has begun
    _dropped: set[Side] = field(default_factory=set)  # targets that a move for money was tried with in vain
    _n_stalls: int = 0  # moves begun since the source was silent
    _now: float = 0.0
    _limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self._limits = Limits(self.max_tokens, self.stop)

    # --- for reading ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The answer so far, shown or still in the buffer."""
        return str(self.generated)

    @property
    def n_generated(self) -> int:
        """Tokens of the answer so far, shown or still in the buffer."""
        return self.generated.n_generated

    @property
    def tokens(self) -> dict[Side, int]:
        """Tokens of the answer by the side that made them."""
        return self.generated.tokens

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
            and self.generated.ends_with_a_token
        )

    @property
    def _at_limit(self) -> bool:
        return self.max_tokens is not None and self.n_generated >= self.max_tokens

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
        where = f"{self.source}→{self._handoff.target} {self._handoff.state}" if self._handoff else f"{self.source}"
        return f"<Answer {self.state} {where} {self.n_generated} tok, buffer {self.buffer.n_held}>"

    # --- events --------------------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now`, s; return the effects to carry out, in order.

        Raises IllegalEvent and then changes nothing.
        """
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            if isinstance(event, Begin) or self.state is State.PLANNED:
                msg = f"{type(event).__name__} is not allowed in state {self.state}"
                raise IllegalEvent(msg)
            return []
        self._now = now
        effects: Iterable[Effect]
        match event:
            case Arrived(side=side, token=token) if side in self._running:
                effects = self._arrived(side, token)
            case Tick():
                effects = map(Deliver, self.buffer.release(now))
            case Ended(side=side, finish=finish) if side in self._running:
                effects = self._ended(side, finish)
            case Broke(side=side, error=error) if side in self._running:
                effects = self._broke(side, error)
            case Followed(side=side) if side in self._running:
                effects = self._followed(event)
            case Move(target=target, reason=reason):
                effects = self._move(target, reason)
            case Begin():
                effects = self._begin()
            case Due(side=side) if side in self._pending:
                effects = self._start(side)
            case _:
                return []  # its endpoint is not running any more, or not for this answer
        in_order = list(effects)
        assert self.state in allowed, (event, self.state)
        return in_order

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
        generated = self.generated
        if self.before and not generated.pieces:
            guarded, overlap = self.continuation.get(side) is not Continuation.EXACT, self.overlap(side, "")
            if guarded or overlap:
                self._openings[side] = Seam(self.before, guarded=guarded, overlap=overlap, least=1)
        yield Start(side, str(generated), generated.ids, generated.n_generated, held)

    def _cancel(self, side: Side) -> Iterable[Effect]:
        if side in self._running or side in self._pending:
            self._running.discard(side)
            self._pending.discard(side)
            self._openings.pop(side, None)
            yield Cancel(side)

    def _arrived(self, side: Side, token: Token) -> Iterable[Effect]:
        opening = self._openings.get(side)
        if opening is not None and not (token.delta is not None and not token.text):  # a thought comes before the text
            return self._open(side, opening, token)
        return self._route(side, token)

    def _open(self, side: Side, opening: Seam, token: Token) -> Iterable[Effect]:
        """Take a token that may still repeat how the client has begun the answer: it neither counts nor wins."""
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
                    yield from self._route(side, piece)

    def _route(self, side: Side, token: Token) -> Iterable[Effect]:
        """Take a token for what it is: the first one of all, a target's, or the source's."""
        if self.state is State.RACING:
            return self._begin_with(side, token)
        if self._handoff is not None and side is self._handoff.target:
            return self._in_handoff(self._handoff, Arrived(side, token))
        return self._accept(side, token)

    def _begin_with(self, side: Side, token: Token) -> Iterable[Effect]:
        yield from self._win(side)
        yield from self._route(side, token)

    def _win(self, side: Side) -> Iterable[Effect]:
        yield from self._cancel(side.other)
        self.state, self.source, self.winner = State.RELAYING, side, side

    # --- relaying ------------------------------------------------------------------------------------------------

    def _accept(self, side: Side, token: Token) -> Iterable[Effect]:
        """Take a token of the source: nearly always all of it."""
        if self._limits.admits(token, self.generated.n_generated):
            return self._keep(side, token)
        return self._bound(side, token)

    def _bound(self, side: Side, token: Token) -> Iterable[Effect]:
        """Take what the limits leave of a token; it may be the last one. An endpoint that has ended says why itself."""
        pieces, reason = self._limits.take(token, self.generated.n_generated)
        for piece in pieces:
            yield from self._keep(side, piece)
        if reason == "stop" or (reason is not None and side in self._running):
            yield from self._stop(side, reason)

    def _keep(self, side: Side, token: Token) -> list[Effect]:
        """Make the token part of the answer; the buffer says what of it is shown now."""
        self.generated.add(side, token)
        effects: list[Effect] = []
        if token.delta or token.logprobs:
            self.joinable = False  # the other endpoint cannot continue half a tool call, or a hidden thought
            if self._handoff is not None and side is self.source:
                effects += self._call_off(self._handoff, "the answer is no plain text any more")
        effects += map(Deliver, self.buffer.put(token, self._now))
        return effects

    # --- handoff -------------------------------------------------------------------------------------------------

    def _may_take_over(self, target: Side) -> bool:
        capable = self.continuation.get(target) is not Continuation.NONE
        return target in self.available and capable and not self.failures.has(target)

    def _move(self, target: Side, reason: str) -> Iterable[Effect]:
        """Begin a handoff with a living source, if the answer may move."""
        text = self.text
        plain = self.joinable and self.handoffs < MAX_HANDOFFS and not self.generated.is_thought
        if self.continuation.get(target) is not Continuation.EXACT and len(self.before + text) < Seam.MIN_RESTART:
            return  # so short a beginning does not tell a restart from chance
        if reason == "stall" and self._n_stalls >= MAX_STALLS:
            return
        if self._at_limit:
            return
        if target is self.source or not (plain and self._may_take_over(target)):
            return
        self._n_stalls += reason == "stall"
        yield from self._hand_over(target, reason)

    def _hand_over(self, target: Side, reason: str) -> Iterable[Effect]:
        source = self.source
        assert source is not None
        begin = HandoffState.JOINING_ALONE
        if source in self._running:
            begin = HandoffState.FOLLOWING if target in self.followers else HandoffState.JOINING
        self.state = State.HANDOFF
        self._handoff = Handoff(
            source, target, reason, self._now, self.generated, self.buffer, self.before,
            guarded=self.continuation[target] is not Continuation.EXACT, overlap=self.overlap, state=begin,
        )  # fmt: skip
        yield from self._start(target, held=begin is HandoffState.FOLLOWING)

    def _followed(self, event: Followed) -> Iterable[Effect]:
        handoff = self._handoff
        return self._in_handoff(handoff, event) if handoff is not None and event.side is handoff.target else ()

    def _in_handoff(self, handoff: Handoff, event: HandoffEvent) -> Iterable[Effect]:
        """Carry out what the handoff makes of an event."""
        match handoff.on(event):
            case Feed() as order:
                yield order
            case Joined(tokens):
                yield from self._take_over(handoff, tokens)
            case Dropped(why, error, out):
                yield from self._drop(handoff, why)
                if error is not None and self.source not in self._running:
                    yield from self._next(handoff.target, error)
                elif error is not None and out:
                    self.failures.errors.append(error)

    def _take_over(self, handoff: Handoff, joined: list[Token]) -> Iterable[Effect]:
        """Make the target the source; the part of the old one's tail that was not shown is thrown away."""
        source, target = handoff.source, handoff.target
        shown, n_removed = self.buffer.tail_released, sum(t.n_tokens for t in self.buffer.retract())
        self.generated.retract(handoff.mark, source, n_removed, shown)
        self._handoff, self.state, self.source = None, State.RELAYING, target
        self.buffer.reserve = 0  # it has done its service
        self.handoffs += 1
        at, text = self.n_generated, self.text
        self.moves.append(handoff.done(at, len(text), self._now, n_removed))
        self._limits.begin_anew(text)
        if source is not target:  # a restarted device continues its own answer
            yield from self._cancel(source)
        yield Note(f"handoff {source} to {target} after {at} tokens ({handoff.reason})")
        if target in self._running and self._limits.is_reached(at):
            yield from self._stop(target, "length")
        for token in joined:
            if self.state is State.RELAYING and token.n_tokens and self._limits.is_reached(self.n_generated):
                yield from self._stop(target, "length")
            if self.state is State.RELAYING:
                yield from self._accept(target, token)

    def _call_off(self, handoff: Handoff, why: str) -> Iterable[Effect]:
        return self._in_handoff(handoff, CalledOff(why))

    def _drop(self, handoff: Handoff, why: str) -> Iterable[Effect]:
        """Give the handoff up: the source's tail is part of the answer."""
        self._handoff, self.state = None, State.RELAYING
        self._dropped.add(handoff.target)
        self.buffer.reserve = 0
        self.buffer.adopt()
        self.moves.append(handoff.undone(self._now, why))
        yield from self._cancel(handoff.target)

    # --- the end -------------------------------------------------------------------------------------------------

    def _ended(self, side: Side, finish: Finish) -> Iterable[Effect]:
        self._running.discard(side)
        handoff = self._handoff
        if handoff is not None and side is handoff.target:
            yield from self._in_handoff(handoff, Ended(side, finish))
            if handoff.state is HandoffState.JOINED and self.state is State.RELAYING:
                yield from self._ended(side, finish)
            return
        if (opening := self._openings.pop(side, None)) is not None:
            yield from self._opening_ended(side, opening, finish)
            return
        if finish.full and self.available != {side}:
            yield from self._broke(side, EndpointError(side, CONTEXT_FULL, no_room(side)))
            return
        yield from self._cancel(side.other)
        if self.state is State.RACING:
            self.source = self.winner = side
        if handoff is not None:
            yield from self._call_off(handoff, "the source had finished before")
        yield from self._complete(finish.reason)

    def _opening_ended(self, side: Side, opening: Seam, finish: Finish) -> Iterable[Effect]:
        """End a side whose text could still be a repetition of how the client has begun the answer."""
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
            yield from self._win(side)
        for piece in joined:
            yield from self._accept(side, piece)
        yield from self._ended(side, finish)

    def _stop(self, side: Side, reason: str) -> Iterable[Effect]:
        """End the answer where the source has said enough."""
        if self._handoff is not None:
            yield from self._call_off(self._handoff, "the source had finished before")
        yield from self._cancel(side)
        yield from self._complete(reason)

    def _complete(self, reason: str) -> Iterable[Effect]:
        yield from self._flush()
        self.state = State.DONE
        yield Complete("length" if self._limits.was_cut else reason)

    def _flush(self) -> Iterable[Effect]:
        """Show everything, also what might have grown into a stop string, and has not."""
        for token in self._limits.rest():
            assert self.source is not None
            yield from self._keep(self.source, token)
        for token in self.buffer.flush(self._now):
            yield Deliver(token)

    def _broke(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        self._running.discard(side)
        self._openings.pop(side, None)
        if self.generated.pieces and error.reason == "engine_gone":
            self.failures.engine_died_midway()
        handoff = self._handoff
        if handoff is None:
            yield from self._next(side, error)
        elif side is handoff.target:
            yield from self._in_handoff(handoff, Broke(side, error))
        else:
            self.failures.errors.append(error)
            yield from self._in_handoff(handoff, SourceGone(reason_to_move(error)))

    def _next(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        """Go on after `side` has failed: wait for what still runs, else start what is left, else fail."""
        self.failures.errors.append(error)
        if self._running:
            return
        begun = bool(self.generated.pieces)
        if begun and self._at_limit:
            yield from self._complete("length")
            return
        target = None
        if not begun or (self.joinable and self.handoffs < MAX_HANDOFFS):
            target = self.failures.successor(side, self.available, self.continuation, begun=begun)
        if target is None:
            yield from self._fail(self.failures.blame(begun=begun))
        elif begun:
            yield from self._hand_over(target, reason_to_move(error))
        else:
            yield from self._start(target)

    def _fail(self, error: DiscoError) -> Iterable[Effect]:
        """Show what was generated, then the error."""
        yield from self._flush()
        self.state = State.FAILED
        yield Fail(error)
