"""A control group of the kernel for memory, below this process's own: version 1, 2, or both (hybrid)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from disco_daemon.bench.child import BenchError
from disco_daemon.system.control_groups import memory_groups

EMPTY_S = 10.0  # for the processes of a group to be gone
LOOK_S = 0.05
INTO = 'echo $$ > "$1" && shift && exec "$@"'  # as a shell that becomes the program, so that its children are there too


class NoGroupError(BenchError):
    """No control group can be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group without a limit at first, and no swap."""

    folder: Path
    is_v2: bool

    def limit(self, n_bytes: int) -> None:
        """Let its processes have so much memory. Raises OSError where more is in use and cannot be freed."""
        (self.folder / ("memory.max" if self.is_v2 else "memory.limit_in_bytes")).write_text(str(n_bytes))

    def used(self) -> int:
        """Return the bytes that count against the limit, cached files among them."""
        return int((self.folder / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")).read_text())

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed for want of memory."""
        text = (self.folder / ("memory.events" if self.is_v2 else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs a program in the group."""
        return ["/bin/sh", "-c", INTO, "sh", str(self.folder / "cgroup.procs"), *words]


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group, and remove it when its processes have ended. Raises NoGroupError."""
    group = _made()
    try:
        yield group
    finally:
        deadline = time.monotonic() + EMPTY_S
        while True:
            try:
                group.folder.rmdir()
                break
            except OSError as e:
                if time.monotonic() > deadline:
                    msg = f"{group.folder} cannot be removed: {e}"
                    raise BenchError(msg) from e
            time.sleep(LOOK_S)  # a group tells nobody that it is empty


def _made() -> MemoryGroup:
    is_v2, folders = memory_groups()
    why = "this system has no control groups"
    # Version 2 takes processes or groups with limits in a group, not both: then the one above may have another one.
    for above in folders if is_v2 else folders[:1]:
        folder = above / f"disco-bench-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as e:
            why = f"no control group can be made in {above}: {e.strerror}"
            continue
        group = MemoryGroup(folder, is_v2)
        try:
            group.oom_kills()
            group.limit(1 << 40)
            with suppress(OSError):  # a kernel without swap has no such file
                (folder / ("memory.swap.max" if is_v2 else "memory.swappiness")).write_text("0")
        except (OSError, KeyError) as e:
            folder.rmdir()
            why = f"a control group in {above} has no limit of memory: {e}"
            continue
        return group
    raise NoGroupError(why)
