"""macOS without root: AppleSmartBattery from `ioreg`, heat from `pmset`.

`ioreg -rn AppleSmartBattery -a` prints a plist: an array with one dictionary per battery, or nothing at all on a Mac
without one. Apple documents neither keys nor units. Public readings of it agree (tests/fixtures/power/README.md):
Voltage is mV, InstantAmperage mA and negative while the battery is being emptied, PowerTelemetryData mW, and
TimeRemaining minutes with 65535 for "not known". The telemetry is updated every 10 to 60 s only.
"""

from __future__ import annotations

import plistlib
import re
import subprocess
from typing import Any
from xml.parsers.expat import ExpatError

from .measurement import Charge, Covers, PowerReading, Skipped, Thermal

SOURCE = "apple-smart-battery"
IOREG = ("ioreg", "-rn", "AppleSmartBattery", "-a")
PMSET = ("pmset", "-g", "therm")
TIMEOUT_S = 5.0  # for one of the system's own programs

CURRENT_UNCERTAINTY, TELEMETRY_UNCERTAINTY = 0.05, 0.1
LAG_S = 60.0  # a battery's figures may be a minute old
_UNKNOWN_MINUTES = 65535
_MOST_WATTS = 500.0
_UNKNOWN_LEVEL = 255  # kIOPMThermalLevelUnknown


def ask(command: tuple[str, ...]) -> bytes:
    """Return the output of a command, b"" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout if done.returncode == 0 else b""


def battery(plist: bytes) -> dict[str, Any]:
    """Return the battery's keys, {} if `plist` has none."""
    try:
        found = plistlib.loads(plist)
    except (plistlib.InvalidFileException, ExpatError, ValueError, OverflowError, IndexError, KeyError):
        return {}
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, dict) else {}


def power(plist: bytes) -> PowerReading | Skipped:
    """Return the power that the machine draws, W: by the battery's current if it discharges, else by telemetry."""
    keys = battery(plist)
    if not keys:
        return Skipped(SOURCE, "ioreg tells of no battery")
    volts, amperes = _as_signed(keys.get("Voltage")), _as_signed(keys.get("InstantAmperage"))
    if not keys.get("ExternalConnected") and volts and amperes is not None and amperes < 0:
        return _reading(-volts * amperes * 1e-6, CURRENT_UNCERTAINTY, "InstantAmperage * Voltage")
    load = _as_signed(_table(keys, "PowerTelemetryData").get("SystemLoad"))
    if load is not None and load > 0:
        return _reading(load * 1e-3, TELEMETRY_UNCERTAINTY, "PowerTelemetryData.SystemLoad")
    where = "on mains" if keys.get("ExternalConnected") else "on battery"
    return Skipped(SOURCE, f"{where}, and neither the battery's current nor SystemLoad tells what the Mac draws")


def charge(plist: bytes) -> Charge | None:
    """Return the charge of the battery; None on a Mac without one."""
    keys = battery(plist)
    now, full = _as_signed(keys.get("CurrentCapacity")), _as_signed(keys.get("MaxCapacity"))
    if now is None or not full:
        return None
    plugged = bool(keys.get("ExternalConnected"))
    minutes = _as_signed(keys.get("TimeRemaining"))
    known = not plugged and minutes is not None and 0 < minutes < _UNKNOWN_MINUTES
    return Charge(min(1.0, max(0.0, now / full)), plugged, minutes * 60.0 if known and minutes is not None else None)


def thermal(text: bytes) -> Thermal | None:
    """Read the thermal state from `pmset -g therm`; None if it tells nothing.

    Intel: CPU_Speed_Limit and CPU_Scheduler_Limit, per cent. All: `Thermal Warning Level = N`, 0 is normal. It gives no
    temperature, so the headroom is not known. `pmset -g thermlog` repeats the lines: the last one counts.
    """
    words = text.decode("utf-8", "replace")
    limits = {name: int(n) for name, n in re.findall(r"(CPU_Speed_Limit|CPU_Scheduler_Limit)\s*=\s*(\d{1,4})", words)}
    levels = [int(n) for n in re.findall(r"Thermal Warning Level\s*=\s*(\d{1,4})", words, re.IGNORECASE)]
    if not limits and not levels and "warning level" not in words.lower():
        return None
    slow = [f"{name} {n} %" for name, n in limits.items() if n < 100]
    hot = [f"thermal warning level {n}" for n in levels[-1:] if 0 < n != _UNKNOWN_LEVEL]
    return Thermal(bool(slow or hot), None, ", ".join(slow + hot))


def _reading(watts: float, uncertainty: float, note: str) -> PowerReading | Skipped:
    if not 0 < watts < _MOST_WATTS:
        return Skipped(SOURCE, f"{note} = {watts:.3g} W cannot be what a Mac draws")
    return PowerReading(SOURCE, Covers.MACHINE, uncertainty, watts=watts, lag_s=LAG_S, note=note)


def _table(keys: dict[str, Any], name: str) -> dict[str, Any]:
    found = keys.get(name)
    return found if isinstance(found, dict) else {}


def _as_signed(value: object) -> int | None:
    """Return an integer of the plist; a negative one is often printed as its 64-bit or 32-bit two's complement."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    for bits in (64, 32):
        if 1 << (bits - 1) <= value < 1 << bits:
            return value - (1 << bits)
    return value
