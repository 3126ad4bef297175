"""A daemon that says where its processor time goes: `python -m benchmarks.relay.sampled_daemon FILE up …`.

SIGUSR1 begins a measurement, SIGUSR2 ends it and writes FILE: a list of stacks, innermost frame first, each a list of
`path:function`, and how often it was met. The kernel's timer for the CPU time of a process asks, so that what waits
costs nothing and calls are not slowed down; it needs nothing of the daemon's code, which may be another checkout's.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.001  # of CPU time between two looks; many kernels look every 4 ms at most
Stack = tuple[str, ...]


def stack_of(frame: FrameType | None) -> Stack:
    """Return the functions of a frame and of those that called it."""
    found = []
    while frame is not None:
        found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def sample_into(path: Path) -> None:
    """Measure between the two signals; the file is whole or not there."""
    met = Counter[Stack]()

    def look(_number: int, frame: FrameType | None) -> None:
        met[stack_of(frame)] += 1

    def begin(_number: int, _frame: FrameType | None) -> None:
        met.clear()
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(list(met.items())), "utf-8")
        unfinished.replace(path)

    signal.signal(signal.SIGPROF, look)
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, stop)


def main() -> int:
    """Run a verb, sampled."""
    file, *words = sys.argv[1:]
    sample_into(Path(file))
    from disco_daemon.cli.main import main as disco

    return disco(words)


if __name__ == "__main__":
    sys.exit(main())
