"""The lifecycle of one answer. PURE: an event goes in, a list of effects comes out, nothing is awaited or logged.

Theory of operation
-------------------
An answer has at most one *source*: the endpoint whose tokens the reader gets. Until the first token there is none, and
every started endpoint may become it (RACING). The first token decides: the other endpoint is cancelled in the same
step (RELAYING). When the source fails, the answer moves to a *target* (HANDOFF), whose text must connect to what was
delivered; its first joined token makes it the source. A failure before the first token simply starts whatever is left.

Rules that hold in every state:
1. Only the source's tokens are delivered, in the order they came.
2. An event of an endpoint that is not running for this answer any more changes nothing: cancelling is not
   instantaneous, and what was under way may still arrive.
3. An event that the table does not allow raises IllegalEvent and changes nothing.
4. DONE and FAILED are final, and are entered exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .delivery.seam import Diverged, Seam
from .errors import DiscoError, EndpointError, Unavailable
from .types import BOTH, Continuation, Finish, Plan, Side, Token

MAX_HANDOFFS = 2  # DESIGN §7


class State(StrEnum):
    """Where an answer is in its life."""

    PLANNED = "planned"
    RACING = "racing"
    RELAYING = "relaying"
    HANDOFF = "handoff"
    DONE = "done"
    FAILED = "failed"


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Execute the plan."""


@dataclass(frozen=True, slots=True)
class Due:
    """The start delay of `side` has passed."""

    side: Side


@dataclass(frozen=True, slots=True)
class Arrived:
    """A token of `side`."""

    side: Side
    token: Token


@dataclass(frozen=True, slots=True)
class Ended:
    """`side` has finished its answer regularly."""

    side: Side
    finish: Finish


@dataclass(frozen=True, slots=True)
class Broke:
    """`side` failed."""

    side: Side
    error: EndpointError


Event = Begin | Due | Arrived | Ended | Broke

# --- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start `side`, to continue after `answer_so_far`."""

    side: Side
    answer_so_far: str = ""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send Due(side) after `delay_s`."""

    side: Side
    delay_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop `side`: its timer, its prefill or its generation."""

    side: Side


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give a token to the reader."""

    token: Token


@dataclass(frozen=True, slots=True)
class Complete:
    """The answer is whole."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer cannot be completed."""

    error: DiscoError


Effect = Start | SetTimer | Cancel | Deliver | Complete | Fail

# --- the table ----------------------------------------------------------------------------------------------------

# state -> event -> the states it may lead to. docs/architecture.md's diagram is generated from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.PLANNED: {Begin: frozenset({State.RACING, State.FAILED})},
    State.RACING: {
        Due: frozenset({State.RACING}),
        Arrived: frozenset({State.RACING, State.RELAYING}),
        Ended: frozenset({State.RACING, State.DONE}),
        Broke: frozenset({State.RACING, State.FAILED}),
    },
    State.RELAYING: {
        Due: frozenset({State.RELAYING}),
        Arrived: frozenset({State.RELAYING}),
        Ended: frozenset({State.RELAYING, State.DONE}),
        Broke: frozenset({State.RELAYING, State.HANDOFF, State.DONE, State.FAILED}),
    },
    State.HANDOFF: {
        Due: frozenset({State.HANDOFF}),
        Arrived: frozenset({State.HANDOFF, State.RELAYING, State.FAILED}),
        Ended: frozenset({State.HANDOFF, State.DONE}),
        Broke: frozenset({State.HANDOFF, State.FAILED}),
    },
    State.DONE: {e: frozenset({State.DONE}) for e in (Due, Arrived, Ended, Broke)},
    State.FAILED: {e: frozenset({State.FAILED}) for e in (Due, Arrived, Ended, Broke)},
}


class IllegalEvent(RuntimeError):
    """The conductor sent an event that the state table does not allow."""


