from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from disco_daemon.power import linux
from disco_daemon.power.measurement import Charge, Covers, Integral, PowerReading, Skipped, Total

MACHINES = Path(__file__).parent.parent.parent / "fixtures" / "power"


def sys_of(machine: str) -> Path:
    return MACHINES / machine / "sys"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A desktop whose counters a test may turn."""
    return shutil.copytree(sys_of("desktop-rapl"), tmp_path / "sys")


def write(sys: Path, path: str, text: str) -> None:
    (sys / path).parent.mkdir(parents=True, exist_ok=True)
    (sys / path).write_text(text + "\n")


@pytest.mark.parametrize(
    ("machine", "watts", "note"),
    [
        ("lenovo-battery", 19.195, "power_now of BAT0"),
        ("dell-battery", 0.278 * 11.358, "current_now * voltage_now of BAT0"),
        ("thinkpad-two-batteries", 8.21, "power_now of BAT1"),
    ],
)
def test_a_battery_being_emptied_tells_what_the_machine_draws(machine: str, watts: float, note: str) -> None:
    found = linux.battery_power(sys_of(machine))
    assert isinstance(found, PowerReading)
    assert (found.covers, found.note) == (Covers.MACHINE, note)
    assert found.watts == pytest.approx(watts)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("dell-mains", "on mains"),
        ("laptop-psys-mains", "on mains"),
        ("desktop-rapl", "no battery"),
        ("arm-board", "no battery"),
        ("vm", "no battery"),
        ("no-such-folder", "no battery"),
    ],
)
def test_elsewhere_the_battery_is_skipped_with_the_reason(machine: str, reason: str) -> None:
    found = linux.battery_power(sys_of(machine))
    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_batteries_that_are_emptied_together_add_up(tmp_path: Path) -> None:
    for name, micro in (("BAT0", 4_000_000), ("BAT1", 9_500_000)):
        uevent = f"POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Discharging\nPOWER_SUPPLY_POWER_NOW={micro}"
        write(tmp_path, f"class/power_supply/{name}/uevent", uevent)
    found = linux.battery_power(tmp_path)
    assert isinstance(found, PowerReading)
    assert found.watts == pytest.approx(13.5)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("", "neither power_now"),
        ("POWER_SUPPLY_POWER_NOW=", "neither power_now"),
        ("POWER_SUPPLY_POWER_NOW=none", "neither power_now"),
        ("POWER_SUPPLY_CURRENT_NOW=1000000", "neither power_now"),
        ("POWER_SUPPLY_POWER_NOW=0", "cannot be"),
        ("POWER_SUPPLY_POWER_NOW=4294967295000", "cannot be"),
    ],
)
def test_firmware_that_does_not_know_is_not_believed(tmp_path: Path, extra: str, reason: str) -> None:
    head = "POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Discharging\n"
    write(tmp_path, "class/power_supply/BAT0/uevent", head + extra)
    found = linux.battery_power(tmp_path)
    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_one_battery_that_does_not_tell_spoils_the_sum(tmp_path: Path) -> None:
    head = "POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Discharging"
    write(tmp_path, "class/power_supply/BAT0/uevent", head + "\nPOWER_SUPPLY_POWER_NOW=4000000")
    write(tmp_path, "class/power_supply/BAT1/uevent", head)
    assert isinstance(linux.battery_power(tmp_path), Skipped)


def test_a_negative_current_counts_by_its_size(tmp_path: Path) -> None:
    values = {"STATUS": "Discharging", "TYPE": "Battery", "CURRENT_NOW": "-1500000", "VOLTAGE_NOW": "12000000"}
    write(tmp_path, "class/power_supply/BAT0/uevent", "\n".join(f"POWER_SUPPLY_{k}={v}" for k, v in values.items()))
    found = linux.battery_power(tmp_path)
    assert isinstance(found, PowerReading)
    assert found.watts == pytest.approx(18)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("lenovo-battery", Charge(32.94 / 42.65, on_mains=False, seconds_left=32.94 * 3600 / 19.195)),
        ("dell-battery", Charge(1762 / 4687, on_mains=False, seconds_left=1.762 * 11.55 * 3600 / (0.278 * 11.358))),
        ("dell-mains", Charge(1.0, on_mains=True)),
        ("thinkpad-two-batteries", Charge(18.84 / 84.16, on_mains=False, seconds_left=18.84 * 3600 / 8.21)),
        ("laptop-psys-mains", Charge(40.1 / 50.99, on_mains=True)),
    ],
)
def test_charge(machine: str, expected: Charge) -> None:
    found = linux.charge(sys_of(machine))
    assert found is not None
    assert found.on_mains is expected.on_mains
    assert found.fraction == pytest.approx(expected.fraction)
    assert found.seconds_left == (expected.seconds_left and pytest.approx(expected.seconds_left))


@pytest.mark.parametrize("machine", ["desktop-rapl", "vm", "arm-board", "nvidia-workstation"])
def test_no_battery_no_charge(machine: str) -> None:
    assert linux.charge(sys_of(machine)) is None
    assert linux.on_mains(linux.supplies(sys_of(machine)))


def test_a_desktop_with_an_empty_usb_c_port_is_on_mains(tmp_path: Path) -> None:
    uevent = "POWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_ONLINE=0"
    write(tmp_path, "class/power_supply/ucsi-source-psy-USBC000:001/uevent", uevent)
    assert linux.on_mains(linux.supplies(tmp_path))


def test_a_battery_that_tells_a_percentage_only(tmp_path: Path) -> None:
    uevent = "POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Charging\nPOWER_SUPPLY_CAPACITY=40"
    write(tmp_path, "class/power_supply/BAT0/uevent", uevent)
    assert linux.charge(tmp_path) == Charge(0.4, on_mains=True)


def test_a_mouse_is_not_the_machine() -> None:
    assert [s.folder.name for s in linux.supplies(sys_of("dell-mains"))] == ["ADP0", "BAT0"]


def zones(machine: str) -> dict[str, float]:
    found = linux.rapl_zones(sys_of(machine))
    assert not isinstance(found, Skipped)
    return {zone.name: zone.joules for zone in found}


def test_rapl_adds_packages_and_memory_and_nothing_twice() -> None:
    assert zones("desktop-rapl") == pytest.approx({"package-0": 65997.277274, "dram": 9117.44321})
    assert zones("nvidia-workstation") == pytest.approx({"package-0": 41200.873211})


def test_rapl_prefers_the_platform(copy: Path) -> None:
    assert zones("laptop-psys-mains") == pytest.approx({"psys": 117870.08204})
    write(copy, "class/powercap/intel-rapl:1/name", "psys")
    write(copy, "class/powercap/intel-rapl:1/max_energy_range_uj", "262143328850")
    write(copy, "class/powercap/intel-rapl:1/energy_uj", "0")
    found = linux.rapl_zones(copy)
    assert isinstance(found, list)
    assert [zone.name for zone in found] == ["package-0", "dram"], "a platform counter at 0 counts nothing"


@pytest.mark.parametrize("machine", ["desktop-rapl-unreadable", "lenovo-battery", "dell-mains"])
def test_rapl_without_root_is_skipped_with_the_reason(machine: str) -> None:
    found = linux.rapl_zones(sys_of(machine))
    assert isinstance(found, Skipped)
    assert "intel-rapl:0/energy_uj is not readable" in found.reason


def test_a_counter_that_refuses_to_be_read_is_not_readable(copy: Path) -> None:
    counter = copy / "class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    counter.mkdir()  # an OSError at reading, as EACCES is; root, who runs tests too, gets no EACCES
    found = linux.Rapl(copy).read(0.0)
    assert isinstance(found, Skipped)
    assert "not readable" in found.reason


def test_one_of_two_packages_is_not_the_machine(copy: Path) -> None:
    write(copy, "class/powercap/intel-rapl:1/name", "package-1")
    assert isinstance(linux.rapl_zones(copy), Skipped)


def test_no_rapl_at_all() -> None:
    found = linux.rapl_zones(sys_of("vm"))
    assert isinstance(found, Skipped)
    assert "no RAPL" in found.reason


def test_rapl_counts_on_when_a_counter_turns_over(copy: Path) -> None:
    rapl = linux.Rapl(copy)

    def joules(package_uj: int) -> float:
        write(copy, "class/powercap/intel-rapl:0/energy_uj", str(package_uj))
        found = rapl.read(0.0)
        assert isinstance(found, PowerReading)
        assert found.joules is not None
        return found.joules

    assert joules(262143328850 - 3_000_000) == 0
    assert joules(262143328850 - 1_000_000) == pytest.approx(2)
    assert joules(4_000_000) == pytest.approx(7)


def test_a_counter_that_was_reset_never_takes_energy_back() -> None:
    total = Total()
    assert total.look({"a": (10.0, 1000.0)}) == 0
    assert total.look({"a": (30.0, 1000.0), "b": (5.0, 9.0)}) == pytest.approx(20)
    assert total.look({"a": (2.0, 1000.0), "b": (5.0, 9.0)}) == pytest.approx(22)


def test_power_adds_up_and_skips_gaps() -> None:
    integral = Integral(longest_s=10.0)
    assert integral.look(0.0, 10.0) == 0
    assert integral.look(2.0, 20.0) == pytest.approx(30)
    assert integral.look(100.0, 20.0) == pytest.approx(30)
    assert integral.look(101.0, 20.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("machine", "kelvin", "tripped"),
    [
        ("lenovo-battery", 67.0, False),  # the package zone has no trip point set, the radio's does not matter
        ("desktop-rapl", 77.2, False),
        ("arm-board", -1.2, True),
        ("vm", None, False),
    ],
)
def test_headroom(machine: str, kelvin: float | None, tripped: bool) -> None:
    found = linux.headroom(sys_of(machine))
    assert found == (kelvin if kelvin is None else pytest.approx(kelvin), tripped)


def test_a_processor_slowed_for_long_is_throttled(tmp_path: Path) -> None:
    counter = "devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms"
    heat = linux.Heat(tmp_path)
    assert heat.read(0.0) is None
    seen = []
    for now, ms in ((1.0, 5000), (2.0, 5020), (3.0, 5520), (4.0, 5520)):
        write(tmp_path, counter, str(ms))
        found = heat.read(now)
        assert found is not None
        seen.append(found.throttled)
    assert seen == [False, False, True, False]


def test_a_board_past_its_passive_trip_point_is_throttled() -> None:
    found = linux.Heat(sys_of("arm-board")).read(0.0)
    assert found is not None
    assert found.throttled


@pytest.mark.parametrize(("uncertainty", "watts", "joules"), [(0.1, None, None), (0.1, 1.0, 1.0), (-1.0, 1.0, None)])
def test_a_reading_has_one_figure(uncertainty: float, watts: float | None, joules: float | None) -> None:
    with pytest.raises(ValueError, match="watts or joules"):
        PowerReading("x", Covers.CPU, uncertainty, watts, joules)
