"""Linux: batteries, RAPL counters and temperatures, read from sysfs.

Every function takes the folder that stands for /sys. Formats: Documentation/ABI/testing/sysfs-class-power,
sysfs-class-thermal and Documentation/power/powercap/powercap.rst of the kernel. Comments
say where machines differ from these. An unreadable file counts as absent: firmware that does not know a value answers
ENODEV.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .measurement import Charge, Covers, PowerReading, Skipped, Thermal, Total

BATTERY, RAPL, PSYS = "battery", "rapl", "rapl-psys"

# Fuel gauges are specified at 1 to 2 % of current; how the firmware smooths it is unknown.
BATTERY_UNCERTAINTY, BATTERY_LAG_S = 0.05, 5.0
# RAPL against a meter at the socket is within some per cent in its changes (Khan et al., RAPL in Action, 2018); the
# losses of voltage regulators and power supply are not in it.
RAPL_UNCERTAINTY, PSYS_UNCERTAINTY = 0.1, 0.05

_MICRO = 1e-6
_LEAST_WATTS = 0.2  # no computer runs on less: firmware gives such a figure when it does not know
_MOST_WATTS = 1000.0


@dataclass(frozen=True, slots=True)
class Supply:
    """One folder of /sys/class/power_supply."""

    folder: Path
    values: dict[str, str]

    def text(self, name: str) -> str:
        """Return one property as text, "" if it is missing."""
        found = self.values.get(name)
        return _text(self.folder / name) if found is None else found

    def micro(self, name: str) -> float | None:
        """Return one property, held in millionths, in whole units and without its sign.

        The ABI wants a negative current for discharging, ACPI batteries give a positive one.
        """
        number = _number(self.text(name))
        return None if number is None else abs(number) * _MICRO


def supplies(sys: Path) -> list[Supply]:
    """Return the power supplies of the machine, without those of a mouse or a phone (`scope` Device)."""
    found = [Supply(folder, _uevent(folder)) for folder in _entries(sys / "class/power_supply")]
    return [supply for supply in found if supply.text("scope") != "Device"]


def batteries(found: Iterable[Supply]) -> list[Supply]:
    """Return the batteries in the machine."""
    return [s for s in found if s.text("type") == "Battery" and s.text("present") != "0"]


def on_mains(found: Sequence[Supply]) -> bool:
    """Whether the machine is plugged in: it has no battery, an adapter says so, or no battery is being emptied."""
    # A USB-C adapter is of type USB; `online` is 2 for a programmable one.
    adapters = [s.text("online") for s in found if s.text("type") not in {"Battery", "UPS"}]
    if any(online in {"1", "2"} for online in adapters):
        return True
    cells = batteries(found)
    return not cells or ("0" not in adapters and not any(s.text("status") == "Discharging" for s in cells))


def battery_power(sys: Path) -> PowerReading | Skipped:
    """Return the power that the machine draws from its batteries, W; several add up."""
    found = supplies(sys)
    cells = batteries(found)
    if not cells:
        return Skipped(BATTERY, "there is no battery")
    if on_mains(found):
        return Skipped(BATTERY, "on mains a battery's current is what charges it, not what the machine draws")
    drained = [cell for cell in cells if cell.text("status") == "Discharging"]
    if not drained:
        return Skipped(BATTERY, "no battery says that it is being emptied")
    powers = [_power(cell) for cell in drained]
    known = [p for p in powers if p is not None]
    if len(known) < len(powers):
        return Skipped(BATTERY, "it says neither power_now nor current_now and voltage_now")
    watts = sum(known)
    if not _LEAST_WATTS < watts < _MOST_WATTS:
        return Skipped(BATTERY, f"{watts:.3g} W cannot be what a computer draws")
    how = "power_now" if all(cell.micro("power_now") is not None for cell in drained) else "current_now * voltage_now"
    names = " + ".join(cell.folder.name for cell in drained)
    return PowerReading(
        BATTERY, Covers.MACHINE, BATTERY_UNCERTAINTY, watts=watts, lag_s=BATTERY_LAG_S, note=f"{how} of {names}"
    )


def charge(sys: Path) -> Charge | None:
    """Return the charge of all batteries together; None without a battery, or if none tells."""
    found = supplies(sys)
    cells = batteries(found)
    energies = [_energies(cell) for cell in cells]
    known = [pair for pair in energies if pair is not None]
    plugged = on_mains(found)
    if not cells or not (known or any(cell.text("capacity") for cell in cells)):
        return None
    if len(known) < len(cells):
        shares = [n / 100 for cell in cells if (n := _number(cell.text("capacity"))) is not None]
        shares = shares or [now / full for now, full in known]
        return Charge(_clamp(sum(shares) / len(shares)), plugged)
    left, full = (sum(column) for column in zip(*known, strict=True))
    power = battery_power(sys)
    watts = power.watts if isinstance(power, PowerReading) else None
    return Charge(_clamp(left / full), plugged, left * 3600 / watts if watts else None)


@dataclass(frozen=True, slots=True)
class Zone:
    """One RAPL counter: its place in the tree, its name, its value and the value at which it wraps, J."""

    folder: str
    name: str
    joules: float
    full_j: float


def rapl_zones(sys: Path) -> list[Zone] | Skipped:
    """Return the counters to add up: the platform's if it works, else those of the packages and their memory."""
    folders = [f for f in _entries(sys / "class/powercap") if re.fullmatch(r"intel-rapl:\d+(:\d+)?", f.name)]
    if not folders:
        return Skipped(RAPL, "the kernel shows no RAPL counters")
    wanted = [f for f in folders if re.match(r"package-\d+|dram|psys", _text(f / "name"))]
    zones = [zone for f in wanted if (zone := _zone(f)) is not None]
    packages = [f for f in wanted if _text(f / "name").startswith("package-")]
    platform = [z for z in zones if z.name == "psys" and z.joules > 0]  # some boards show one that stays at 0
    if platform:
        return platform
    parts = [z for z in zones if z.name != "psys"]
    if not packages or sum(z.name.startswith("package-") for z in parts) < len(packages):
        return Skipped(RAPL, f"{_unreadable(wanted)} is not readable (since Linux 5.10 for root only)")
    return parts


