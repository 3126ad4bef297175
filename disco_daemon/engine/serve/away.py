"""What an edge knows of an answer whose upper layers are at a partner: rows, drafts, and what was done for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...exits.calibrate import Doubles
from ...peer.edge import EdgeAnswer
from .. import wire


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
