"""Chooses the source of power figures on this machine, best first.

1. The whole machine: its battery while it discharges, RAPL's platform counter, a Mac's telemetry.
2. Its parts: RAPL packages, and NVIDIA boards if the model runs there.
3. The user's figure for what computing draws.
4. What that many busy cores commonly draw.

Only the difference that computing makes counts, so figures of a machine and of a package both serve;
`meter.EnergyMeter` keeps them apart.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ..system.processors import n_cores
from . import linux, macos
from .measurement import Charge, Covers, PowerReading, Read, Skipped, Thermal
from .nvidia import Gpus

USER, GUESS = "user", "cores"
SYS = Path("/sys")

USER_UNCERTAINTY = 0.2  # of a figure from a data sheet or a plug-in meter, for another load
# Watts that a busy core adds. A rule of thumb from vendors' rated powers over cores (laptops and Arm 2 to 7 W, desktops
# 7 to 16 W, servers 4 to 7 W), not a measurement: the truth is within a factor of 2.5 of it, on most machines.
FRUGAL_W, OTHER_W = 4.0, 9.0
GUESS_UNCERTAINTY = 0.6

LINUX_INTERVAL_S, MAC_INTERVAL_S = 1.0, 10.0  # ioreg and pmset are processes with older figures than this


@dataclass(frozen=True, slots=True)
class PowerState:
    """A reading of all sensors. `skipped` are the better sources that `reading` replaces, with reasons."""

    reading: PowerReading
    skipped: tuple[Skipped, ...] = ()
    charge: Charge | None = None
    thermal: Thermal | None = None


class Sensors:
    """The sensors of one machine. Call `look` every `interval_s`, in a thread: it blocks for milliseconds.

    `assumed` is the reading if no source is readable.
    """

    def __init__(
        self,
        sources: Sequence[Read],
        assumed: PowerReading,
        *,
        gpus: Gpus | None = None,
        charge: Callable[[float], Charge | None] = lambda _: None,
        heat: Callable[[float], Thermal | None] = lambda _: None,
        interval_s: float = LINUX_INTERVAL_S,
    ) -> None:
        self.interval_s = interval_s
        self._sources, self._assumed, self._gpus = sources, assumed, gpus
        self._charge, self._heat = charge, heat

    def look(self, now: float) -> PowerState:
        """Read all sensors; `now` in s, of a monotonic clock."""
        skipped: list[Skipped] = []
        reading = self._best(now, skipped)
        return PowerState(reading, tuple(skipped), self._charge(now), self._heat(now))

    def _best(self, now: float, skipped: list[Skipped]) -> PowerReading:
        for source in self._sources:
            found = source(now)
            if isinstance(found, PowerReading):
                return self._with_gpus(found, now, skipped) if found.covers is Covers.CPU else found
            skipped.append(found)
        alone = self._gpus.read(now) if self._gpus else self._assumed
        if isinstance(alone, PowerReading):
            return alone
        skipped.append(alone)
        return self._assumed

    def _with_gpus(self, cpu: PowerReading, now: float, skipped: list[Skipped]) -> PowerReading:
        found = self._gpus.read(now) if self._gpus else None
        if isinstance(found, Skipped):
            skipped.append(found)
        if not isinstance(found, PowerReading) or cpu.joules is None or found.joules is None:
            return cpu
        return replace(
            cpu,
            source=f"{cpu.source}+{found.source}",
            covers=Covers.PARTS,
            uncertainty=max(cpu.uncertainty, found.uncertainty),
            joules=cpu.joules + found.joules,
            lag_s=max(cpu.lag_s, found.lag_s),
            note=f"{cpu.note}; boards by {found.note}",
        )


def assumed_reading(user_watts: float, busy_cores: float, *, frugal: bool) -> PowerReading:
    """Return the power that computing adds, W: the user's figure if above 0, else that of `busy_cores`.

    `frugal`: a laptop or an Arm processor.
    """
    if user_watts > 0:
        return PowerReading(USER, Covers.COMPUTING, USER_UNCERTAINTY, watts=user_watts, note="device.watts")
    per_core = FRUGAL_W if frugal else OTHER_W
    note = f"a rule of thumb, {busy_cores:g} busy core{'s' * (busy_cores != 1)} at {per_core:g} W"
    return PowerReading(GUESS, Covers.COMPUTING, GUESS_UNCERTAINTY, watts=busy_cores * per_core, note=note)


def linux_sensors(sys_root: Path, fallback: PowerReading, gpus: Gpus | None = None) -> Sensors:
    """Return the sensors of a Linux machine with /sys at `sys_root`; `gpus` only if the model runs there."""
    return Sensors(
        [lambda _: linux.battery_power(sys_root), linux.Rapl(sys_root).read],
        fallback,
        gpus=gpus,
        charge=lambda _: linux.charge(sys_root),
        heat=linux.Heat(sys_root).read,
    )


class _Mac:
    """Caches the output of `ioreg`, which serves power and charge of one reading."""

    def __init__(self, ask: Callable[[tuple[str, ...]], bytes]) -> None:
        self._ask = ask
        self._at: float | None = None
        self._plist = b""

    def plist(self, now: float) -> bytes:
        if self._at != now:
            self._at, self._plist = now, self._ask(macos.IOREG)
        return self._plist


def mac_sensors(fallback: PowerReading, ask: Callable[[tuple[str, ...]], bytes] = macos.ask) -> Sensors:
    """Return the sensors of a Mac; `ask` runs a command and returns its output."""
    mac = _Mac(ask)
    return Sensors(
        [lambda now: macos.power(mac.plist(now))],
        fallback,
        charge=lambda now: macos.charge(mac.plist(now)),
        heat=lambda _: macos.thermal(ask(macos.PMSET)),
        interval_s=MAC_INTERVAL_S,
    )


def of_this_machine(user_watts: float = 0.0, threads: int = 0, *, on_gpu: bool = False) -> Sensors:
    """Return the sensors here, for `threads` that compute (0: one fewer than may be); `on_gpu`: layers are on a GPU."""
    fallback = assumed_of_this_machine(user_watts, threads)
    on_linux = sys.platform.startswith("linux")
    if sys.platform == "darwin":
        return mac_sensors(fallback)
    if on_linux:
        return linux_sensors(SYS, fallback, Gpus() if on_gpu else None)
    return Sensors([], fallback)


def assumed_of_this_machine(user_watts: float = 0.0, threads: int = 0) -> PowerReading:
    """Return the power that `threads` that compute add here (0: one fewer than may be), W, without a sensor."""
    # More threads than the machine has cores share these, and draw no more.
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    busy = min(float(cores), threads or max(1, min(cores, n_cores()) - 1))
    on_linux = sys.platform.startswith("linux")
    portable = on_linux and bool(linux.batteries(linux.supplies(SYS)))
    frugal = portable or platform.machine().lower() in {"arm64", "aarch64"}
    return assumed_reading(user_watts, busy, frugal=frugal)
