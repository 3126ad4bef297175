"""The messages of a measurement of the machine: a job and its result (`system.job`)."""

from __future__ import annotations

import msgspec

from ...models.roofline import MachineSpeed


class MachineJob(msgspec.Struct, frozen=True):
    """Measure this machine with so many threads; `nice` is added to the process's niceness.

    `cache_bytes` its cores share: what is to come from memory has to be larger.
    """

    n_threads: int
    nice: int = 0
    cache_bytes: int = 0


class MachineMeasured(msgspec.Struct, tag=True, frozen=True):
    """What the machine does, and what measuring that took, s."""

    speed: MachineSpeed
    took_s: float
