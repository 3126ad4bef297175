"""The failures of an answer's endpoints, and which error the reader gets. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import DiscoError, EndpointError
from ..types import Side

CONTEXT_FULL = "context_full"  # why an endpoint could not go on


@dataclass(slots=True)
class Failures:
    """The errors of one answer so far, in order."""

    errors: list[EndpointError] = field(default_factory=list)
    n_died_midway: int = 0  # deaths of the engine after the reader had got something

    def engine_died_midway(self) -> None:
        """Count a death of the engine in mid-answer."""
        self.n_died_midway += 1

    def has(self, side: Side) -> bool:
        """Whether `side` has failed for this answer."""
        return any(error.side is side for error in self.errors)

    def blame(self, *, begun: bool) -> DiscoError:
        """The error to show: the request's own fault if an endpoint says so, else that of the first side that failed.

        Where the context of one was full, the message also says why the other one could not go on.
        """
        full = next((e for e in self.errors if e.reason in (CONTEXT_FULL, "context_length_exceeded")), None)
        if begun and full is not None:
            other, why = full.side.other, next((f": {e}" for e in self.errors if e.side is not full.side), "")
            return EndpointError(full.side, CONTEXT_FULL, f"{full}, and the {other} cannot go on with it{why}")
        return next((e for e in self.errors if e.your_fault), self.errors[0])


def no_room(side: Side) -> str:
    """The message for a side whose context is full."""
    return f"the answer fills the context of the {side}"


def reason_to_move(error: EndpointError) -> str:
    """The reason of a handoff after this error."""
    return "context" if error.reason == CONTEXT_FULL else "failure"
