"""What an edge knows of an answer whose upper layers are at a partner: rows, drafts, and what was done for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...exits.calibrate import Calibration, Doubles, VerdictLearner, signals
from ...peer.edge import EdgeAnswer
from .. import wire
from ..llama.hidden import FloatRows


@dataclass(slots=True)
class SplitCounts:
    """What both machines did, for one answer or for all: see `wire.SplitUsage`."""

    edge_rows: int = 0
    partner_rows: int = 0
    round_trips: int = 0
    drafted: int = 0
    accepted: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    partner_s: float = 0.0

    def usage(self) -> wire.SplitUsage:
        """Return it as a message's part."""
        return wire.SplitUsage(
            edge_rows=self.edge_rows,
            partner_rows=self.partner_rows,
            round_trips=self.round_trips,
            drafted=self.drafted,
            accepted=self.accepted,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            partner_s=self.partner_s,
        )

    def add(self, other: SplitCounts) -> None:
        """Add what was done for another answer."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Away:
    """One answer: what the partner has of it, what was done for it, and when the partner was asked last, s.

    Of the drafts that an exit made since the last verdict, `chances` are those to be right, and `signals` (n x 3) what
    they were told from.
    """

    answer: EdgeAnswer
    counts: SplitCounts = field(default_factory=SplitCounts)
    asked_at: float = 0.0
    chances: list[float] = field(default_factory=list)
    signals: list[Doubles] = field(default_factory=list)


class ExitDrafter:
    """Drafts by the exit of a range of layers, and learns from verdicts how sure it may be (`exits.calibrate`)."""

    def __init__(self, calibration: wire.ExitCalibration) -> None:
        coefficients, scores, shares = map(np.array, (calibration.coefficients, calibration.scores, calibration.shares))
        self._learner = VerdictLearner(Calibration(coefficients, scores, shares))

    def draft(self, logits: FloatRows) -> tuple[int, float, Doubles]:
        """Return the exit's token for a row of logits, its chance to be right, and the signals it was told from."""
        found = signals(logits[np.newaxis])
        return int(logits.argmax()), float(self._learner.confidence(found)[0]), found[0]

    def learn(self, found: list[Doubles], n_right: int) -> None:
        """Learn from a verdict on drafts with these signals: the first `n_right` were right, the next one was not."""
        n = min(n_right + 1, len(found))
        if n:
            self._learner.learn(np.stack(found[:n]), np.arange(n) < n_right)
