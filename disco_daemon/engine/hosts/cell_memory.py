"""Memory that home and hosts of one machine have in common: cells go through it, and no process waits for another.

Through a socket they would go in pieces of 200 kB, for each of which the other process has to be woken. Home makes the
memory and passes it on by its descriptor; a host writes what it saves there, another one reads it. Only Linux has this
(memfd). Where a descriptor does not arrive, as over a network, cells go behind their message.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from typing import TypeAlias

from ..llama.state import State
from .messages import MAX_BEHIND

_numbers = itertools.count(1)


class CellMemory:
    """Memory for pieces of saved cells. It is freed when nothing refers to it or to one of its pieces."""

    def __init__(self) -> None:
        """Make it; it is empty. Raises OSError where the system has no such thing."""
        if sys.platform != "linux":
            raise OSError(0, "only Linux has memory behind a descriptor")
        self.number = next(_numbers)
        self._n_slots = 0
        self.fd = os.memfd_create("disco-cells", os.MFD_CLOEXEC)

    def __del__(self) -> None:
        if (fd := getattr(self, "fd", -1)) >= 0:
            os.close(fd)

    def slot(self) -> int:
        """Return where a piece may begin, with room for MAX_BEHIND bytes: what is not written takes no memory."""
        self._n_slots += 1
        return (self._n_slots - 1) * MAX_BEHIND

    def write(self, data: State) -> SharedCells:
        """Put cells into it. Raises OSError."""
        at = self.slot()
        write_all(self.fd, data, at)
        return SharedCells(self, at, len(data))


@dataclass(frozen=True, slots=True)
class SharedCells:
    """Saved cells that are in such a memory."""

    memory: CellMemory
    at: int
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def read(self, n_bytes: int | None = None) -> bytes:
        """Return them, or their first bytes; fewer if they are not there. Raises OSError."""
        return read_all(self.memory.fd, self.n_bytes if n_bytes is None else min(n_bytes, self.n_bytes), self.at)


SavedCells: TypeAlias = State | SharedCells


def bytes_of(saved: SavedCells) -> State:
    """Return saved cells as bytes. Raises OSError."""
    return saved.read() if isinstance(saved, SharedCells) else saved


def new_memory() -> CellMemory | None:
    """Return a memory, or None where there is none."""
    try:
        return CellMemory()
    except OSError:
        return None


def write_all(fd: int, data: State, at: int) -> None:
    """Write all of it from byte `at` on. Raises OSError."""
    left = memoryview(data)
    while left:
        n = os.pwrite(fd, left, at)
        left, at = left[n:], at + n


def read_all(fd: int, n_bytes: int, at: int) -> bytes:
    """Return the bytes from `at` on; fewer if they are not there. Raises OSError."""
    found = os.pread(fd, n_bytes, at)
    while len(found) < n_bytes and (more := os.pread(fd, n_bytes - len(found), at + len(found))):
        found += more
    return found
