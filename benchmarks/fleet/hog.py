"""A program that takes memory: `python -m benchmarks.fleet.hog BYTES_PER_S BYTES`; it keeps it until its stdin ends."""

from __future__ import annotations

import sys
import threading
import time

STEP_S = 0.05


def main() -> None:
    rate, most = int(sys.argv[1]), int(sys.argv[2])
    kept, ended = list[bytes](), threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    began, n = time.monotonic(), 0
    while not ended.wait(STEP_S):
        due = min(most, int(rate * (time.monotonic() - began)))
        if due > n:
            kept.append(b"\1" * (due - n))  # all of its pages are written
            n = due


if __name__ == "__main__":
    main()
