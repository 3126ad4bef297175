"""Whether the owner of this machine lets it compute for others just now: on mains, and while nobody works at it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..system.idle import is_on_mains

IDLE_S = 300.0  # without key and mouse, where a Mac tells; elsewhere the desktop says by itself when it is idle
ASKED_S = 2.0  # for the program that tells: milliseconds
IOREG = re.compile(rb'"HIDIdleTime" = (\d+)')  # ns since key or mouse


def is_idle_by_loginctl(said: bytes) -> bool:
    """Whether all sessions of a user are idle, by `loginctl show-user --property=IdleHint --value`."""
    return said.strip() == b"yes"


def is_idle_by_ioreg(said: bytes) -> bool:
    """Whether key and mouse have rested for IDLE_S, by `ioreg -c IOHIDSystem -d 4`."""
    found = IOREG.search(said)
    return found is not None and int(found[1]) > IDLE_S * 1e9


def is_nobody_at_work() -> bool:
    """Whether nobody works at this machine; where nothing tells, somebody does. Blocks for ASKED_S at most."""
    if sys.platform == "darwin":
        words, judge = ["ioreg", "-c", "IOHIDSystem", "-d", "4"], is_idle_by_ioreg
    else:
        words, judge = (
            ["loginctl", "show-user", str(os.getuid()), "--property=IdleHint", "--value"],
            is_idle_by_loginctl,
        )
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=ASKED_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and judge(done.stdout)


@dataclass(frozen=True, slots=True)
class OwnerTerms:
    """What the owner lets a fleet have: threads, bytes of memory (0 = what there is), and when."""

    n_threads: int
    memory_bytes: int = 0
    only_idle: bool = False
    only_mains: bool = False
    on_mains: Callable[[], bool] = is_on_mains
    nobody_at_work: Callable[[], bool] = is_nobody_at_work

    def __str__(self) -> str:
        """Say what is allowed, for the owner."""
        memory = f"{self.memory_bytes / 2**30:g} GiB of memory" if self.memory_bytes else "what memory there is"
        idle, mains = ", only while nobody works here" * self.only_idle, ", only on mains" * self.only_mains
        return f"{self.n_threads} thread{'s' * (self.n_threads != 1)}, {memory}{idle}{mains}"

    def why_not(self) -> str:
        """Return why nothing is lent just now; "" if it is. Blocks for ASKED_S at most."""
        if self.only_mains and not self.on_mains():
            return "this machine runs on its battery (--only-mains)"
        if self.only_idle and not self.nobody_at_work():
            return "somebody works at this machine, or nothing tells (--only-idle)"
        return ""
