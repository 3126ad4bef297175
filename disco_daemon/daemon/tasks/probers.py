"""Finds out of each of several servers what `prober` finds out of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ...types import Outcome
from .prober import Prober


class Probers:
    """A prober for each model that answers `disco`, by `SERVER/MODEL`, with one task for all."""

    def __init__(self, probers: Mapping[str, Prober]) -> None:
        self._probers = dict(probers)

    def restore(self) -> None:
        """Use the verdicts of earlier probes; blocks on disk."""
        for one in self._probers.values():
            one.restore()

    def observe(self, outcome: Outcome) -> None:
        """Take a finished answer; never blocks."""
        answered = {f"{a.server}/{a.model}" for a in outcome.attempts if not a.censored and a.error is None}
        for key in answered & self._probers.keys():
            self._probers[key].observe(outcome)

    async def run(self) -> None:
        """Run all of them until cancelled."""
        async with asyncio.TaskGroup() as group:
            for key, one in self._probers.items():
                group.create_task(one.run(), name=f"prober of {key}")

    async def stop(self) -> None:
        """End questions that are under way: when this returns, nothing more is sent."""
        for one in self._probers.values():
            await one.stop()
