"""Limits the endpoint that is scarce now, by the settings or by what its tokens cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..clock import Clock
from ..conductor.answer_server import ServerMember
from ..config.schema import PolicySettings
from ..endpoints.base import Endpoint
from ..money.spending import Spending
from ..types import Side
from .tasks.learner import Learner

MIN_CHANGE_S = 60.0  # between two changes that the user did not ask for, however noisy a sensor is


class ScarceSide:
    """Keeps the planner's constraint on the scarcer side. `changed_at` is the time of its last change by itself.

    `spending` gives the prices in force: of several servers those of the one that is asked now.
    """

    def __init__(
        self,
        learner: Learner,
        spending: Callable[[], Spending],
        clock: Clock,
        settings: PolicySettings,
        changed_at: float | None = None,
    ) -> None:
        self._learner, self.spending, self._clock = learner, spending, clock
        self._scarcer, self._budget = settings.scarcer, settings.budget
        self.changed_at = -math.inf if changed_at is None else changed_at

    def set(self, scarcer: str, budget: float) -> None:
        """Go by other settings of the policy at once: `auto` or a side, and the budget ratio."""
        self._scarcer, self._budget = scarcer, budget
        self._learner.constrain(self._wanted_side, budget)

    def follow(self) -> None:
        """Follow the prices in force; the side changes at most once in MIN_CHANGE_S."""
        wanted = self._wanted_side
        if wanted is not self._learner.planner.constrained:
            if self._clock.now() - self.changed_at < MIN_CHANGE_S:
                return
            self.changed_at = self._clock.now()
        self._learner.constrain(wanted, self._budget)

    @property
    def _wanted_side(self) -> Side:
        return self.spending().regime.scarcer if self._scarcer == "auto" else Side(self._scarcer)


def spending_now(spending: Spending, endpoints: Mapping[Side, Endpoint]) -> Spending:
    """Return the account at the prices of the server that is asked now, where there are several."""
    asked: ServerMember | None = getattr(endpoints.get(Side.SERVER), "asked_now", None)
    return spending if asked is None else asked.spending
