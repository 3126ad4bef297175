"""A policy by its name."""

from __future__ import annotations

import math

from ..types import Plan
from .baselines import Fixed, Stochastic
from .names import POLICIES
from .optimal import KAPPA, Optimal
from .paper import Paper
from .policy import Policy


def make_policy(name: str, *, delay_s: float = 0.3, alpha: float = 0.05, kappa: float = KAPPA) -> Policy:
    """The policy of that name. Raises ValueError for an unknown one.

    `delay_s` is the head start of the server in `delay`, s; `alpha` the tail share of `paper`, in [0, 1]; `kappa` the
    weight of the CVaR in `optimal`.
    """
    fixed = {
        "race": Plan(0.0, 0.0),
        "all-device": Plan(0.0, math.inf),
        "all-server": Plan(math.inf, 0.0),
        "delay": Plan(delay_s, 0.0),
    }
    if name in fixed:
        return Fixed(name, fixed[name])
    match name:
        case "optimal":
            return Optimal(kappa)
        case "paper":
            return Paper(alpha, paced=True)
        case "stochastic" | "stochastic-concurrent":
            return Stochastic(concurrent=name == "stochastic-concurrent")
    msg = f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}"
    raise ValueError(msg)
