"""NVIDIA boards through NVML, the library that comes with the driver.

Called by ctypes: the package nvidia-ml-py wraps the same calls, of which this needs three. Signatures and
units from NVIDIA's NVML API reference: power in mW, energy since the driver was loaded in mJ (Volta and later).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .measurement import Covers, Integral, PowerReading, Skipped, Total

SOURCE = "nvml"
LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so")
# NVIDIA states 5 % of the power; on some boards the sensor sees a part of the time only (Yang, Adamek and Armour,
# Part-time Power Measurements, 2023).
UNCERTAINTY = 0.1
_FULL_J = 2.0**64 / 1000  # the counter is 64 bits of mJ


class Boards(Protocol):
    """The calls of NVML that are used. None: this board cannot tell."""

    def count(self) -> int:
        """Return the number of boards."""

    def energy_mj(self, board: int) -> int | None:
        """Return the energy since the driver was loaded, mJ."""

    def power_mw(self, board: int) -> int | None:
        """Return the present power, mW."""


class Nvml:
    """NVML by ctypes. Raises OSError if library or driver is missing, as on most machines."""

    def __init__(self, library: Any = None) -> None:
        self._library = load() if library is None else library
        if status := self._library.nvmlInit_v2():
            raise OSError(f"NVML does not start, error {status}")

    def count(self) -> int:
        """Return the number of boards; 0 if it is unknown."""
        return self._ask(self._library.nvmlDeviceGetCount_v2, ctypes.c_uint()) or 0

    def energy_mj(self, board: int) -> int | None:
        """Return the energy since the driver was loaded, mJ."""
        return self._ask_board(self._library.nvmlDeviceGetTotalEnergyConsumption, board, ctypes.c_ulonglong())

    def power_mw(self, board: int) -> int | None:
        """Return the present power, mW."""
        return self._ask_board(self._library.nvmlDeviceGetPowerUsage, board, ctypes.c_uint())

    def _ask_board(self, call: Callable[..., int], board: int, out: Any) -> int | None:
        handle = ctypes.c_void_p()
        if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(board), ctypes.byref(handle)):
            return None
        return self._ask(functools.partial(call, handle), out)

    @staticmethod
    def _ask(call: Callable[..., int], out: Any) -> int | None:
        return None if call(ctypes.byref(out)) else int(out.value)


def load() -> ctypes.CDLL:
    """Load the driver's library. Raises OSError if it is missing."""
    for name in LIBRARIES[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(LIBRARIES[-1])


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A reading of all boards: energy counters by board, J, and the power of those without a counter, W."""

    joules: dict[str, float]
    watts: float


def look(boards: Boards) -> GpuReading | Skipped:
    """Read every board; Skipped if one tells nothing, since a part of the power is no figure."""
    joules: dict[str, float] = {}
    watts = 0.0
    for board in range(boards.count()):
        if (energy := boards.energy_mj(board)) is not None:
            joules[str(board)] = energy / 1000
        elif (power := boards.power_mw(board)) is not None:
            watts += power / 1000
        else:
            return Skipped(SOURCE, f"board {board} tells neither energy nor power")
    return GpuReading(joules, watts) if joules or watts else Skipped(SOURCE, "there is no NVIDIA board")


class Gpus:
    """A counter over all boards. It opens the library at the first reading, and not again if that fails."""

    def __init__(self, make: Callable[[], Boards] = Nvml) -> None:
        self._make = make
        self._boards: Boards | Skipped | None = None
        self._total, self._rest = Total(), Integral()

    def read(self, now: float) -> PowerReading | Skipped:
        """Return the energy since the first reading, J; `now` in s."""
        if self._boards is None:
            self._boards = self._open()
        found = self._boards if isinstance(self._boards, Skipped) else look(self._boards)
        if isinstance(found, Skipped):
            return found
        joules = self._total.look({board: (value, _FULL_J) for board, value in found.joules.items()})
        joules += self._rest.look(now, found.watts)
        how = "energy counter" if not found.watts else "power, added up"
        return PowerReading(SOURCE, Covers.GPU, UNCERTAINTY, joules=joules, lag_s=0.1, note=how)

    def _open(self) -> Boards | Skipped:
        try:
            return self._make()
        except (OSError, AttributeError) as e:
            return Skipped(SOURCE, f"no NVIDIA driver: {e}")
