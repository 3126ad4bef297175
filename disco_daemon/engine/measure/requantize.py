"""`python -m disco_daemon.engine.measure.requantize SOURCE TARGET`: a Q8_0 copy of a model, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ...models.gguf import with_shards
from ...system.confine import Access, confine
from ...system.control_groups import n_processors
from ...system.program import end_with_stdin
from ..llama.model import requantize


def main() -> None:
    """Write TARGET whole or not at all. The process ends with its stdin."""
    source, target = sys.argv[1:]
    unfinished = f"{target}.{os.getpid()}.new"
    try:
        Path(unfinished).touch(mode=0o600, exist_ok=False)
        confine(Access(read=with_shards([Path(source)]), replace=Path(unfinished)))
        end_with_stdin(lambda: _give_up(unfinished))
        requantize(source, unfinished, n_processors())
        Path(unfinished).replace(target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _give_up(unfinished: str) -> None:
    Path(unfinished).unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    main()
