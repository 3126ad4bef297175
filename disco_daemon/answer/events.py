"""What happens to an answer, and what is to be done about it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DiscoError, EndpointError
from ..types import Finish, Side, Token

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


@dataclass(frozen=True, slots=True)
class Followed:
    """`side` follows, and has prefilled all it was given."""

    side: Side


@dataclass(frozen=True, slots=True)
class Move:
    """Hand the answer over to `target`, for `reason`: `cost` or `stall`."""

    target: Side
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A release may be due."""


Event = Begin | Due | Arrived | Ended | Broke | Followed | Move | Tick

# --- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start `side` after the answer so far; `n_tokens` of it are generated. A follower is `held`.

    `ids` are the token ids of the answer so far in the device's vocabulary, if they are all known.
    """

    side: Side
    answer_so_far: str = ""
    ids: tuple[int, ...] = ()
    n_tokens: int = 0
    held: bool = False


@dataclass(frozen=True, slots=True)
class Feed:
    """Give the follower `side` what the source has made meanwhile; with `go` it takes over from there."""

    side: Side
    text: str
    ids: tuple[int, ...]
    go: bool


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
class Note:
    """Tell of a handoff where a reader does not see it."""

    text: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The answer is whole."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer cannot be completed."""

    error: DiscoError


Effect = Start | Feed | SetTimer | Cancel | Deliver | Note | Complete | Fail
