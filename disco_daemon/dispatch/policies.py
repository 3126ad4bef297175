"""The table of policies: the names, `make_policy`, the settings' page and the simulator's list all come from it.

A policy's module is imported only when one is made: the configuration, which checks the name, must not load numpy
wherever the command line starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..types import Plan

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The settings that policies are made with.

    `delay_s` is the head start of the server in `delay`, s; `alpha` the tail share of `paper`, in [0, 1]; `kappa` the
    weight of the CVaR in `optimal`.
    """

    delay_s: float
    alpha: float
    kappa: float


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One row of the table.

    `note` stands behind its name on the page of settings, and may be empty; `learns` says whether its table depends on
    the estimates of both sides. `benchmarks.eval` plays it if `is_simulated`; if `is_paced`, it does so under a pacer
    as in the daemon, which takes a table with a ladder of budgets.
    """

    name: str
    note: str
    make: Callable[[PolicyParameters], Policy]
    learns: bool
    is_simulated: bool = True
    is_paced: bool = False


def _optimal(parameters: PolicyParameters) -> Policy:
    from .optimal import Optimal

    return Optimal(parameters.kappa)


def _paper(parameters: PolicyParameters) -> Policy:
    from .paper import Paper

    return Paper(parameters.alpha, paced=True)


def _stochastic(_: PolicyParameters, *, concurrent: bool = False) -> Policy:
    from .baselines import Stochastic

    return Stochastic(concurrent)


def _fixed(name: str, device_s: float, server_s: float) -> Policy:
    from .baselines import Fixed

    return Fixed(name, Plan(device_s, server_s))


REGISTRY = (
    PolicyEntry("optimal", "learns both sides", _optimal, learns=True, is_paced=True),
    PolicyEntry("paper", "DiSCo", _paper, learns=True, is_paced=True),
    PolicyEntry("stochastic", "", _stochastic, learns=True),
    PolicyEntry("stochastic-concurrent", "", partial(_stochastic, concurrent=True), learns=True),
    PolicyEntry("race", "both at once", lambda _: _fixed("race", 0.0, 0.0), learns=False, is_simulated=False),
    PolicyEntry("all-device", "", lambda _: _fixed("all-device", 0.0, math.inf), learns=False),
    PolicyEntry("all-server", "", lambda _: _fixed("all-server", math.inf, 0.0), learns=False),
    PolicyEntry(
        "delay",
        "server first, the device after `policy.delay_s`",
        lambda parameters: _fixed("delay", parameters.delay_s, 0.0),
        learns=False,
        is_simulated=False,
    ),
)
LEARNING = tuple(entry.name for entry in REGISTRY if entry.learns)
FIXED = tuple(entry.name for entry in REGISTRY if not entry.learns)
POLICIES = tuple(entry.name for entry in REGISTRY)


def names_with_notes() -> str:
    """Return all names with their notes, for the page of settings."""
    *most, last = [f"{entry.name} ({entry.note})" if entry.note else entry.name for entry in REGISTRY]
    return f"{', '.join(most)}, or {last}"
