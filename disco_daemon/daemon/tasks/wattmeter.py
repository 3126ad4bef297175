"""Watches battery, heat and the energy of a token beside the requests, and updates the prices with them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import asdict
from typing import Any

from ...clock import Clock
from ...money.exchange import Power
from ...money.spending import Speeds, Spending
from ...power.measurement import Covers
from ...power.meter import EnergyMeter, TokenEnergy
from ...power.sensors import USER, PowerState, Sensors

log = logging.getLogger("disco.power")

LOOK_TIMEOUT_S = 10.0  # a reading takes milliseconds, seconds where it starts a tool; a dead sensor may hang
UNCHANGING_S = 30.0  # between two looks at a machine that can neither measure nor run out


class Wattmeter:
    """Owns the sampling task and the meter. `speeds` are the device's as learned; `changed` is called after each look.

    `partner_token_j` is what a partner spends on a prefill and on a decode token, J.
    It is the conductor's `context.EnergyObserver`: the device's work goes to the meter.
    """

    def __init__(
        self,
        sensors: Sensors,
        spending: Spending,
        clock: Clock,
        *,
        speeds: Callable[[], Speeds],
        changed: Callable[[], None],
        known: TokenEnergy | None = None,
        partner_token_j: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self._sensors, self._spending, self._clock = sensors, spending, clock
        self._speeds, self._changed, self._partner_token_j = speeds, changed, partner_token_j
        self._meter = EnergyMeter(known)
        self._seen: PowerState | None = None
        self._energy: TokenEnergy | None = None
        self._failing = False
        self._looking: asyncio.Future[PowerState] | None = None

    async def run(self) -> None:
        """Read the sensors at their interval, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await self.look()
        finally:
            if self._looking is not None:
                self._looking.cancel()

    async def look(self) -> None:
        """Read the sensors once. One that fails or hangs leaves everything as it was, with one warning."""
        try:
            seen = await self._read_sensors()
        except (OSError, ValueError, TimeoutError) as e:
            if not self._failing:
                log.warning("the power sensors cannot be read: %s", e)
            self._failing = True
        else:
            self._failing = False
            self._take(seen)

    async def _read_sensors(self) -> PowerState:
        """Return the sensors' reading. A thread that hangs in one is awaited again; a second is never started."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._sensors.look, self._clock.now()))
        done, _ = await asyncio.wait({self._looking}, timeout=LOOK_TIMEOUT_S)
        if not done:
            msg = f"no answer within {LOOK_TIMEOUT_S:g} s"
            raise TimeoutError(msg)
        looking, self._looking = self._looking, None
        return looking.result()

    def _take(self, seen: PowerState) -> None:
        speeds = self._speeds()
        self._seen = seen
        self._meter.sample(self._clock.now(), seen.reading)
        self._energy = energy = self._meter.energy(speeds.prefill_tps, speeds.decode_tps)
        measured = energy is not None and energy.windows > 0
        token_j = (energy.prefill_j_per_token, energy.decode_j_per_token) if energy is not None and measured else None
        watts = seen.reading.watts if seen.reading.covers is Covers.COMPUTING else None
        self._spending.update_power(
            _power(seen),
            speeds,
            self._spending.prices.device_watts if watts is None else watts,
            token_j,
            self._partner_token_j(),
        )
        self._changed()

    def computing(self) -> tuple[float, str]:
        """Return what this machine draws more while it computes, W, and by which source; 0 if that is not known."""
        energy, prices = self._energy, self._spending.prices
        if energy is not None and energy.windows:
            return energy.decode_j_per_token * self._speeds().decode_tps, energy.source
        return prices.device_watts, self._seen.reading.source if self._seen is not None else USER

    @property
    def _interval_s(self) -> float:
        seen = self._seen
        lasting = seen is not None and seen.reading.covers is Covers.COMPUTING and seen.charge is None
        return max(self._sensors.interval_s, UNCHANGING_S) if lasting else self._sensors.interval_s

    # --- EnergyObserver ----------------------------------------------------------------------------------------------

    def begin(self, key: Hashable, now: float) -> None:
        """See `EnergyObserver`."""
        self._meter.begin(key, now)

    def observe_prefill(self, key: Hashable, now: float, tokens: float) -> None:
        """See `EnergyObserver`."""
        self._meter.observe_prefill(key, now, tokens)

    def end(self, key: Hashable, now: float, tokens: float = 0.0) -> None:
        """See `EnergyObserver`."""
        self._meter.end(key, now, tokens)

    def observe_others(self) -> None:
        """Note that this machine has just computed for others."""
        self._meter.observe_others(self._clock.now())

    def state(self) -> dict[str, Any]:
        """Return sources and figures as JSON: W, J per token, and why better sources are not used."""
        seen, energy = self._seen, self._energy
        return {
            "source": None if seen is None else seen.reading.source,
            "note": None if seen is None else seen.reading.note,
            "uncertainty": None if seen is None else seen.reading.uncertainty,
            "watts": None if seen is None else seen.reading.watts,
            "idle_watts": self._meter.idle_watts(),
            "charge": None if seen is None or seen.charge is None else asdict(seen.charge),
            "thermal": None if seen is None or seen.thermal is None else asdict(seen.thermal),
            "per_token": None if energy is None else _finite(asdict(energy)),
            "skipped": [] if seen is None else [asdict(s) for s in seen.skipped],
        }


def _power(seen: PowerState) -> Power:
    charge, heat = seen.charge, seen.thermal
    return Power(
        charge=None if charge is None else charge.fraction,
        on_mains=charge is None or charge.on_mains,
        throttled=heat is not None and heat.throttled,
        headroom_k=None if heat is None else heat.headroom_k,
    )


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities, which JSON lacks, by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
