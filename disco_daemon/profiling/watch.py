"""Watches the power sensors while something is measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ..clock import Clock
from ..errors import DiscoError
from ..plain import reason_of
from ..power.measurement import Covers
from ..power.meter import WINDOW_LAGS, WINDOW_S, EnergyMeter
from ..power.sensors import PowerState, Sensors
from ..system.tasks import cancel_all

SENSORS_S = 10.0  # one look at the sensors; commands that they ask have shorter ones


class ProfileError(DiscoError):
    """A measurement is impossible here; the message is fit for a user."""


@dataclass(slots=True)
class Watch:
    """The readings of the sensors during a measurement. `now` is the latest look."""

    sensors: Sensors
    meter: EnergyMeter
    clock: Clock
    now: PowerState | None = None
    throttled: bool = False

    async def look(self) -> PowerState:
        """Look once. Raises ProfileError where the sensors fail."""
        try:
            async with asyncio.timeout(SENSORS_S):
                self.now = state = await asyncio.to_thread(self.sensors.look, self.clock.now())
        except (OSError, ValueError) as e:  # a TimeoutError is an OSError
            msg = f"the power sensors cannot be read: {reason_of(e)}"
            raise ProfileError(msg) from e
        self.meter.sample(self.clock.now(), state.reading)
        self.throttled = self.throttled or (state.thermal is not None and state.thermal.throttled)
        return state

    async def run(self) -> None:
        """Look as often as the sensors say something new, until cancelled. One look in vain is a gap, no end."""
        while True:
            with suppress(ProfileError):
                await self.look()
            await asyncio.sleep(self.sensors.interval_s)

    @property
    def measures(self) -> bool:
        """Whether what is drawn is measured, not assumed."""
        return self.now is not None and self.now.reading.covers is not Covers.COMPUTING

    @property
    def window_s(self) -> float:
        """The time that the meter needs for one figure of power, s."""
        return max(WINDOW_S, WINDOW_LAGS * self.now.reading.lag_s) if self.now is not None else WINDOW_S


@asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[None]:
    """Look at the sensors meanwhile. Raises ProfileError where they fail at the begin."""
    await watch.look()
    task = asyncio.create_task(watch.run(), name="profile sensors")
    try:
        yield
    finally:
        await cancel_all(task)
