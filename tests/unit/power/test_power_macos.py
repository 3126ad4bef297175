from __future__ import annotations

import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.power import macos
from disco_daemon.power.measurement import Charge, Covers, PowerReading, Skipped

MACHINES = Path(__file__).parent.parent.parent / "fixtures" / "power"


def ioreg(machine: str) -> bytes:
    return (MACHINES / machine / "ioreg.plist").read_bytes()


def pmset(machine: str) -> bytes:
    return (MACHINES / machine / "pmset.txt").read_bytes()


def changed(machine: str, **keys: Any) -> bytes:
    [battery] = plistlib.loads(ioreg(machine))
    return plistlib.dumps([battery | keys])


def watts(plist: bytes) -> float:
    found = macos.power(plist)
    assert isinstance(found, PowerReading)
    assert found.covers is Covers.MACHINE
    assert found.watts is not None
    return found.watts


def test_on_battery_current_times_voltage() -> None:
    assert watts(ioreg("macbook-battery")) == pytest.approx(0.587 * 12.093)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_negative_current_printed_without_its_sign(bits: int) -> None:
    assert watts(changed("macbook-battery", InstantAmperage=2**bits - 587)) == pytest.approx(0.587 * 12.093)


def test_on_mains_the_power_telemetry() -> None:
    assert watts(ioreg("macbook-mains")) == pytest.approx(17.126)


def test_on_battery_without_a_current_the_power_telemetry() -> None:
    plist = changed("macbook-battery", InstantAmperage=0, PowerTelemetryData={"SystemLoad": 9100})
    assert watts(plist) == pytest.approx(9.1)


@pytest.mark.parametrize(
    ("plist", "reason"),
    [
        (ioreg("macbook-weak-adapter"), "on mains"),
        (changed("macbook-battery", InstantAmperage=0), "on battery"),
        (changed("macbook-mains", PowerTelemetryData="none"), "on mains"),
        (changed("macbook-mains", PowerTelemetryData={"SystemLoad": 10**9}), "cannot be"),
        (ioreg("mac-desktop"), "no battery"),
        (b"no plist", "no battery"),
        (b"<plist><array>", "no battery"),
        (b"bplist00\xff\xff", "no battery"),
        (plistlib.dumps(["text"]), "no battery"),
    ],
)
def test_otherwise_skipped_with_the_reason(plist: bytes, reason: str) -> None:
    found = macos.power(plist)
    assert isinstance(found, Skipped)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("plist", "expected"),
    [
        (ioreg("macbook-battery"), Charge(0.78, on_mains=False, seconds_left=296 * 60.0)),
        (ioreg("macbook-mains"), Charge(0.80, on_mains=True)),
        (changed("macbook-battery", TimeRemaining=65535), Charge(0.78, on_mains=False)),
        (changed("macbook-battery", CurrentCapacity=2930, MaxCapacity=3977), Charge(2930 / 3977, False, 17760.0)),
        (ioreg("mac-desktop"), None),
    ],
)
def test_charge(plist: bytes, expected: Charge | None) -> None:
    assert macos.charge(plist) == expected


@pytest.mark.parametrize(
    ("text", "throttled"),
    [
        (pmset("macbook-battery"), False),
        (pmset("mac-desktop"), False),
        (pmset("macbook-weak-adapter"), True),
        (b"2026-09-23 14:05:31 -0700 Thermal Warning Level = 70\n", True),
        (b"Thermal Warning Level = 70\nThermal Warning Level = 0\n", False),
        (b"Thermal Warning Level = 255\n", False),
        (b"CPU_Speed_Limit \t= 90\nCPU_Speed_Limit \t= 100\n", False),
    ],
)
def test_heat(text: bytes, throttled: bool) -> None:
    found = macos.thermal(text)
    assert found is not None
    assert (found.throttled, found.headroom_k) == (throttled, None)


@pytest.mark.parametrize("text", [b"", b"pmset: command not found", b"\xff\xfe"])
def test_nothing_is_told_of_heat(text: bytes) -> None:
    assert macos.thermal(text) is None


def test_a_command_that_is_missing_or_fails_prints_nothing() -> None:
    assert macos.ask(("disco-has-no-such-command",)) == b""
    assert macos.ask((sys.executable, "-c", "print(1); raise SystemExit(3)")) == b""
    assert macos.ask((sys.executable, "-c", "print(1)")) == b"1\n"
