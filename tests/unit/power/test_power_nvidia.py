from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.power import nvidia
from disco_daemon.power.measurement import Covers, PowerReading, Skipped

RECORDED = Path(__file__).parent.parent.parent / "fixtures" / "power" / "nvidia-workstation" / "nvml.json"
NOT_SUPPORTED = 3


class Recorded:
    """NVML's C functions over recorded answers; None is "not supported"."""

    def __init__(self, boards: list[dict[str, int | None]], init: int = 0) -> None:
        self.boards, self.init = boards, init

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return self.init

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:  # noqa: N802
        return self._put(out, len(self.boards))

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, out: Any) -> int:  # noqa: N802
        return self._put(out, index.value + 1)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, out: Any) -> int:  # noqa: N802
        return self._put(out, self.boards[(handle.value or 0) - 1]["energy_mj"])

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, out: Any) -> int:  # noqa: N802
        return self._put(out, self.boards[(handle.value or 0) - 1]["power_mw"])

    @staticmethod
    def _put(out: Any, value: int | None) -> int:
        if value is None:
            return NOT_SUPPORTED
        out._obj.value = value
        return 0


def recorded() -> list[dict[str, int | None]]:
    boards: list[dict[str, int | None]] = json.loads(RECORDED.read_text())["boards"]
    return boards


def joules(gpus: nvidia.Gpus, now: float) -> float:
    found = gpus.read(now)
    assert isinstance(found, PowerReading)
    assert found.covers is Covers.GPU
    assert found.joules is not None
    return found.joules


def test_counters_count_and_powers_are_added_up() -> None:
    boards = recorded()
    gpus = nvidia.Gpus(lambda: nvidia.Nvml(Recorded(boards)))
    assert joules(gpus, 10.0) == 0
    boards[0]["energy_mj"] = (boards[0]["energy_mj"] or 0) + 40_000
    assert joules(gpus, 12.0) == pytest.approx(40 + 2 * 55.010)


def test_large_counters_arrive_whole() -> None:
    found = nvidia.look(nvidia.Nvml(Recorded(recorded())))
    assert found == nvidia.GpuReading({"0": 184467123.456}, 55.010)


def test_a_board_that_tells_nothing_is_no_figure() -> None:
    gpus = nvidia.Gpus(lambda: nvidia.Nvml(Recorded([*recorded(), {"energy_mj": None, "power_mw": None}])))
    found = gpus.read(0.0)
    assert isinstance(found, Skipped)
    assert "board 2" in found.reason


def test_a_driver_without_boards() -> None:
    assert isinstance(nvidia.Gpus(lambda: nvidia.Nvml(Recorded([]))).read(0.0), Skipped)


def test_a_driver_that_does_not_start_is_asked_once() -> None:
    asked = []

    def make() -> nvidia.Nvml:
        asked.append(1)
        return nvidia.Nvml(Recorded([], init=9))

    gpus = nvidia.Gpus(make)
    for now in (0.0, 1.0):
        found = gpus.read(now)
        assert isinstance(found, Skipped)
        assert "error 9" in found.reason
    assert len(asked) == 1


def test_no_library_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "LIBRARIES", ("libdisco-none.so.1", "libdisco-none.so"))
    found = nvidia.Gpus().read(0.0)
    assert isinstance(found, Skipped)
    assert "no NVIDIA driver" in found.reason
