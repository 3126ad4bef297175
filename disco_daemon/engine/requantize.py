"""`python -m disco_daemon.engine.requantize SOURCE TARGET`: a Q8_0 copy of a model, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .llama import requantize


def main() -> None:
    """Write TARGET whole or not at all."""
    source, target = sys.argv[1:]
    unfinished = f"{target}.{os.getpid()}.new"
    try:
        requantize(source, unfinished, os.cpu_count() or 1)
        Path(unfinished).replace(target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
