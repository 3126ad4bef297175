"""What the conductor and an endpoint at work say to each other, besides tokens: orders down, and reports up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hold:
    """Order: go back to the end of what was given, keep its prefill, and wait; tokens made so far are thrown away."""


@dataclass(frozen=True, slots=True)
class Append:
    """Order: add answer text that came from elsewhere, and its token ids where known; with `go` generate from there."""

    text: str
    ids: tuple[int, ...] = ()
    go: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """Order: the reader takes `pace_tps` token/s from now on; None: as fast as they come."""

    pace_tps: float | None


Order = Hold | Append | Pace  # from the conductor to an answer that an endpoint works on


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A held answer has prefilled all it was given, and waits for more or for the word to go."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The endpoint's own scheduler lets the answer wait (`paused`), or go on again: meanwhile it says nothing."""

    paused: bool
