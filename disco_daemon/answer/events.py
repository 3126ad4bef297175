"""The events of an answer, its effects, and the two events that only its handoff gets."""

from __future__ import annotations

import msgspec

from ..errors import DiscoError, EndpointError
from ..types import Finish, Side, Token

# The garbage collector does not walk the two that come with each token: they are in no cycle. One with an error may be.

# --- events -------------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """Execute the plan."""


class Due(msgspec.Struct, frozen=True):
    """The start delay of `side` has passed."""

    side: Side


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A token of `side`."""

    side: Side
    token: Token


class Ended(msgspec.Struct, frozen=True):
    """`side` has finished its answer regularly."""

    side: Side
    finish: Finish


class Broke(msgspec.Struct, frozen=True):
    """`side` failed."""

    side: Side
    error: EndpointError


class Followed(msgspec.Struct, frozen=True):
    """`side` is held, and has prefilled all it was given."""

    side: Side


class Move(msgspec.Struct, frozen=True):
    """Hand the answer over to `target`, for `reason`: `cost` or `stall`."""

    target: Side
    reason: str


class Rest(msgspec.Struct, frozen=True):
    """Stop the source of the handoff: what the reader has in stock lasts until the target comes."""


class AskAgain(msgspec.Struct, frozen=True):
    """Ask the source that rests to go on: the target has not come, and the stock runs low."""


class Tick(msgspec.Struct, frozen=True):
    """A release may be due."""


Event = Begin | Due | Arrived | Ended | Broke | Followed | Move | Rest | AskAgain | Tick


class IllegalEvent(RuntimeError):
    """The conductor sent a second Begin, or another event before the first one."""


class SourceGone(msgspec.Struct, frozen=True):
    """The source of a handoff has failed; the handoff goes on for this `reason`."""

    reason: str


class CalledOff(msgspec.Struct, frozen=True):
    """The answer ends or cannot move any more: the handoff is dropped, `why` goes into the record."""

    why: str


HandoffEvent = Followed | Arrived | Ended | Broke | Rest | AskAgain | SourceGone | CalledOff

# --- effects ------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Start `side` after the answer so far; `n_tokens` of it are generated. A follower is `held`.

    `ids` are the token ids of the answer so far in the device's vocabulary, if they are all known.
    """

    side: Side
    answer_so_far: str = ""
    ids: tuple[int, ...] = ()
    n_tokens: int = 0
    held: bool = False


class Feed(msgspec.Struct, frozen=True):
    """Give the follower `side` what the source has made meanwhile; with `go` it continues from there."""

    side: Side
    text: str
    ids: tuple[int, ...]
    go: bool


class SetTimer(msgspec.Struct, frozen=True):
    """Send Due(side) after `delay_s`."""

    side: Side
    delay_s: float


class Cancel(msgspec.Struct, frozen=True):
    """Stop `side`: its timer, its prefill or its generation."""

    side: Side


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Give a token to the reader."""

    token: Token


class Note(msgspec.Struct, frozen=True):
    """Mention a handoff where a reader does not see it."""

    text: str


class Complete(msgspec.Struct, frozen=True):
    """The answer is whole."""

    reason: str


class Fail(msgspec.Struct, frozen=True):
    """The answer cannot be completed."""

    error: DiscoError


Effect = Start | Feed | SetTimer | Cancel | Deliver | Note | Complete | Fail
