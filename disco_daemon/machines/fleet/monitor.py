"""What this machine and the processes of a fleet have at the moment: processors, memory, power, and its owner.

All of it reads files of the system, so it runs in a thread.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ...system.control_groups import memory
from ...system.idle import is_on_mains
from ...system.process import waited_s

OWNER_S = 10.0  # between two looks for who works here: it starts a program
LOGINCTL_TIMEOUT_S = 2.0  # it takes milliseconds; the manager of logins may hang
MAX_SESSIONS = 32  # that are looked at


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    """Processors that a process got since the last look, those it would have taken, and its memory, bytes."""

    cpu_got: float = 0.0
    cpu_wanted: float = 0.0
    rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The machine as a whole: the share of its processors that others than the fleet took, and its memory, bytes.

    Of memory, a control group's limit counts where it is less. `owner_at_work` is None where nothing tells.
    """

    n_cpus: int
    others_share: float
    memory_bytes: int
    memory_free_bytes: int
    on_mains: bool = True
    owner_at_work: bool | None = None
    processes: Mapping[int, ProcessLoad] = field(default_factory=dict)


@dataclass(slots=True)
class FleetMonitor:
    """Looks at the machine once a second. All mutable state: what was seen the last time, by `clock`, s."""

    clock: Callable[[], float] = time.monotonic
    _at_s: float | None = None
    _busy_s: float = 0.0
    _used: dict[int, tuple[float, float]] = field(default_factory=dict)
    _owner: tuple[float, bool | None] | None = None

    def look(self, pids: Mapping[int, int]) -> MachineLoad:
        """Return how the machine is, and the fleet's processes: `pids` by the numbers of hosts, 0 is home."""
        # All processors of the machine, whatever a quota leaves us: the busy time below is that of all of them.
        now, n_cpus = self.clock(), psutil.cpu_count() or 1
        passed_s = 0.0 if self._at_s is None else max(1e-3, now - self._at_s)
        used, loads = dict[int, tuple[float, float]](), dict[int, ProcessLoad]()
        for number, pid in pids.items():
            found = _process(pid)
            if found is None:
                continue
            got_s, waited_s, rss = found
            before = self._used.get(pid)
            used[pid] = got_s, waited_s
            if before is None or not passed_s:
                loads[number] = ProcessLoad(rss_bytes=rss)
                continue
            got = max(0.0, got_s - before[0]) / passed_s
            loads[number] = ProcessLoad(got, got + max(0.0, waited_s - before[1]) / passed_s, rss)
        busy_s = _busy_s()
        others = (busy_s - self._busy_s) / passed_s - sum(one.cpu_got for one in loads.values()) if passed_s else 0.0
        self._at_s, self._busy_s, self._used = now, busy_s, used
        total, free = memory()
        return MachineLoad(
            n_cpus, min(1.0, max(0.0, others / n_cpus)), total, free, is_on_mains(), self._owner_at_work(now), loads
        )

    def _owner_at_work(self, now: float) -> bool | None:
        if self._owner is None or now - self._owner[0] >= OWNER_S:
            self._owner = now, owner_at_work()
        return self._owner[1]


def _process(pid: int) -> tuple[float, float, int] | None:
    """Return what a process has used of processors, s, for how long it waited for one, s, and its memory, bytes."""
    try:
        process = psutil.Process(pid)
        times, rss = process.cpu_times(), process.memory_info().rss
    except psutil.Error:
        return None
    threads_waited_s = 0.0
    with suppress(OSError):  # it has ended meanwhile
        threads_waited_s = sum(map(waited_s, Path(f"/proc/{pid}/task").iterdir()))
    return times.user + times.system, threads_waited_s, int(rss)


def _busy_s() -> float:
    """Return the seconds that all processors have been busy."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


# --- who works here -------------------------------------------------------------------------------------------------


def owner_at_work() -> bool | None:
    """Return whether somebody works at this machine, as loginctl tells; None where nothing does."""
    listed = _loginctl("list-sessions", "--no-legend")
    if listed is None:
        return None
    names = [line.split()[0] for line in listed.splitlines() if line.split()][:MAX_SESSIONS]
    if not names:
        return False
    shown = _loginctl("show-session", *names, "-p", "Class", "-p", "State", "-p", "IdleHint", "-p", "LockedHint")
    return None if shown is None else is_somebody_active(shown)


def is_somebody_active(shown: str) -> bool:
    """Return whether one of the sessions, as `loginctl show-session` prints them, is of a person who does something."""
    for block in shown.split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        is_person = said.get("Class", "user").startswith("user") and said.get("State") != "closing"
        if said and is_person and "yes" not in (said.get("IdleHint"), said.get("LockedHint")):
            return True
    return False


def _loginctl(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["loginctl", *arguments], capture_output=True, text=True, timeout=LOGINCTL_TIMEOUT_S, check=True
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout
