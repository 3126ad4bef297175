"""The processors that this process may compute on: cores of one kind or several, hardware threads, nodes of memory.

Threads that share one product of matrices wait for each other many times a token, so each is as slow as the slowest:
a core of a slower kind may cost more than it gives, a second hardware thread of a core gives little, and memory of
another node is far away. All is read from Linux's `/sys/devices/system` (macOS: sysctl) when it is asked for; what
cannot be read counts as one node of equal cores.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .control_groups import allowed, n_processors

SYSTEM = Path("/sys/devices/system")
CPUINFO = Path("/proc/cpuinfo")
AVX2 = frozenset({"avx2", "fma", "f16c"})  # which came together, but for one small maker's processors
SYSCTL_TIMEOUT_S = 5.0  # it asks the kernel; without an answer all cores count
# What tells how fast a core is next to the others, below its folder: the scheduler's own measure (ARM, RISC-V), the
# firmware's (CPPC on x86-64 and ARM), and the highest frequency, kHz, which knows nothing of work done in a cycle.
SPEEDS = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True, slots=True)
class Core:
    """A core: its processors (hardware threads) that may be used, the `node` of its memory, and its relative speed."""

    cpus: tuple[int, ...]
    node: int
    speed: float


def cores(system: Path = SYSTEM, cpus: Collection[int] | None = None) -> list[Core]:
    """Return the cores that this process may use, in the order of their first processors.

    `cpus` are the processors' numbers, by default those of the affinity mask.
    """
    cpus = sorted(allowed() if cpus is None else cpus)
    node_of = {cpu: node for node, numbers in _nodes(system) for cpu in numbers}
    speeds = _speeds(system, cpus)
    found = dict[tuple[int, ...], Core]()
    for cpu, speed in speeds.items():
        siblings = _numbers(_text(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        together = tuple(other for other in siblings if other in speeds) or (cpu,)
        found.setdefault(together, Core(together, node_of.get(cpu, 0), speed))
    return list(found.values())


def best_cores(found: Collection[Core]) -> list[Core]:
    """Return the cores on which equal shares of the work are done soonest, the fastest first.

    Of `n` cores that is `n` times the slowest one's speed.
    """
    fastest = sorted(found, key=lambda core: -core.speed)
    n = max(range(1, len(fastest) + 1), key=lambda n: (n * fastest[n - 1].speed, n), default=0)
    return fastest[:n]


def n_cores() -> int:
    """Return how many threads are worth computing with, before anything was measured: at least 1.

    Quotas of control groups count as in `n_processors`.
    """
    worth = _performance_cores() if sys.platform == "darwin" else len(best_cores(cores()))
    return min(n_processors(), worth or n_processors())


def has_avx2(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor has AVX2 and what came with it, as our products of weights need (`native/products.h`)."""
    return _flags(cpuinfo) >= AVX2


def has_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor multiplies tiles of whole numbers itself, as Intel's Xeons do since 2023."""
    return "amx_int8" in _flags(cpuinfo)


def _flags(cpuinfo: Path) -> set[str]:
    """Return the names of what this processor can, as the kernel has them."""
    names = ("features", "leaf7_features")
    found = " ".join(_sysctl(f"machdep.cpu.{name}") for name in names) if sys.platform == "darwin" else _text(cpuinfo)
    flags = re.search(r"^flags\s*:(.*)$", found, re.MULTILINE)
    return set((flags[1] if flags else found).lower().split())


def node_for(n_threads: int, found: Collection[Core]) -> list[int] | None:
    """Return the processors of a node that has cores for so many threads, one each: the first one, of the fastest core.

    None where all memory is equally near, or the threads need more than one node.
    """
    sizes = _sizes(found)
    if len(sizes) < 2:
        return None
    first = best_cores(found)[0].node
    fitting = [node for node in sorted(sizes, key=lambda node: (node != first, node)) if sizes[node] >= n_threads]
    return sorted(cpu for core in found if core.node == fitting[0] for cpu in core.cpus) if fitting else None


def shared_cache_bytes(system: Path = SYSTEM) -> int:
    """Return the bytes of all third-level caches of this machine, which cores share; 0 where nobody tells."""
    found = dict[str, int]()
    for place in sorted((system / "cpu").glob("cpu[0-9]*/cache/index3")):
        if size := re.fullmatch(r"([0-9]{1,9})K", _text(place / "size")):
            found[_text(place / "shared_cpu_list") or str(place)] = int(size[1]) << 10
    return sum(found.values())


def n_nodes(found: Collection[Core]) -> int:
    """Return how many nodes of memory these cores have."""
    return len(_sizes(found))


def _speeds(system: Path, cpus: Collection[int]) -> dict[int, float]:
    """Return the speed of each processor, by one measure that all have; equal ones if there is none.

    Intel's efficient cores beside others count as 0: they take twice as long or more, and llama.cpp leaves them out.
    """
    speeds = dict.fromkeys(cpus, 1.0)
    for name in SPEEDS:
        texts = {cpu: _text(system / "cpu" / f"cpu{cpu}" / name) for cpu in cpus}
        if all(text.isascii() and text.isdecimal() and int(text) for text in texts.values()):
            speeds = {cpu: float(text) for cpu, text in texts.items()}
            break
    efficient = set(_numbers(_text(system.parent / "cpu_atom" / "cpus")))
    if not efficient.issuperset(cpus):
        speeds |= {cpu: 0.0 for cpu in cpus if cpu in efficient}
    return speeds


def _sizes(found: Collection[Core]) -> Counter[int]:
    """Return the number of cores of each node."""
    return Counter(core.node for core in found)


def _nodes(system: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield each node of memory with its processors."""
    try:
        names = [entry.name for entry in os.scandir(system / "node")]
    except OSError:
        return
    for name in names:
        if re.fullmatch(r"node[0-9]{1,9}", name):
            yield int(name.removeprefix("node")), _numbers(_text(system / "node" / name / "cpulist"))


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it: `0-3,8`; empty if it is none."""
    if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*", text):
        return []
    found = list[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


@functools.cache
def _performance_cores() -> int:
    """Return macOS's number of performance cores, 0 if it does not tell."""
    text = _sysctl("hw.perflevel0.physicalcpu")
    return int(text) if text.isdecimal() else 0


def _sysctl(name: str) -> str:
    """Return what macOS' kernel says by a name, "" where it has none."""
    try:
        done = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=SYSCTL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