class Rapl:
    """The RAPL counters as one that never wraps."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self._total = Total()

    def read(self, now: float) -> PowerReading | Skipped:
        """Return the energy since the first reading, J; `now` is not used."""
        del now
        zones = rapl_zones(self._sys)
        if isinstance(zones, Skipped):
            return zones
        joules = self._total.look({zone.folder: (zone.joules, zone.full_j) for zone in zones})
        note = " + ".join(zone.name for zone in zones)
        if zones[0].name == "psys":
            return PowerReading(PSYS, Covers.MACHINE, PSYS_UNCERTAINTY, joules=joules, note=note)
        return PowerReading(RAPL, Covers.CPU, RAPL_UNCERTAINTY, joules=joules, note=note)


# Zones of the processor; others (radio, disk, charger) have trip points of their own.
_CPU_ZONE = re.compile(r"x86_pkg_temp|acpitz|cpu|soc|tcpu|core", re.IGNORECASE)
_SLOWED_SHARE = 0.1  # of the time; a processor at full boost touches its limit now and then without harm


def headroom(sys: Path) -> tuple[float | None, bool]:
    """Return the kelvin to the lowest trip point at which the kernel slows the CPU or stops, and if one is passed."""
    zones = [z for z in _entries(sys / "class/thermal") if _CPU_ZONE.search(_text(z / "type"))]
    gaps = [
        trip - temp for zone in zones if (temp := _number(_text(zone / "temp"))) is not None for trip in _trips(zone)
    ]
    return (min(gaps) / 1000, min(gaps) <= 0) if gaps else (None, False)


def slowed_s(sys: Path) -> float | None:
    """Return the seconds that heat has slowed the CPU since it started, for the worst core; None if not counted.

    x86 only (core_ and package_throttle_total_time_ms). All cores repeat their package's counter: no sum.
    """
    pattern = "devices/system/cpu/cpu*/thermal_throttle/*_throttle_total_time_ms"
    found = [n for path in sys.glob(pattern) if (n := _number(_text(path))) is not None]
    return max(found) / 1000 if found else None


class Heat:
    """The thermal state, with the counters of the last reading."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self._before: tuple[float, float] | None = None

    def read(self, now: float) -> Thermal | None:
        """Return the state since the last reading; `now` in s. None if no sensor tells of heat."""
        kelvin, tripped = headroom(self._sys)
        slowed = slowed_s(self._sys)
        if kelvin is None and slowed is None:
            return None
        share = self._share(now, slowed)
        note = f"slowed {share:.0%} of the time" if share else ""
        return Thermal(tripped or share > _SLOWED_SHARE, kelvin, note)

    def _share(self, now: float, slowed: float | None) -> float:
        before, self._before = self._before, None if slowed is None else (now, slowed)
        if before is None or slowed is None or now <= before[0]:
            return 0.0
        return _clamp((slowed - before[1]) / (now - before[0]))


def _trips(zone: Path) -> list[float]:
    """Return the zone's passive, hot and critical trip points, m°C; one at or below 0 °C is not set."""
    kinds = [path for path in _entries(zone) if re.fullmatch(r"trip_point_\d+_type", path.name)]
    wanted = [path for path in kinds if _text(path) in {"passive", "hot", "critical"}]
    values = [_number(_text(path.with_name(path.name.replace("_type", "_temp")))) for path in wanted]
    return [v for v in values if v is not None and v > 0]


def _power(cell: Supply) -> float | None:
    if (watts := cell.micro("power_now")) is not None:
        return watts
    amperes, volts = cell.micro("current_now"), cell.micro("voltage_now")
    return None if amperes is None or volts is None else amperes * volts


def _energies(cell: Supply) -> tuple[float, float] | None:
    """Return the energy left in a battery and its capacity, Wh."""
    now, full = cell.micro("energy_now"), cell.micro("energy_full")
    volts: float | None = 1.0
    if now is None or not full:
        now, full = cell.micro("charge_now"), cell.micro("charge_full")
        volts = cell.micro("voltage_min_design") or cell.micro("voltage_now")
    return None if now is None or not full or not volts else (now * volts, full * volts)


def _zone(folder: Path) -> Zone | None:
    joules, full = _number(_text(folder / "energy_uj")), _number(_text(folder / "max_energy_range_uj"))
    if joules is None or not full:
        return None
    return Zone(folder.name, _text(folder / "name"), joules * _MICRO, full * _MICRO)


def _unreadable(folders: Iterable[Path]) -> str:
    return next((f"{f.name}/energy_uj" for f in folders if _zone(f) is None), "energy_uj")


def _uevent(folder: Path) -> dict[str, str]:
    """Read all properties at once: reading each file asks the slow embedded controller again."""
    pairs = (line.partition("=") for line in _text(folder / "uevent").splitlines())
    return {k.removeprefix("POWER_SUPPLY_").lower(): v.strip() for k, _, v in pairs if k.startswith("POWER_SUPPLY_")}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))
