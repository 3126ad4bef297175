"""What a service manager is given: the command, the addresses, the resources that it may use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NAME = "disco"
STOP_S = 45  # the daemon drains for 30 s, then tells the remaining readers and closes
WATCHDOG_S = 60  # an event loop that stands still for this long is restarted
RESTART_S = 2  # until a service manager starts a daemon that failed again
MAX_FILES = 8192  # open at a time, in the unit; connections take most of them
MAX_TASKS = 512  # threads and processes; a daemon and its engine have some dozens, a GPU's driver as many


@dataclass(frozen=True, slots=True)
class Spec:
    """One service. `command` is absolute; `port` is None where the daemon picks one itself.

    `memory_bytes` is what daemon and engine may use together, None for no limit; `log` the folder for launchd's logs.
    """

    command: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int | None = 4747
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    log: Path = Path()
