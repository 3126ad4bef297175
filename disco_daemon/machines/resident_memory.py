"""How much memory all models may have together, and what the devices of the race take of it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from ..config.schema import Config, DeviceSettings
from ..endpoints.device import Device
from ..engine.supervisor import EngineState
from ..engine.wire import Load
from ..system.control_groups import ProcessMemory, memory
from .model_memory import predicted_bytes
from .resident_device import memory_of

SHARE = 0.85  # of the memory, for all models together, where no limit is set


def limit_of(config: Config) -> int:
    """Return how many bytes all models together may have: as set, else a share of the memory."""
    return int(config.device.models_gib * 2**30) or int(SHARE * memory()[0])


def taken_by(devices: Iterable[tuple[object, bool]]) -> tuple[int, ProcessMemory]:
    """Return what the devices of the race take of the memory, bytes, and what of that they have now.

    Each comes with whether it waits for the one before it to be closed: of the two only the larger one counts. One that
    is unloaded counts as if it were loaded, since the next request wakes it.
    """
    found = [_taken_by(device, waits=waits) for device, waits in devices]
    has = [own for _, own in found]
    return max((n for n, _ in found), default=0), ProcessMemory(
        *map(sum, zip(*has, strict=True))
    ) if has else ProcessMemory()


def _taken_by(device: object, *, waits: bool) -> tuple[int, ProcessMemory]:
    if not isinstance(device, Device):
        return 0, ProcessMemory()
    engine = device.engine
    if not waits and engine.state in (EngineState.STOPPED, EngineState.FAILED):
        return 0, ProcessMemory()
    has = memory_of(engine.pid)
    return max(_predicted(engine.config), sum(has) if engine.state is EngineState.READY else 0), has


@lru_cache(maxsize=4)
def _predicted(load: Load) -> int:
    flash: Literal["auto", "off"] = "off" if load.flash_attn is False else "auto"
    settings = DeviceSettings(
        model=load.model_path, n_ctx=load.n_ctx, n_cells=load.n_cells, flash_attn=flash,
        kv_type=cast('Literal["auto", "f16", "q8_0"]', load.kv_type),
    )  # fmt: skip
    try:
        return predicted_bytes(settings, Path(load.model_path))
    except OSError:
        return 0
