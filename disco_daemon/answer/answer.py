"""One answer as a state machine; the package's docstring has its theory of operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..delivery.buffer import TokenBuffer
from ..errors import DiscoError, EndpointError, Unavailable
from ..types import Continuation, Delivery, Finish, HandoffRecord, Plan, Side, Token
from .events import (
    Arrived,
    AskAgain,
    Begin,
    Broke,
    CalledOff,
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
    IllegalEvent,
    Move,
    Note,
    Rest,
    SetTimer,
    SourceGone,
    Start,
    Tick,
)
from .failures import CONTEXT_FULL, Failures, no_room, reason_to_move
from .handoff import Dropped, Handoff, HandoffState, Joined
from .limits import Limits
from .loop_watch import REPETITION, LoopWatch
from .opening import Opening
from .relay import Relay
from .sides import Sides
from .states import TRANSITIONS, State
from .succession import Succession
from .text import AnswerText


@dataclass(slots=True)
class Answer:
    """One answer.

    `available` are the endpoints that can serve this request, `max_tokens` is what the client allows, `stop` its stop
    strings, `continuation` how well each endpoint continues a partial answer, `followers` those that can be held,
    `joinable` whether two endpoints may share this one at all, `watch` ends it where it repeats itself, `before` is how
    the client has begun it, `overlap` what a side repeats of `before` and a text after it, `again` whether a side that
    has failed has another place to be asked at. What else is public is for reading.
    """

    plan: Plan
    available: frozenset[Side]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    continuation: Mapping[Side, Continuation] = field(default_factory=lambda: dict.fromkeys(Side, Continuation.EXACT))
    followers: frozenset[Side] = frozenset()
    joinable: bool = True
    watch: LoopWatch = field(default_factory=LoopWatch)
    before: str = ""
    overlap: Callable[[Side, str], str | None] = lambda side, text: None
    again: Callable[[Side], bool] = lambda side: False
    buffer: TokenBuffer = field(default_factory=lambda: TokenBuffer(Delivery.OFF, 1.0))
    state: State = State.PLANNED
    source: Side | None = None
    winner: Side | None = None
    stop_met: str | None = None  # the stop string of the client that has ended it
    stopped: str | None = None  # REPETITION, if it was ended for that
    moves: list[HandoffRecord] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    generated: AnswerText = field(default_factory=AnswerText)
    handoff: Handoff | None = None
    _now: float = 0.0
    _sides: Sides = field(init=False)
    _relay: Relay = field(init=False)
    _succession: Succession = field(init=False)

    def __post_init__(self) -> None:
        self._sides = Sides(self.continuation, self.before, self.overlap)
        limits = Limits(self.max_tokens, self.stop, may_move=self.joinable and len(self.available) > 1)
        self._relay = Relay(self.generated, self.buffer, limits, self.watch)
        self._succession = Succession(
            self.available, self.continuation, self.before, self.generated, self.failures, self.moves,
            again=self.again,
        )  # fmt: skip

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
    def handoffs(self) -> int:
        """Moves that are done."""
        return self._succession.n_handoffs

    @property
    def movable(self) -> bool:
        """Whether a move for money is possible now."""
        if self.state is not State.RELAYING or not self.joinable or self.source is None or self.watch.is_likely:
            return False
        return self._succession.is_worth_asking(self.source.other)

    def maker(self, at: int) -> Side:
        """The side that made the character `at` of the answer; of what the reader has it is never another one later."""
        assert self.winner is not None
        return self._succession.maker(at, self.winner)

    def __repr__(self) -> str:
        where = f"{self.source}→{self.handoff.target} {self.handoff.state}" if self.handoff else f"{self.source}"
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
            case Arrived(side=side, token=token) if side in self._sides.running:
                effects = self._arrived(side, token)
            case Tick():
                effects = map(Deliver, self.buffer.release(now))
            case Ended(side=side, finish=finish) if side in self._sides.running:
                effects = self._ended(side, finish)
            case Broke(side=side, error=error) if side in self._sides.running:
                effects = self._broke(side, error)
            case Followed(side=side) if self.handoff is not None and side is self.handoff.target:
                effects = self._in_handoff(self.handoff, event)
            case Rest() | AskAgain() if self.handoff is not None:
                effects = self._in_handoff(self.handoff, event)
            case Move(target=target, reason=reason):
                effects = self._move(target, reason)
            case Begin():
                effects = self._begin()
            case Due(side=side) if side in self._sides.pending:
                effects = (self._sides.start(side, self.generated),)
            case _:
                return []  # its endpoint is not running any more, or not for this answer
        in_order = effects if isinstance(effects, list) else list(effects)
        assert self.state in allowed, (event, self.state)
        return in_order

    # --- racing and relaying -------------------------------------------------------------------------------------

    def _begin(self) -> Iterable[Effect]:
        plan = self.plan = self.plan.restricted(self.available)
        if not self.available:
            yield from self._fail(Unavailable("no endpoint can serve this request"))
            return
        self.state = State.RACING
        for side in sorted(self.available, key=lambda side: (plan.delay(side), side)):
            delay = plan.delay(side)
            if delay == 0:
                yield self._sides.start(side, self.generated)
            elif math.isfinite(delay):
                self._sides.pending.add(side)
                yield SetTimer(side, delay)

    def _arrived(self, side: Side, token: Token) -> Iterable[Effect]:
        """Take a token for what it is: a repetition perhaps, the first one of all, a target's, or the source's."""
        if side in self._sides.openings and (token.text or token.delta is None):  # a thought comes before the text
            return self._open(self._sides.openings[side], Arrived(side, token))
        if self.state is State.RACING:
            return self._win(side, token)
        if self.handoff is not None and side is self.handoff.target:
            return self._in_handoff(self.handoff, Arrived(side, token))
        return self._accept(side, token)

    def _open(self, opening: Opening, event: Arrived | Ended) -> Iterable[Effect]:
        """Take what a side says as long as that may repeat how the client has begun the answer."""
        side, said = event.side, opening.on(event)
        if said is None:
            return
        del self._sides.openings[side]
        if isinstance(said, EndpointError):
            yield from self._sides.cancel(side)
            yield from self._next(side, said)
            return
        for token in said:
            if self.state is not State.DONE:
                yield from self._arrived(side, token)
        if isinstance(event, Ended):
            yield from self._ended(side, event.finish)

    def _win(self, side: Side, token: Token) -> Iterable[Effect]:
        yield from self._sides.cancel(side.other)
        self.state, self.source, self.winner = State.RELAYING, side, side
        yield from self._accept(side, token)

    def _accept(self, side: Side, token: Token) -> Iterable[Effect]:
        """Take a token of the source; it may be the last one. An endpoint that has ended says why itself."""
        shown, reason = self._relay.take(side, token, self._now)
        effects: list[Effect] = list(map(Deliver, shown))
        if self.joinable and not self.generated.is_plain:
            self.joinable = False  # the other endpoint cannot continue half a tool call, or a hidden thought
            effects = [*self._call_off("the answer is no plain text any more"), *effects]
        if reason is not None and (reason == "stop" or self.watch.has_stopped or side in self._sides.running):
            effects += self._complete(side, reason)
        return effects

    # --- handoff -------------------------------------------------------------------------------------------------

    def _move(self, target: Side, reason: str) -> Iterable[Effect]:
        """Begin a handoff with a living source, if the answer may move."""
        if target is self.source or not self.joinable or self._relay.is_full:
            return
        if self._succession.may_leave_for(target, reason):
            self._succession.n_stalls += reason == "stall"
            yield from self._hand_over(target, reason)

    def _hand_over(self, target: Side, reason: str) -> Iterable[Effect]:
        source = self.source
        assert source is not None
        begin = HandoffState.JOINING_ALONE
        if source in self._sides.running:
            begin = HandoffState.FOLLOWING if target in self.followers else HandoffState.JOINING
        before, guarded = self.before, self.continuation[target] is not Continuation.EXACT
        self.state = State.HANDOFF
        self.handoff = Handoff(source, target, reason, self._now, self._relay, before, guarded, self.overlap, begin)
        yield self._sides.start(target, self.generated, held=begin is HandoffState.FOLLOWING)

    def _in_handoff(self, handoff: Handoff, event: HandoffEvent) -> Iterable[Effect]:
        """Carry out what the handoff makes of an event."""
        was_rested = handoff.is_rested
        match handoff.on(event):
            case Feed() as order:
                yield order
            case Rest():
                yield from self._sides.cancel(handoff.source)
            case AskAgain():
                yield self._ask_again(handoff.source)
            case Joined(tokens):
                yield from self._take_over(handoff, tokens)
            case Dropped(why, error, out):
                self.handoff, self.state = None, State.RELAYING
                self.moves.append(handoff.give_up(self._now, why))
                yield from self._sides.cancel(handoff.target)
                if was_rested:
                    yield self._ask_again(handoff.source)
                if error is not None and self.source not in self._sides.running:
                    yield from self._next(handoff.target, error)
                elif error is not None and out:
                    self.failures.errors.append(error)

    def _ask_again(self, source: Side) -> Start:
        """Let a source that rested go on, from the end of all that is there."""
        self._relay.begin_anew()
        return self._sides.start(source, self.generated)

    def _take_over(self, handoff: Handoff, joined: list[Token]) -> Iterable[Effect]:
        """Make the target the source; the part of the old one's tail that was not shown is thrown away."""
        source, target, move = handoff.source, handoff.target, handoff.take_over(self._now)
        self.handoff, self.state, self.source = None, State.RELAYING, target
        self.moves.append(move)
        if source is not target:  # a restarted device continues its own answer
            yield from self._sides.cancel(source)
        yield Note(f"handoff {source} to {target} after {move.at} tokens ({move.reason})")
        if target in self._sides.running and self._relay.limits.is_reached(move.at):
            yield from self._complete(target, "length")
        for token in joined:
            if self.state is State.RELAYING and token.n_tokens and self._relay.limits.is_reached(self.n_generated):
                yield from self._complete(target, "length")
            if self.state is State.RELAYING:
                yield from self._accept(target, token)

    def _call_off(self, why: str) -> Iterable[Effect]:
        """Drop the handoff, if one is under way."""
        return self._in_handoff(self.handoff, CalledOff(why)) if self.handoff is not None else ()

    # --- the end -------------------------------------------------------------------------------------------------

    def _ended(self, side: Side, finish: Finish) -> Iterable[Effect]:
        self._sides.running.discard(side)
        if (handoff := self.handoff) is not None and side is handoff.target:
            yield from self._in_handoff(handoff, Ended(side, finish))
            if handoff.state is HandoffState.JOINED and self.state is State.RELAYING:
                yield from self._ended(side, finish)
            return
        if side in self._sides.openings:
            yield from self._open(self._sides.openings[side], Ended(side, finish))
            return
        if finish.repeated or (finish.full and self.watch.is_likely):
            self.stopped = REPETITION
        elif finish.full and self.available != {side}:
            yield from self._broke(side, EndpointError(side, CONTEXT_FULL, no_room(side)))
            return
        yield from self._sides.cancel(side.other)
        if self.state is State.RACING:
            self.source = self.winner = side
        yield from self._complete(side, self._relay.limits.end(finish), finish.stop)

    def _complete(self, side: Side, reason: str, stop: str | None = None) -> Iterable[Effect]:
        """End the answer where `side`, its source, has said enough."""
        yield from self._call_off("the source had finished before")
        yield from self._sides.cancel(side)
        yield from map(Deliver, self._relay.flush(self.source, self._now))
        self.state = State.DONE
        met = self._relay.limits.met or stop or None  # an endpoint may name what is none of the client's
        self.stop_met = met if reason == "stop" and met in self.stop else None
        if self.watch.has_stopped:
            self.stopped = REPETITION
        yield Complete(reason)

    def _broke(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        self._sides.stopped(side)
        if self.generated.pieces and error.reason == "engine_gone":
            self.failures.engine_died_midway()
        if (handoff := self.handoff) is None:
            yield from self._next(side, error)
        elif side is handoff.target:
            yield from self._in_handoff(handoff, Broke(side, error))
        else:
            self.failures.errors.append(error)
            yield from self._in_handoff(handoff, SourceGone(reason_to_move(error)))

    def _next(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        """Go on after `side` has failed: wait for what still runs, else start what is left, else fail."""
        self.failures.errors.append(error)
        if self._sides.running:
            return
        begun = bool(self.generated.pieces)
        if begun and self._relay.is_full:
            self._relay.limits.cut()  # what it said beyond, it has not ended itself
            yield from self._complete(side, "length")
            return
        target = self._succession.after(side) if self.joinable or not begun else None
        if target is None:
            yield from self._fail(self.failures.blame(begun=begun))
        elif begun:
            yield from self._hand_over(target, reason_to_move(error))
        else:
            self.state, self.source, self.winner = State.RACING, None, None  # what was said waits for a stop string
            self._relay.begin_anew()
            yield self._sides.start(target, self.generated)

    def _fail(self, error: DiscoError) -> Iterable[Effect]:
        """Show what was generated, then the error."""
        yield from map(Deliver, self._relay.flush(self.source, self._now))
        self.state = State.FAILED
        yield Fail(error)
