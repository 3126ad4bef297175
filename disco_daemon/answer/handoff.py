"""One handoff under way: how the target catches up, and whether its text joins the answer. Pure.

The table is its specification, as that in `states` is an answer's. Its verdicts are carried out by the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ..delivery.seam import Diverged, Seam
from ..errors import EndpointError
from ..types import Finish, HandoffRecord, Side, Token
from .events import Arrived, AskAgain, Broke, CalledOff, Ended, Feed, Followed, HandoffEvent, Rest, SourceGone
from .failures import CONTEXT_FULL, no_room
from .relay import Relay
from .text import ids_of

GO_WITHIN = 8  # tokens; a follower that lacks no more is let go: it prefills them in one step
MAX_CHASES = 8  # feeds of a follower; then it goes however much it lacks: the source is as fast as it can prefill
IS_OUT = frozenset({"restart", CONTEXT_FULL})  # a target dropped for these does not serve this answer again


class HandoffState(StrEnum):
    """Where a handoff is in its life. *Alone*: its source has failed, the target goes on all the same.

    *Rested*: its source was stopped, and is asked again where the target does not come.
    """

    FOLLOWING = "following"  # the target is held, and prefills what the source makes
    FOLLOWING_RESTED = "following_rested"
    FOLLOWING_ALONE = "following_alone"
    JOINING = "joining"  # the target generates, and its text is compared with what the reader has
    JOINING_RESTED = "joining_rested"
    JOINING_ALONE = "joining_alone"
    JOINED = "joined"  # the target is the source from now on
    DROPPED = "dropped"


# Followed, Arrived, Ended and Broke are the target's here.
HANDOFF_TRANSITIONS: dict[HandoffState, dict[type, frozenset[HandoffState]]] = {
    HandoffState.FOLLOWING: {
        Followed: frozenset({HandoffState.FOLLOWING, HandoffState.JOINING}),
        Ended: frozenset({HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        Rest: frozenset({HandoffState.FOLLOWING, HandoffState.FOLLOWING_RESTED}),
        SourceGone: frozenset({HandoffState.FOLLOWING_ALONE}),
        CalledOff: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.FOLLOWING_RESTED: {
        Followed: frozenset({HandoffState.JOINING_RESTED}),
        Ended: frozenset({HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        AskAgain: frozenset({HandoffState.FOLLOWING}),
    },
    HandoffState.FOLLOWING_ALONE: {
        Followed: frozenset({HandoffState.JOINING_ALONE}),
        Ended: frozenset({HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINING: {
        Arrived: frozenset({HandoffState.JOINING, HandoffState.JOINED, HandoffState.DROPPED}),
        Ended: frozenset({HandoffState.JOINED, HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        Rest: frozenset({HandoffState.JOINING, HandoffState.JOINING_RESTED}),
        SourceGone: frozenset({HandoffState.JOINING_ALONE}),
        CalledOff: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINING_RESTED: {
        Arrived: frozenset({HandoffState.JOINING_RESTED, HandoffState.JOINED, HandoffState.DROPPED}),
        Ended: frozenset({HandoffState.JOINED, HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        AskAgain: frozenset({HandoffState.JOINING}),
    },
    HandoffState.JOINING_ALONE: {
        Arrived: frozenset({HandoffState.JOINING_ALONE, HandoffState.JOINED, HandoffState.DROPPED}),
        Ended: frozenset({HandoffState.JOINED, HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINED: {},
    HandoffState.DROPPED: {},
}


@dataclass(frozen=True, slots=True)
class Joined:
    """The target takes over, and these tokens are the first of its own."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Dropped:
    """The target is cancelled. `error` is its failure, if it was one; `out` says that it cannot serve this answer."""

    why: str
    error: EndpointError | None = None
    out: bool = True


ALONE = frozenset({HandoffState.FOLLOWING_ALONE, HandoffState.JOINING_ALONE})
RESTS = {HandoffState.FOLLOWING: HandoffState.FOLLOWING_RESTED, HandoffState.JOINING: HandoffState.JOINING_RESTED}
JOINING_OF = {
    HandoffState.FOLLOWING: HandoffState.JOINING,
    HandoffState.FOLLOWING_RESTED: HandoffState.JOINING_RESTED,
    HandoffState.FOLLOWING_ALONE: HandoffState.JOINING_ALONE,
}
GOES_ON = {rested: living for living, rested in RESTS.items()}
Verdict = Feed | Joined | Dropped | Rest | AskAgain | None


