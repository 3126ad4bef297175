"""What the policies are fitted to: the two sides and the requests, as known now."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import FloatArray
from ..estimation.context import Contexts
from ..estimation.lengths import LengthDistribution
from ..estimation.survival import Survival
from ..types import Side


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """Expectations about the next requests.

    `server` is the distribution F of the server's TTFT (`contexts`: the same, given the recent ones); `device_s` [J]
    the device's TTFT for each of `lengths.values` [J] when it is idle and loaded; `constrained` the side whose use is
    limited to the share `budget` of all prompt tokens.
    """

    server: Survival
    lengths: LengthDistribution
    device_s: FloatArray
    constrained: Side
    budget: float
    contexts: Contexts | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            msg = f"the budget is a share in [0, 1], not {self.budget}"
            raise ValueError(msg)
        if self.device_s.shape != self.lengths.values.shape:
            msg = f"one device TTFT per length: {self.device_s.shape} and {self.lengths.values.shape}"
            raise ValueError(msg)
