"""Two variants of DiSCo's policy, to be compared with: its tail share well chosen, and its text instead of Algorithm 2.

Both serve prompts by length where the server is constrained, as `paper` does: the variants are of the device's waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disco_daemon.arrays import FloatArray, distinct
from disco_daemon.dispatch.optimal import CVAR_SHARE, KAPPA, TAIL_SHARE
from disco_daemon.dispatch.paper import PACED_RUNGS, Paper, device_waits
from disco_daemon.dispatch.policy import PolicyInput
from disco_daemon.dispatch.table import Table, edges_of
from disco_daemon.types import Side

ALPHAS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)  # tail shares to choose from
N_TAUS = 48  # candidates for the start of the worst 1 %, over three decades
BISECTIONS = 50  # halvings of the logarithm of beta, s a token, over its range
BETA_RANGE = (1e-9, 1e6)
N_SHORT = 12  # numbers of lengths below l_th that are tried
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PaperTuned:
    """Algorithm 2 with the alpha that is best by the objective of `optimal`, for each budget, on what it is fitted to.

    The paper does not say which alpha it has used. So this is the strongest policy of its form: mean + `kappa` CVaR
    decide, as they do in `optimal`.
    """

    kappa: float = KAPPA
    learns: bool = True
    name: str = "paper-tuned"

    def fit(self, inputs: PolicyInput) -> Table:
        """Return the table of waits, a rung for each of a ladder of budgets."""

        def best_waits(budget: float) -> FloatArray:
            found = [device_waits(inputs, budget, alpha) for alpha in ALPHAS]
            return min(found, key=lambda waits: objective(inputs, waits, self.kappa))

        return _ladder(inputs, best_waits)


@dataclass(frozen=True, slots=True)
class PaperText:
    """The paper's Equations 1 and 2: a prompt of l tokens waits for min(beta l, w_tail), one of up to l_th not at all.

    The two equations have two unknowns, beta and l_th, and no third equation says which. With the longest l_th that the
    budget allows they are Algorithm 2. Here l_th is the one that is best by the objective of `optimal`, of N_SHORT. As
    in `device_waits`, alpha of each length is paid for by the tail: the device runs with the probability
    max(1 - F(beta l), alpha), and beta is such that this spends what the short prompts leave of b.
    """

    alpha: float = 0.05
    kappa: float = KAPPA
    learns: bool = True
    name: str = "paper-eq1"

    def fit(self, inputs: PolicyInput) -> Table:
        """Return the table of waits, a rung for each of a ladder of budgets."""
        numbers = distinct(np.linspace(0, len(inputs.lengths.values), N_SHORT).astype(int)).tolist()

        def best_waits(budget: float) -> FloatArray:
            found = [proportional_waits(inputs, budget, self.alpha, n) for n in numbers]
            return min(
                (waits for waits in found if waits is not None),
                key=lambda waits: objective(inputs, waits, self.kappa),
            )

        return _ladder(inputs, best_waits)


def _ladder(inputs: PolicyInput, waits_at: Callable[[float], FloatArray]) -> Table:
    if inputs.constrained is Side.SERVER:
        return Paper(paced=True).fit(inputs)
    budgets = np.linspace(0.0, 1.0, PACED_RUNGS)
    waits = np.stack([waits_at(budget) for budget in budgets.tolist()])[:, None]
    return Table(edges_of(inputs.lengths.values), budgets, waits, np.zeros_like(waits))


def proportional_waits(inputs: PolicyInput, budget: float, alpha: float, n_short: int) -> FloatArray | None:
    """Return min(beta l, w_tail) for each length, [J] s; with this beta the device runs on `budget` of all tokens.

    The `n_short` shortest lengths do not wait; None if they alone take more than the budget.
    """
    alpha = min(alpha, budget)
    w_tail = float(inputs.server.quantile(1 - alpha))
    lengths, shares = inputs.lengths.values, inputs.lengths.token_shares
    is_short = np.arange(len(lengths)) < n_short

    def spent(waits: FloatArray) -> float:
        return float(shares @ np.where(is_short, 1.0, np.maximum(inputs.server.at(waits), alpha)))

    def waits_with(beta: float) -> FloatArray:
        return np.where(is_short, 0.0, np.minimum(beta * lengths, w_tail))

    low, high = BETA_RANGE
    if n_short and spent(waits_with(high)) > budget + ROUNDING:
        return None
    for _ in range(BISECTIONS):
        beta = float(np.sqrt(low * high))
        low, high = (beta, high) if spent(waits_with(beta)) > budget else (low, beta)
    return waits_with(high)


def objective(inputs: PolicyInput, waits: FloatArray, kappa: float) -> float:
    """Return E[X] + kappa CVaR(X), s, of the first token X = min(T_s, w + T_d(l)) with these waits, [J] s.

    CVaR is that of `optimal`: the least of tau + E[(X - tau)+] / share (Rockafellar and Uryasev 2000).
    """
    shares = inputs.lengths.shares
    latest = waits + inputs.device_s
    mean = inputs.server.mean_below(latest)
    taus = np.geomspace(1e-3, 1.0, N_TAUS) * float(latest.max())
    late = np.maximum(mean - inputs.server.mean_below(taus)[:, None], 0.0) @ shares
    tail: FloatArray = TAIL_SHARE * taus + late
    return float(shares @ mean + kappa / CVAR_SHARE * tail.min())
