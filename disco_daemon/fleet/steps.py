"""One change of a fleet, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .placement import Placement


class StepKind(StrEnum):
    """What a step does; the last three are the paper's performance reduction, and its end."""

    REPLICATE = "replicate"
    MOVE = "move"
    EVICT = "evict"
    LOWER_BATCH = "lower_batch"
    OFFLOAD = "offload"
    RAISE_BATCH = "raise_batch"


class Pressure(StrEnum):
    """What a host is short of."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class FleetStep:
    """A change of the modules from `first` to `last` (exclusive), at hosts `source` and `target`; and why.

    `batch` is the new limit of answers at a time, for the kinds that change it. `predicted` is what the policy expects
    of the step: the factor by which its objective changes.
    """

    kind: StepKind
    first: int = 0
    last: int = 0
    source: int | None = None
    target: int | None = None
    batch: int | None = None
    predicted: float = 1.0
    why: str = ""

    @property
    def modules(self) -> range:
        """The modules that it is about."""
        return range(self.first, self.last)

    def apply(self, placement: Placement) -> Placement:
        """Return the placement after this step. Raises ValueError if a module would be nowhere."""
        match self.kind, self.source, self.target:
            case StepKind.REPLICATE, _, int(target):
                return placement.add(self.modules, target)
            case StepKind.MOVE, int(source), int(target):
                return placement.move(self.modules, source, target)
            case StepKind.EVICT, int(source), _:
                return placement.evict(self.modules, source)
        return placement


BATCH_KINDS = (StepKind.LOWER_BATCH, StepKind.OFFLOAD, StepKind.RAISE_BATCH)
