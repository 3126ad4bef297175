from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.power import macos, sensors
from disco_daemon.power.measurement import Covers, PowerReading, Skipped
from disco_daemon.power.nvidia import Gpus

MACHINES = Path(__file__).parent.parent.parent / "fixtures" / "power"
GUESS = sensors.assumed_reading(0.0, 3, frugal=False)


class Boards:
    """Recorded answers."""

    def __init__(self) -> None:
        self.boards = json.loads((MACHINES / "nvidia-workstation" / "nvml.json").read_text())["boards"]

    def count(self) -> int:
        return len(self.boards)

    def energy_mj(self, board: int) -> int | None:
        found: int | None = self.boards[board]["energy_mj"]
        return found

    def power_mw(self, board: int) -> int | None:
        found: int | None = self.boards[board]["power_mw"]
        return found


def no_driver() -> Boards:
    raise OSError("none")


def mac(machine: str) -> Callable[[tuple[str, ...]], bytes]:
    files = {macos.IOREG: "ioreg.plist", macos.PMSET: "pmset.txt"}
    return lambda command: (MACHINES / machine / files[command]).read_bytes()


def on_linux(machine: str, gpus: Gpus | None = None) -> sensors.Sensors:
    return sensors.linux_sensors(MACHINES / machine / "sys", GUESS, gpus)


@pytest.mark.parametrize(
    ("machine", "source", "covers", "passed_over"),
    [
        ("lenovo-battery", "battery", Covers.MACHINE, []),
        ("dell-battery", "battery", Covers.MACHINE, []),
        ("thinkpad-two-batteries", "battery", Covers.MACHINE, []),
        ("laptop-psys-mains", "rapl-psys", Covers.MACHINE, ["battery"]),
        ("desktop-rapl", "rapl", Covers.CPU, ["battery"]),
        ("nvidia-workstation", "rapl", Covers.CPU, ["battery"]),
        ("dell-mains", "cores", Covers.COMPUTING, ["battery", "rapl"]),
        ("desktop-rapl-unreadable", "cores", Covers.COMPUTING, ["battery", "rapl"]),
        ("arm-board", "cores", Covers.COMPUTING, ["battery", "rapl"]),
        ("vm", "cores", Covers.COMPUTING, ["battery", "rapl"]),
    ],
)
def test_each_linux_machine_has_its_source(machine: str, source: str, covers: Covers, passed_over: list[str]) -> None:
    state = on_linux(machine).look(0.0)
    assert (state.reading.source, state.reading.covers) == (source, covers)
    assert [skipped.source for skipped in state.skipped] == passed_over
    assert all(skipped.reason for skipped in state.skipped)


@pytest.mark.parametrize(
    ("machine", "source", "on_mains", "throttled"),
    [
        ("macbook-battery", "apple-smart-battery", False, False),
        ("macbook-mains", "apple-smart-battery", True, False),
        ("macbook-weak-adapter", "cores", True, True),
        ("mac-desktop", "cores", None, False),
    ],
)
def test_each_mac_has_its_source(machine: str, source: str, on_mains: bool | None, throttled: bool) -> None:
    state = sensors.mac_sensors(GUESS, mac(machine)).look(0.0)
    assert state.reading.source == source
    assert (state.charge.on_mains if state.charge else None) is on_mains
    assert state.thermal is not None
    assert state.thermal.throttled is throttled


def test_a_mac_is_asked_once_a_look() -> None:
    asked = []

    def ask(command: tuple[str, ...]) -> bytes:
        asked.append(command)
        return mac("macbook-battery")(command)

    found = sensors.mac_sensors(GUESS, ask)
    found.look(0.0)
    found.look(10.0)
    assert asked == [macos.IOREG, macos.PMSET] * 2


def test_a_model_on_the_gpu_counts_its_boards_and_the_processor() -> None:
    found = on_linux("nvidia-workstation", Gpus(Boards))
    found.look(0.0)
    reading = found.look(2.0).reading
    assert (reading.source, reading.covers) == ("rapl+nvml", Covers.PARTS)
    assert reading.joules == pytest.approx(2 * 55.010)


def test_boards_alone_when_the_processor_cannot_be_read() -> None:
    state = on_linux("desktop-rapl-unreadable", Gpus(Boards)).look(0.0)
    assert (state.reading.source, state.reading.covers) == ("nvml", Covers.GPU)


def test_without_a_driver_the_processor_stands_alone_and_it_is_said() -> None:
    state = on_linux("desktop-rapl", Gpus(no_driver)).look(0.0)
    assert state.reading.source == "rapl"
    assert [skipped.source for skipped in state.skipped] == ["battery", "nvml"]
    state = on_linux("vm", Gpus(no_driver)).look(0.0)
    assert state.reading is GUESS
    assert [skipped.source for skipped in state.skipped] == ["battery", "rapl", "nvml"]


def test_pulling_the_plug_changes_the_source(tmp_path: Path) -> None:
    root = shutil.copytree(MACHINES / "laptop-psys-mains" / "sys", tmp_path / "sys")
    found = sensors.linux_sensors(root, GUESS)
    assert found.look(0.0).reading.source == "rapl-psys"
    for path in (root / "class/power_supply").glob("*/online"):
        path.write_text("0\n")
    (root / "class/power_supply/BAT0/status").write_text("Discharging\n")
    state = found.look(1.0)
    assert state.reading.source == "battery"
    assert state.reading.watts == pytest.approx(31.25)
    assert state.charge is not None
    assert not state.charge.on_mains


def test_the_user_knows_better_than_the_rule_of_thumb() -> None:
    told = sensors.assumed_reading(28.0, 3, frugal=True)
    assert (told.source, told.watts, told.covers) == ("user", 28.0, Covers.COMPUTING)
    guessed = sensors.assumed_reading(0.0, 3, frugal=True)
    assert guessed.source == "cores"
    assert guessed.watts == pytest.approx(12)
    assert guessed.uncertainty > told.uncertainty


def test_threads_that_a_quota_takes_draw_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16)
    watts = dict[int, float | None]()
    for n in (2, 9, 16, 32):
        monkeypatch.setattr(sensors, "n_cores", lambda n=n: n)
        monkeypatch.setattr(sensors, "linux_sensors", lambda sys, fallback, gpus: sensors.Sensors([], fallback))
        monkeypatch.setattr(sensors, "mac_sensors", lambda fallback: sensors.Sensors([], fallback))
        watts[n] = sensors.of_this_machine().look(0.0).reading.watts
    assert (watts[2] or 0) < (watts[9] or 0) < (watts[16] or 0) == watts[32], "32 threads share 16 cores"


def test_this_machine_has_a_source() -> None:
    found = sensors.of_this_machine(user_watts=20.0)
    state = found.look(0.0)
    assert isinstance(state.reading, PowerReading)
    assert all(isinstance(skipped, Skipped) for skipped in state.skipped)
    assert found.interval_s == (10.0 if sys.platform == "darwin" else 1.0)