@dataclass(slots=True)
class Handoff:
    """A handoff from `source` to `target`, begun at `begun_s`.

    `relay` is the answer's own, and has its text; `before` is how the client has begun it. `guarded`: the target may
    start the answer again, or end without saying anything new. `overlap` gives what the target repeats of a text. The
    source may rest once: `has_rested`.
    """

    source: Side
    target: Side
    reason: str
    begun_s: float
    relay: Relay
    before: str
    guarded: bool
    overlap: Callable[[Side, str], str | None]
    state: HandoffState
    has_rested: bool = False
    _mark: int = 0  # the number of the first piece of the tail, once the target was let go
    _at: int = 0  # tokens and characters generated when it was begun
    _at_char: int = 0
    _n_fed: int = 0  # pieces the target was given
    _n_chases: int = 0
    _seam: Seam | None = None  # None while the target follows
    _repeated: str | None = None  # what the target was asked to repeat
    _n_chars: int = 0  # of the target's text so far
    _is_asked_again: bool = False  # the source that rested

    def __post_init__(self) -> None:
        text = self.relay.text
        self._at, self._at_char, self._n_fed = text.n_generated, len(str(text)), len(text.pieces)
        if self.state is not HandoffState.FOLLOWING:
            self._set_mark()

    @property
    def may_rest(self) -> bool:
        """Whether the source may be stopped now: it lives, and whoever goes on after this text does so at a token."""
        fit = self.reason == "cost" and self.state in RESTS and not (self.has_rested or self.relay.is_full)
        return fit and self.relay.text.ends_with_a_token

    @property
    def is_rested(self) -> bool:
        """Whether the source was stopped, and may be asked again."""
        return self.state in GOES_ON

    def on(self, event: HandoffEvent) -> Verdict:
        """Take one event of the target, or about the source; an event that the table does not list changes nothing."""
        reachable, was_rested = HANDOFF_TRANSITIONS[self.state].get(type(event)), self.is_rested
        if reachable is None:
            return None
        verdict = self._verdict(event)
        if isinstance(verdict, Joined):
            self.state = HandoffState.JOINED
        elif isinstance(verdict, Dropped):
            self.state = HandoffState.DROPPED
            self._is_asked_again |= was_rested
        assert self.state in reachable, (event, self.state)
        return verdict

    def take_over(self, now: float) -> HandoffRecord:
        """Throw away what was not shown of the source's tail; return the record: the target's text begins here."""
        n_removed, text = self.relay.retract_tail(self._mark, self.source), self.relay.text
        took_s, at_char = now - self.begun_s, len(str(text))
        return HandoffRecord(
            text.n_generated, self.source, self.target, self.reason, took_s, n_removed, at_char=at_char,
            paused=self.has_rested, asked_again=self._is_asked_again,
        )  # fmt: skip

    def give_up(self, now: float, why: str) -> HandoffRecord:
        """Make the source's tail part of the answer; return the record, which says `why`."""
        self.relay.adopt_tail()
        took_s = now - self.begun_s
        return HandoffRecord(
            self._at, self.source, self.target, self.reason, took_s, dropped=why, at_char=self._at_char,
            paused=self.has_rested, asked_again=self._is_asked_again,
        )  # fmt: skip

    def _verdict(self, event: HandoffEvent) -> Verdict:
        try:
            match event:
                case Arrived(token=token):
                    return self._compare(token)
                case Followed():
                    return self._feed()
                case Ended(finish=finish):
                    return self._end(finish)
                case Broke(error=error):
                    return Dropped(error.reason, error)
                case Rest():
                    return self._stop_source()
                case AskAgain():
                    self.state, self._is_asked_again = GOES_ON[self.state], True
                    return event
                case SourceGone(reason=reason):
                    self._go_alone(reason)
                    return None
                case CalledOff(why=why):
                    return Dropped(why)
        except Diverged as e:
            reason = CONTEXT_FULL if e.reason == CONTEXT_FULL else "diverged"
            return Dropped(e.reason, EndpointError(self.target, reason, str(e)), out=e.reason in IS_OUT)

    @property
    def _is_alone(self) -> bool:
        return self.state in ALONE

    def _stop_source(self) -> Rest | None:
        if not self.may_rest:
            return None
        self.state, self.has_rested = RESTS[self.state], True
        return Rest()

    def _go_alone(self, reason: str) -> None:
        """Go on without the source, now for this reason."""
        self.reason = reason
        follows = self.state is HandoffState.FOLLOWING
        self.state = HandoffState.FOLLOWING_ALONE if follows else HandoffState.JOINING_ALONE

    def _feed(self) -> Feed:
        """Give the follower the rest, and let it go when that is little, or when no more will come."""
        text = self.relay.text
        rest = text.pieces[self._n_fed :]
        self._n_fed = len(text.pieces)
        self._n_chases += 1
        nothing_comes = self.state is not HandoffState.FOLLOWING
        go = nothing_comes or sum(t.n_tokens for t in rest) <= GO_WITHIN or self._n_chases > MAX_CHASES
        if go:
            self.state = JOINING_OF[self.state]
            self._set_mark()
        all_known = bool(text.ids)  # a piece's ids may belong to pieces before it
        return Feed(self.target, "".join(t.text for t in rest), ids_of(rest) if all_known else (), go)

    def _set_mark(self) -> None:
        """Set the mark: from here on the target continues, and later tokens of the source are the tail."""
        self._mark, text = len(self.relay.text.pieces), str(self.relay.text)
        self._repeated = self.overlap(self.target, text)
        self._seam = Seam(self.before + text, guarded=self.guarded, overlap=self._repeated)
        self.relay.buffer.mark()

    def _compare(self, token: Token) -> Joined | None:
        """Join the target's text where it covers what was shown of the tail. Raises Diverged."""
        assert self._seam is not None
        self._seam.feed(token)
        self._n_chars += len(token.text)
        tokens = self._seam.join(self.relay.buffer.tail_released)
        return None if tokens is None else Joined(tokens)

    def _end(self, finish: Finish) -> Joined:
        """Join the text of a target that has ended, now or never. Raises Diverged."""
        full = Diverged(CONTEXT_FULL, no_room(self.target))
        if self._seam is None:  # held, and ended all the same
            raise full if finish.full else Diverged("refused", "the target cannot take so long an answer")
        shown = self.relay.buffer.tail_released
        tokens = self._seam.ended(shown)
        if finish.full and (not tokens or not self._is_alone):
            raise full
        within = self._n_chars and not (self._seam.swallowed or self._repeated or shown)
        # It said what was there already: up to its limit, or not even all of it.
        if self.guarded and not tokens and (finish.reason == "length" or within):
            raise Diverged("restart", "the continuation is nothing new")
        return Joined(tokens)
