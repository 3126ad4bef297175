"""The protocol of a policy, and the input that it is fitted to: estimates of both sides and of the requests.

Fitting gives a table of start delays; planning is a look-up in that table. Every policy is pure and silent: it reads no
clock, logs nothing and changes nothing when asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..arrays import FloatArray
from ..estimation.lengths import LengthDistribution
from ..estimation.survival import Survival
from ..estimation.ttft_context import Contexts
from ..types import Side
from .table import Table


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInput:
    """Estimates of the two sides and of the next requests.

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


class Policy(Protocol):
    """Decides the start delays of requests."""

    @property
    def name(self) -> str:
        """The name used in the configuration and in history."""
        ...

    @property
    def learns(self) -> bool:
        """Whether its table depends on the input."""
        ...

    def fit(self, inputs: PolicyInput) -> Table:
        """Return the table for `inputs`."""
        ...
