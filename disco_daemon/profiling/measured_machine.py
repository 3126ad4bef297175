"""What this machine does at most, measured once and kept, and the power that computing draws here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ..engine.measure.machine_messages import MachineJob, MachineMeasured
from ..errors import DiscoError
from ..models.roofline import MachineSpeed
from ..power.sensors import assumed_of_this_machine
from ..system.control_groups import n_processors
from ..system.job import run_job
from ..system.processors import shared_cache_bytes
from .tuned_profile import MACHINE, cpu_name, read, write

LAST_S = 60.0  # a measurement that takes longer hangs: it takes 4 s, and beside others twice that
COMMENT = "Written when models were recommended. Delete it, and this machine is measured again."


class MachineError(DiscoError):
    """The machine cannot be measured; the message is fit for a user."""


class MachineKey(msgspec.Struct, frozen=True):
    """What a measurement holds for: the processor, its cores, the threads, and what llama.cpp says of its build."""

    cpu: str
    n_cores: int
    n_threads: int
    build: str


class KeptSpeed(msgspec.Struct, frozen=True):
    """A measurement, and what it holds for."""

    key: MachineKey
    speed: MachineSpeed


def machine_key(n_threads: int, build: str) -> MachineKey:
    """Return the key of this machine with a build of llama.cpp. Blocks: it asks for the processor's name."""
    return MachineKey(cpu_name(), n_processors(), n_threads, build)


def kept_speed(folder: Path, key: MachineKey) -> MachineSpeed | None:
    """Return what was measured of this machine; None where nothing was, or of another machine or build. Blocks."""
    kept = read(folder / MACHINE, KeptSpeed)
    return kept.speed if kept is not None and kept.key == key else None


def kept_by_any_build(folder: Path, n_threads: int) -> MachineSpeed | None:
    """Return the same, whatever llama.cpp's build was: only a process that loads it knows. For guesses. Blocks."""
    kept = read(folder / MACHINE, KeptSpeed)
    return None if kept is None or kept.key != machine_key(n_threads, kept.key.build) else kept.speed


def keep_speed(folder: Path, key: MachineKey, speed: MachineSpeed) -> Path:
    """Write a measurement; return the file. Blocks. Raises OSError."""
    return write(folder / MACHINE, COMMENT, msgspec.to_builtins(KeptSpeed(key, speed)))


async def measure_machine(n_threads: int, progress: Callable[[str], None]) -> MachineSpeed:
    """Measure this machine in a child process, which a cancellation kills. Raises MachineError or OSError."""
    found = await run_job(
        "disco_daemon.engine.measure.machine_speed", MachineJob(n_threads, cache_bytes=shared_cache_bytes()), progress,
        MachineMeasured, MachineError,
        name="the measurement of the machine", timeout_s=LAST_S,
    )  # fmt: skip
    return found.speed


def computing_watts(user_watts: float, n_threads: int) -> float | None:
    """Return what computing draws here, W: the user's figure, else a rule of thumb for that many busy cores."""
    return assumed_of_this_machine(user_watts, n_threads).watts
