"""The wattmeter: what the sensors say reaches the spending, what the device computes reaches the meter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.daemon.tasks import wattmeter
from disco_daemon.daemon.tasks.wattmeter import Wattmeter
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.money.catalog import Price
from disco_daemon.money.spending import Speeds, Spending
from disco_daemon.power.measurement import Charge, Covers, PowerReading, Read, Skipped, Thermal
from disco_daemon.power.meter import TokenEnergy
from disco_daemon.power.sensors import Sensors, assumed_reading

NOW = 1_770_000_000.0
SPEEDS = Speeds(100.0, 20.0)
ASSUMED = assumed_reading(12.0, 1, frugal=True)


def spending() -> Spending:
    caps = Caps(CapLimits(), UTC, NOW)
    return Spending(Price(0.15, 0.1, 0.6), caps, usd_per_kwh=0.3, watts=0.0, speeds=SPEEDS, context=4096)


def watching(
    owned: Spending, sensors: Sensors, looks: list[int] | None = None, known: TokenEnergy | None = None
) -> Wattmeter:
    seen = [] if looks is None else looks
    return Wattmeter(sensors, owned, SystemClock(), speeds=lambda: SPEEDS, changed=lambda: seen.append(1), known=known)


async def test_without_a_sensor_the_assumed_power_is_in_the_prices() -> None:
    owned = spending()
    looks: list[int] = []
    meter = watching(owned, Sensors([lambda _: Skipped("battery", "none here")], ASSUMED), looks)
    await meter.look()
    assert owned.prices.device_watts == 12.0
    assert owned.prices.token_j is None
    assert meter.computing() == (12.0, "user")
    assert looks == [1]
    state = meter.state()
    assert (state["source"], state["watts"], state["per_token"]["windows"]) == ("user", 12.0, 0)
    assert state["skipped"] == [{"source": "battery", "reason": "none here"}]
    assert state["per_token"]["decode_j_per_token"] == pytest.approx(12 / 20)


async def test_battery_and_heat_make_energy_dearer() -> None:
    owned = spending()
    sensors = Sensors([], ASSUMED, charge=lambda _: Charge(0.1, on_mains=False), heat=lambda _: Thermal(throttled=True))
    meter = watching(owned, sensors)
    await meter.look()
    assert owned.prices.usd_per_kwh > 10 * 0.3
    assert meter.state()["charge"]["fraction"] == 0.1


async def test_what_was_measured_before_is_used_from_the_start() -> None:
    owned = spending()
    known = TokenEnergy("rapl", 0.02, 0.3, (0.01, 0.03), (0.2, 0.4), 0.2, 5.0, windows=40)
    await watching(owned, Sensors([], ASSUMED), known=known).look()
    assert owned.prices.token_j == (0.02, 0.3)


async def test_a_measured_machine_teaches_joules_per_token() -> None:
    """A counter that rises by 5 W at rest and 25 W at work; the clock is the machine's own, told ahead of time."""
    owned, clock = spending(), _Clock()
    reads = iter(_counter(clock))
    source: Read = lambda _: PowerReading("rapl", Covers.CPU, 0.05, joules=next(reads))  # noqa: E731
    meter = Wattmeter(Sensors([source], ASSUMED), owned, clock, speeds=lambda: SPEEDS, changed=lambda: None)
    for step in range(240):
        busy = clock.busy = step % 2 == 1 and step > 20
        if busy:
            meter.begin(step, clock.t)
        clock.t += 2.0
        if busy:
            meter.observe_prefill(step, clock.t - 1.0, 100)
            meter.end(step, clock.t, 20)
        await meter.look()
    assert owned.prices.token_j is not None
    prefill_j, decode_j = owned.prices.token_j
    assert 100 * prefill_j + 20 * decode_j == pytest.approx(40.0, rel=0.05), "20 W for 2 s"
    assert meter.state()["per_token"]["windows"] > 0
    watts, said_by = meter.computing()
    assert watts == pytest.approx(20.0, rel=0.1)
    assert said_by == "rapl"


async def test_a_sensor_that_fails_changes_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: float) -> PowerReading:
        raise OSError(5, "Input/output error")

    owned = spending()
    looks: list[int] = []
    meter = watching(owned, Sensors([broken], ASSUMED), looks)
    for _ in range(3):
        await meter.look()
    assert looks == []
    assert len([r for r in caplog.records if r.name == "disco.power"]) == 1


async def test_a_sensor_that_hangs_is_not_asked_by_a_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wattmeter, "LOOK_TIMEOUT_S", 0.01)
    free, asked = threading.Event(), []

    def hanging(_: float) -> PowerReading:
        asked.append(1)
        free.wait(20)
        return PowerReading("battery", Covers.MACHINE, 0.05, watts=9.0)

    meter = watching(spending(), Sensors([hanging], ASSUMED))
    for _ in range(5):
        await meter.look()
    assert asked == [1]
    monkeypatch.setattr(wattmeter, "LOOK_TIMEOUT_S", 20.0)
    free.set()
    await meter.look()
    assert meter.state()["source"] == "battery"


async def test_it_stops_when_it_is_told_to() -> None:
    task = asyncio.create_task(watching(spending(), Sensors([], ASSUMED)).run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class _Clock:
    def __init__(self) -> None:
        self.t, self.busy = 1000.0, False

    def now(self) -> float:
        return self.t

    def wall(self) -> float:
        return NOW + self.t


def _counter(clock: _Clock) -> Iterator[float]:
    joules, last = 0.0, clock.t
    while True:
        joules += (clock.t - last) * (25.0 if clock.busy else 5.0)
        last = clock.t
        yield joules
