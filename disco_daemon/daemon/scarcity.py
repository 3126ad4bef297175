"""Limits the endpoint that is scarce now, by the settings or by what its tokens cost."""

from __future__ import annotations

import math

from ..clock import Clock
from ..config.schema import PolicySettings
from ..money.spending import Spending
from ..types import Side
from .tasks.learner import Learner

MIN_CHANGE_S = 60.0  # between two changes that the user did not ask for, however noisy a sensor is


class ScarceSide:
    """Keeps the planner's constraint on the scarcer side. `changed_at` is the time of its last change by itself."""

    def __init__(
        self,
        learner: Learner,
        spending: Spending,
        clock: Clock,
        settings: PolicySettings,
        changed_at: float | None = None,
    ) -> None:
        self._learner, self._spending, self._clock = learner, spending, clock
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
        return self._spending.regime.scarcer if self._scarcer == "auto" else Side(self._scarcer)
