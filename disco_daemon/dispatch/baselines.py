"""The baselines: policies with fixed delays, and policies that draw a side at random. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..types import Plan, Side
from .policy import PolicyInput
from .table import Table, constant

INF = math.inf


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same start delays for every prompt."""

    name: str
    fixed: Plan
    learns: bool = False

    def fit(self, inputs: PolicyInput | None = None) -> Table:
        """Return the table of the fixed plan, whatever the input."""
        del inputs
        return constant(self.fixed)


@dataclass(frozen=True, slots=True)
class Stochastic:
    """The paper's baselines: the constrained side is used for a share b of the requests, drawn at random.

    `concurrent`: the other side runs for every request; otherwise (exclusive) each request goes to one side only.
    """

    concurrent: bool
    learns: bool = True

    @property
    def name(self) -> str:
        """`stochastic` (exclusive) or `stochastic-concurrent`."""
        return "stochastic-concurrent" if self.concurrent else "stochastic"

    def fit(self, inputs: PolicyInput) -> Table:
        """Return two rungs, never and always; the draw between them does the rest."""
        used, other = np.array([INF, 0.0]), np.array([0.0, 0.0 if self.concurrent else INF])
        device, server = (used, other) if inputs.constrained is Side.DEVICE else (other, used)
        return Table(np.empty(0), np.array([0.0, 1.0]), device.reshape(2, 1, 1), server.reshape(2, 1, 1))
