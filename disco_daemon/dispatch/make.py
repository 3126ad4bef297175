"""A policy by its name."""

from __future__ import annotations

from .optimal import KAPPA
from .policies import POLICIES, REGISTRY, PolicyParameters
from .policy import Policy


def make_policy(name: str, *, delay_s: float = 0.3, alpha: float = 0.05, kappa: float = KAPPA) -> Policy:
    """Make the policy of that name with those parameters (`PolicyParameters`). Raises ValueError for an unknown one."""
    for entry in REGISTRY:
        if entry.name == name:
            return entry.make(PolicyParameters(delay_s, alpha, kappa))
    msg = f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}"
    raise ValueError(msg)
