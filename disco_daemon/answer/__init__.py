"""The lifecycle of one answer. PURE: an event goes in, a list of effects comes out, nothing is awaited or logged.

Theory of operation
-------------------
An answer has at most one *source*: the endpoint whose tokens the reader gets. Until the first token there is none, and
every started endpoint may become it (RACING). The first token decides: the other endpoint is cancelled in the same
step (RELAYING). From then on the answer may move to a *target* (HANDOFF): because that is cheaper, because the source
is silent, or because it has failed. The machinery is the same; only in the last case there is no source any more.

A handoff is an object with states of its own. A target that can be held (the device) *follows* first: it is given the
answer so far, then what came meanwhile, until it has caught up (FOLLOWING). Then it is let go, and its text is joined
to the answer (JOINING). Any other target joins at once. Where the source fails meanwhile, the target goes on alone
(FOLLOWING_ALONE, JOINING_ALONE). A source whose reader has enough to read may be stopped until the target comes
(FOLLOWING_RESTED, JOINING_RESTED); where it does not come, the source is asked again for what follows all that is
there. A handoff ends in JOINED, and the target is the source, or in DROPPED.

The target continues from a certain token on, the *mark*; what the source makes after it is the *tail*. The source goes
on as insurance, but the tail is shown only when the reader would have nothing else to read. The target takes over as
soon as its text covers what was shown of the tail; the rest of the tail is thrown away. A target that fails, is late,
or differs from what was shown, is dropped, and the tail is part of the answer.

The tables in `states` and `handoff` are the specification: a state lists the events that act in it, and where each may
lead. Besides the handoff these parts have a life of their own: the `sides` that run, the `opening` of one where the
client has begun the answer, the `relay` of the source's tokens to the reader, and the `succession`: which side may go
on with the answer. What repeats itself is ended by its `loop_watch` as a limit ends it, and goes nowhere from there.

Rules that hold in every state:
1. What the reader has is never changed, and is always the beginning of the answer.
2. An event of an endpoint that is not running for this answer any more changes nothing: cancelling is not
   instantaneous, and what was under way may still arrive.
3. An event that the table does not list changes nothing. A second Begin, and any other event before the first one, are
   the caller's mistake: they raise IllegalEvent, and change nothing either.
4. DONE and FAILED are final, and are entered exactly once.
"""

from .answer import Answer
from .events import (
    Arrived,
    AskAgain,
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
    IllegalEvent,
    Move,
    Note,
    Rest,
    SetTimer,
    Start,
    Tick,
)
from .handoff import GO_WITHIN, HANDOFF_TRANSITIONS, MAX_CHASES, HandoffState
from .loop_watch import REPETITION, LoopWatch
from .states import TRANSITIONS, State
from .succession import MAX_HANDOFFS, MAX_MOVES, MAX_STALLS

__all__ = [
    "GO_WITHIN",
    "HANDOFF_TRANSITIONS",
    "MAX_CHASES",
    "MAX_HANDOFFS",
    "MAX_MOVES",
    "MAX_STALLS",
    "REPETITION",
    "TRANSITIONS",
    "Answer",
    "Arrived",
    "AskAgain",
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
    "HandoffState",
    "IllegalEvent",
    "LoopWatch",
    "Move",
    "Note",
    "Rest",
    "SetTimer",
    "Start",
    "State",
    "Tick",
]
