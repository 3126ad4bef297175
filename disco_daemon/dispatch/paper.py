"""DiSCo's dispatch, Algorithms 2 and 3 (Sun, Wang, Lai: "DiSCo", ACL Findings 2025), with one correction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray
from ..types import Side
from .policy import PolicyInput
from .table import Table, edges_of

PACED_RUNGS = 41  # budgets a paced table is made for: every 2.5 points


@dataclass(frozen=True, slots=True)
class Paper:
    """The published policy. `alpha` is the share of the budget kept for the tail; `paced` makes it obey a pacer.

    As published it is fitted once to its budget and has no feedback; `paced=True` fits it to a ladder of budgets, so
    that the same pacer can steer it as steers `optimal`.
    """

    alpha: float = 0.05
    paced: bool = False
    learns: bool = True

    @property
    def name(self) -> str:
        """`paper` or `paper-paced`."""
        return "paper-paced" if self.paced else "paper"

    def fit(self, inputs: PolicyInput) -> Table:
        """The table of waits (device-constrained) or of the length threshold (server-constrained)."""
        if inputs.constrained is Side.SERVER:
            return self._server_constrained(inputs)
        edges = edges_of(inputs.lengths.values)
        if not self.paced:
            waits = device_waits(inputs, inputs.budget, self.alpha)[None, None]
            return Table(edges, np.array([inputs.budget]), waits, np.zeros_like(waits))
        budgets = np.linspace(0.0, 1.0, PACED_RUNGS)
        waits = np.stack([device_waits(inputs, b, self.alpha) for b in budgets.tolist()])[:, None]
        return Table(edges, budgets, waits, np.zeros_like(waits))

    def _server_constrained(self, inputs: PolicyInput) -> Table:
        """Algorithm 3: the device always starts; prompts of at least l_th tokens ask the server too, at once.

        The boundary length is split at random, since with whole lengths no threshold meets the budget exactly.
        """
        values = inputs.lengths.values
        n = len(values)
        spent = (values * inputs.lengths.shares)[::-1].cumsum()
        spent /= spent[-1]  # the part of the budget that serving the k + 1 longest lengths takes
        # Unless paced, the two thresholds around the budget: the draw between them splits the boundary length.
        k = int(spent.searchsorted(inputs.budget, "right"))
        served = range(n + 1) if self.paced else range(k, min(k + 1, n) + 1)
        budgets = np.array([spent[k - 1] if k else 0.0 for k in served])
        server = np.zeros((len(served), 1, n))
        for rung, k in enumerate(served):
            server[rung, 0, : n - k] = math.inf
        return Table(edges_of(values), budgets, np.zeros(server.shape), server)


def device_waits(inputs: PolicyInput, budget: float, alpha: float) -> FloatArray:
    """Algorithm 2, device-constrained: how long the device waits for each length; [J], s.

    A tail share min(alpha, b) is kept for requests whose server is slower than w_tail = F^-1(1 - alpha). What is left
    starts the device at once for the shortest prompts; the boundary length gets w* in between. The published line 18
    searches in the wrong direction: with nothing left it would start the device at once. The device runs with
    probability 1 - F(w), and alpha of that is paid for already, hence w* = F^-1(1 - alpha - available / share(l)),
    shares and budget being normalised by E[l].
    """
    alpha = min(alpha, budget)
    w_tail = float(inputs.server.quantile(1 - alpha))
    shares = inputs.lengths.token_shares
    waits = np.full(len(shares), w_tail)
    available = budget - alpha
    if available <= 0:
        return waits
    needed = shares.cumsum()
    needed *= 1 - alpha
    boundary = int(needed.searchsorted(available + 1e-12, side="right"))
    waits[:boundary] = 0.0
    if boundary < len(waits):
        left = available - (needed[boundary - 1] if boundary else 0.0)
        level = min(1.0, max(0.0, 1 - alpha - left / shares[boundary]))
        waits[boundary] = min(w_tail, float(inputs.server.quantile(level)))
    return waits
