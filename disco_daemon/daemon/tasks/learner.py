"""Learns beside the requests: records outcomes, fits off the loop, and saves what was learned."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...clock import Clock
from ...dispatch.mover import CostMover
from ...dispatch.planner import Planner
from ...errors import DiscoError
from ...estimation.knowledge import Knowledge
from ...store import History
from ...types import Outcome, Side

log = logging.getLogger("disco.learning")

TPS = "decode_tps"  # beside the estimators in what is saved
SAVE_EVERY = 5  # fits, about 50 requests; a crash forgets no more than these


class Learner:
    """Owns the fitting task. `endpoints` is the estimator key: another pair of endpoints starts from nothing.

    `before` is the key under which an earlier version kept it. The decode speeds of a `mover` are kept along.
    """

    mover: CostMover | None = None

    def __init__(self, planner: Planner, history: History, clock: Clock, endpoints: str, before: str = "") -> None:
        self.planner = planner
        self.n_fits = 0
        self._history = history
        self._clock = clock
        self._endpoints, self._before = endpoints, before
        self._news = asyncio.Event()
        self._fitting = asyncio.Lock()

    def restore(self) -> None:
        """Go on from saved knowledge; blocks on disk. Knowledge that cannot be used is left alone, with a warning."""
        try:
            state = self._history.learned(self._endpoints)
            if state is None and self._before:
                state = self._history.learned(self._before)
            if state is not None:
                self.planner.restore(Knowledge.from_json(state))
                if self.mover is not None:
                    self.mover.go_on(state.get(TPS, {}))
        except (DiscoError, ValueError, TypeError) as e:
            log.warning("starting without what was learned before: %s", e)

    def record(self, outcome: Outcome) -> None:
        """Take one finished answer, which the planner has learned from; never blocks."""
        self._history.record(outcome)
        if self.planner.due:
            self._news.set()

    async def run(self) -> None:
        """Fit whenever enough was learned, until cancelled; then save."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self.fit()
                if self.n_fits % SAVE_EVERY == 0:
                    self.save()
        finally:
            self.save()

    async def fit(self) -> None:
        """Fit now, in a thread, and plan with the result from then on."""
        async with self._fitting:
            request = self.planner.begin_fit()
            self.planner.adopt(request, await asyncio.to_thread(self.planner.fit, request))
            self.n_fits += 1

    def constrain(self, side: Side, budget: float) -> None:
        """Limit the use of that side, from the next fit on, which follows at once; never blocks."""
        self.planner.constrain(side, budget)
        if self.planner.due:
            self._news.set()

    def save(self) -> None:
        """Hand the knowledge to the history's writer."""
        known = self.planner.knowledge.to_json()
        if self.mover is not None:
            known[TPS] = self.mover.known_tps
        self._history.save_learned(self._endpoints, self._clock.wall(), known)

    def state(self) -> dict[str, Any]:
        """Return the planner's state and the number of fits as JSON."""
        return self.planner.state() | {"fits": self.n_fits}
