"""What the control groups of this process leave it: memory, and the time of processors.

A container, a pod of Kubernetes and a service of systemd are such groups, each within others, and the least of all
levels counts. Linux alone has them: version 2, version 1 with a tree for each controller, or both (hybrid). All is read
when it is asked for, and nothing is kept, since a limit may change. What cannot be read, or is odd, limits nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")  # where the trees are mounted
OWN = Path("/proc/self/cgroup")  # which group of each tree this process is in
UNLIMITED = 2**60  # bytes; version 1 says "no limit" by the largest number of whole pages, a little below 2**63


class _MemoryNames(NamedTuple):
    """The files of a group's limit and use, and what its `memory.stat` calls cached and mapped pages of files."""

    limit: str
    used: str
    cached: str
    mapped: str


_V2 = _MemoryNames("memory.max", "memory.current", "inactive_file", "file_mapped")
_V1 = _MemoryNames(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_mapped_file"
)  # fmt: skip


class ProcessMemory(NamedTuple):
    """What a process has of the memory, bytes: pages that no file backs, and mapped pages of files."""

    private: int = 0
    mapped: int = 0


def memory(root: Path = ROOT, own: Path = OWN, without: Iterable[ProcessMemory] = ()) -> tuple[int, int]:
    """Return all memory that there is for programs here, and what is free of it, bytes: the control groups' if less.

    It is as if processes had ended that have `without`: a machine counts mapped pages as free anyway, a group does not.
    """
    import psutil  # commands that people wait for import this module, and ask nothing of it

    found = psutil.virtual_memory()
    without = list(without)
    private, mapped = sum(one.private for one in without), sum(one.mapped for one in without)
    total, free = int(found.total), int(found.available) + private
    for limit, used in memory_limits(root, own):
        total, free = min(total, limit), min(free, max(0, limit - used) + private + mapped)
    return total, free


def memory_groups(root: Path = ROOT, own: Path = OWN) -> tuple[bool, list[Path]]:
    """Return whether memory is version 2's, and the folders of this process's group and of all above it."""
    return _groups("memory", root, own)


def memory_limits(root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[int, int]]:
    """Yield limit and use, bytes, of this process's group and of those above it, as far as they have a limit.

    Cached pages of files that the kernel would drop for want of room do not count as used: else a model could not be
    loaded after its download. Those that a program has mapped do, such as the weights of a model that is loaded.
    """
    is_v2, groups = memory_groups(root, own)
    names = _V2 if is_v2 else _V1
    for group in groups:
        limit, used = _number(_text(group / names.limit)), _number(_text(group / names.used))
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        lines = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
        pages = {name: _number(value) or 0 for name, _, value in lines if name in (names.cached, names.mapped)}
        unused = max(0, pages.get(names.cached, 0) - pages.get(names.mapped, 0))
        yield limit, max(0, used - unused)


def n_processors(root: Path = ROOT, own: Path = OWN) -> int:
    """Return how many threads of this process can compute at a time: by its affinity mask, and by quotas; at least 1.

    A quota counts in whole processors: threads beyond it would use it up early, and all of them stand still until the
    next period.
    """
    quota = cpu_quota(root, own)
    return affinity() if quota is None else max(1, min(affinity(), int(quota)))


def affinity() -> int:
    """Return the number of processors that this process may run on."""
    return len(allowed())


def allowed() -> list[int]:
    """Return the numbers of the processors that this process may run on; without such a mask, the machine's."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the least quota of this process's group and of those above it, in processors (1.5); None without any."""
    is_v2, groups = _groups("cpu", root, own)
    found = list[float]()
    for group in groups:
        if is_v2:
            quota, _, period = _text(group / "cpu.max").partition(" ")
        else:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if (used_us := _number(quota)) and (period_us := _number(period)):
            found.append(used_us / period_us)
    return min(found, default=None)


def _groups(controller: str, root: Path, own: Path) -> tuple[bool, list[Path]]:
    """Return whether a controller is version 2's, and the folders of this process's group and of all above it."""
    path = "/"  # where nothing tells: a container is mostly shown its own group as the root
    for line in _text(own).split("\n"):
        number, names, in_tree = (*line.split(":", 2), "", "")[:3]
        if controller in names.split(","):
            # The folder is called as the line says (`cpu,cpuacct`), or there is a link of the controller's name.
            tree = next((root / name for name in (names, controller) if _is_folder(root / name)), None)
            return False, [] if tree is None else _upwards(tree, in_tree)
        if (number, names) == ("0", ""):
            path = in_tree
    is_hybrid = _is_folder(root / "unified") and not os.path.exists(root / "cgroup.controllers")  # noqa: PTH110 - as above
    return True, _upwards(root / "unified" if is_hybrid else root, path)


def _upwards(tree: Path, path: str) -> list[Path]:
    """Return the folders of a group and of all above it, up to the tree's root.

    Where a container is told the host's path, it cannot see the folder: what is mounted for it is its own group. The
    same holds of a path that leads out of its namespace (`/../other`).
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not _is_folder(tree.joinpath(*parts)):
        parts = []
    return [tree.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises where it may not look


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
