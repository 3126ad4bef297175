"""The endpoints that work for an answer, from their start to their end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..types import Continuation, Side
from .events import Cancel, Start
from .opening import Opening
from .text import AnswerText


@dataclass(slots=True)
class Sides:
    """Which sides wait for their start (`pending`), and which have been started (`running`).

    `openings` are of those that run and may still repeat `before`, which is how the client has begun the answer.
    """

    continuation: Mapping[Side, Continuation]
    before: str
    overlap: Callable[[Side, str], str | None]
    pending: set[Side] = field(default_factory=set)
    running: set[Side] = field(default_factory=set)
    openings: dict[Side, Opening] = field(default_factory=dict)

    def start(self, side: Side, text: AnswerText, *, held: bool = False) -> Start:
        """Start a side after the answer so far."""
        self.pending.discard(side)
        self.running.add(side)
        if self.before and not text.pieces:
            guarded, overlap = self.continuation.get(side) is not Continuation.EXACT, self.overlap(side, "")
            if guarded or overlap:
                self.openings[side] = Opening(side, self.before, guarded, overlap)
        return Start(side, str(text), text.ids, text.n_generated, held)

    def cancel(self, side: Side) -> Iterable[Cancel]:
        """Stop a side, if it runs or waits for its start."""
        if side in self.running or side in self.pending:
            self.stopped(side)
            yield Cancel(side)

    def stopped(self, side: Side) -> None:
        """A side runs no more."""
        self.running.discard(side)
        self.pending.discard(side)
        self.openings.pop(side, None)