@dataclass(slots=True)
class Answer:
    """One answer.

    `available` are the endpoints that can serve this request, `max_tokens` is what the client allows, `continuation`
    how well each endpoint continues a partial answer, `joinable` whether two endpoints may share this one at all.
    """

    plan: Plan
    available: frozenset[Side]
    max_tokens: int | None = None
    continuation: Mapping[Side, Continuation] = field(default_factory=lambda: dict.fromkeys(Side, Continuation.EXACT))
    joinable: bool = True
    state: State = State.PLANNED
    source: Side | None = None
    winner: Side | None = None
    handoffs: int = 0
    pieces: list[str] = field(default_factory=list)
    tokens: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    errors: list[EndpointError] = field(default_factory=list)
    _running: set[Side] = field(default_factory=set)
    _pending: set[Side] = field(default_factory=set)
    _seam: Seam | None = None
    _n_held: int = 0  # tokens whose text the seam still holds
    _n_died_midway: int = 0  # deaths of the engine after the reader had got something

    @property
    def text(self) -> str:
        """What the reader has."""
        return "".join(self.pieces)

    @property
    def n_delivered(self) -> int:
        """Tokens the reader has."""
        return sum(self.tokens.values())

    def __repr__(self) -> str:
        return f"<Answer {self.state} source={self.source} {self.n_delivered} tok, {self.handoffs} handoffs>"

    def on(self, event: Event) -> list[Effect]:
        """Take one event; return the effects to carry out, in order. Raises IllegalEvent and then changes nothing."""
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            msg = f"{type(event).__name__} is not allowed in state {self.state}"
            raise IllegalEvent(msg)
        if self.state in (State.DONE, State.FAILED):
            return []
        effects = list(self._dispatch(event))
        assert self.state in allowed, (event, self.state)
        return effects

    def _dispatch(self, event: Event) -> Iterable[Effect]:
        match event:
            case Begin():
                return self._begin()
            case Due(side=side):
                return self._start(side) if side in self._pending else ()
            case Arrived(side=side, token=token):
                return self._arrived(side, token) if side in self._running else ()
            case Ended(side=side, finish=finish):
                return self._ended(side, finish) if side in self._running else ()
            case Broke(side=side, error=error):
                return self._broke(side, error) if side in self._running else ()

    # --- racing --------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterable[Effect]:
        plan = self.plan = self.plan.restricted(self.available)
        if not self.available:
            yield self._fail(Unavailable("no endpoint can serve this request"))
            return
        self.state = State.RACING
        for side in sorted(self.available, key=lambda side: (plan.delay(side), side)):
            delay = plan.delay(side)
            if delay == 0:
                yield from self._start(side)
            elif math.isfinite(delay):
                self._pending.add(side)
                yield SetTimer(side, delay)

    def _start(self, side: Side) -> Iterable[Effect]:
        self._pending.discard(side)
        self._running.add(side)
        yield Start(side, self.text)

    def _cancel(self, side: Side) -> Iterable[Effect]:
        if side in self._running or side in self._pending:
            self._running.discard(side)
            self._pending.discard(side)
            yield Cancel(side)

    def _arrived(self, side: Side, token: Token) -> Iterable[Effect]:
        if self.state is State.RACING:
            yield from self._cancel(side.other)
            self.state, self.source, self.winner = State.RELAYING, side, side
        elif self.state is State.HANDOFF:
            yield from self._join(side, token)
            return
        yield from self._deliver(side, token)

    def _deliver(self, side: Side, token: Token) -> Iterable[Effect]:
        self.pieces.append(token.text)
        self.tokens[side] += token.n_tokens
        if token.delta or token.logprobs:
            self.joinable = False  # half a tool call, or a hidden thought, cannot be continued by somebody else
        yield Deliver(token)

    # --- handoff after a failure ---------------------------------------------------------------------------------

    def _join(self, side: Side, token: Token) -> Iterable[Effect]:
        assert self._seam is not None
        try:
            text = self._seam.feed(token.text)
        except Diverged as e:
            yield from self._cancel(side)
            yield from self._next(side, EndpointError(side, "diverged", str(e)))
            return
        self._n_held += token.n_tokens
        if text or token.delta:
            self.state, self.source = State.RELAYING, side
            n_tokens = token.n_tokens if self._seam.swallowed else self._n_held
            self._n_held = 0
            yield from self._deliver(side, Token(text, n_tokens, token.delta, token.logprobs))

    def _ended(self, side: Side, finish: Finish) -> Iterable[Effect]:
        yield from self._cancel(side.other)
        self._running.discard(side)
        if self.state is State.RACING:
            self.source = self.winner = side
        if self._seam is not None and self.state is State.HANDOFF:
            self.source = side
            rest = self._seam.flush()
            if rest:
                yield from self._deliver(side, Token(rest, self._n_held))
        self.state = State.DONE
        yield Complete(finish.reason)

    def _broke(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        self._running.discard(side)
        if self.pieces and error.reason == "engine_gone":
            self._n_died_midway += 1
        yield from self._next(side, error)

    def _next(self, side: Side, error: EndpointError) -> Iterable[Effect]:
        """`side` has failed: wait for what still runs, else start what is left, else fail."""
        self.errors.append(error)
        if self._running:
            return
        if self.pieces and self.max_tokens is not None and self.n_delivered >= self.max_tokens:
            self.state = State.DONE
            yield Complete("length")
            return
        target = self._target(side)
        if target is None:
            yield self._fail(self._blame())
            return
        if self.pieces:
            self.state = State.HANDOFF
            self.handoffs += 1
            guarded = self.continuation[target] is Continuation.GUARDED
            self._seam, self._n_held = Seam(self.text if guarded else ""), 0
        yield from self._start(target)

    def _target(self, side: Side) -> Side | None:
        """Who goes on after `side` has failed.

        1. Nobody, when the reader's part cannot be continued or moved too often.
        2. The other endpoint, if it has not failed for this answer; it may have lost the race.
        3. The device once more, if its engine died in mid-answer and the server has failed since or cannot continue:
           it is restarted within seconds. Alone it gets no second chance: a request that kills the engine would kill
           it again.
        """
        if self.pieces and (self.handoffs >= MAX_HANDOFFS or not self.joinable):
            return None
        failed = {e.side for e in self.errors}
        mute = self.pieces and self.continuation.get(side.other) is Continuation.NONE
        if side.other in self.available and side.other not in failed and not mute:
            return side.other
        died_now = self.errors[-1].reason == "engine_gone"
        if self._n_died_midway == 1 and self.available == BOTH and ((mute and died_now) or side is Side.SERVER):
            return Side.DEVICE
        return None

    def _blame(self) -> DiscoError:
        """The error to show: the request's own fault if an endpoint says so, else the first side that failed."""
        return next((e for e in self.errors if e.your_fault), self.errors[0])

    def _fail(self, error: DiscoError) -> Fail:
        self.state = State.FAILED
        return Fail(error)
