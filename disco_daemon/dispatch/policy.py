"""Who starts when. A policy is fitted to an outlook, which gives a table; planning is a look-up in that table.

Every policy is pure and silent: it reads no clock, logs nothing and changes nothing when asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..types import Plan, Side
from .outlook import Outlook
from .table import Table, constant

INF = math.inf


class Policy(Protocol):
    """Decides the start delays of requests."""

    @property
    def name(self) -> str:
        """The name used in the configuration and in history."""
        ...

    @property
    def learns(self) -> bool:
        """Whether its table depends on the outlook."""
        ...

    def fit(self, outlook: Outlook) -> Table:
        """The table for what is known now."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same start delays for every prompt."""

    name: str
    fixed: Plan
    learns: bool = False

    def fit(self, outlook: Outlook | None = None) -> Table:
        """The table of the fixed plan, whatever the outlook."""
        del outlook
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

    def fit(self, outlook: Outlook) -> Table:
        """Two rungs, never and always; the draw between them does the rest."""
        used, other = np.array([INF, 0.0]), np.array([0.0, 0.0 if self.concurrent else INF])
        device, server = (used, other) if outlook.constrained is Side.DEVICE else (other, used)
        return Table(np.empty(0), np.array([0.0, 1.0]), device.reshape(2, 1, 1), server.reshape(2, 1, 1))
