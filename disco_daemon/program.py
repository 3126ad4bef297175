"""How this program starts a part of itself as a process of its own: from source, or out of the single binary.

The single binary (docs/binary.md) has no `python -m`. It takes the same two words instead, for its own parts only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CLI = "disco_daemon.cli.main"
PART = "-m"  # the single binary's first word when the second one is a module of PARTS
PARTS = (
    "disco_daemon.bench.loopback",
    "disco_daemon.engine.checkup",
    "disco_daemon.engine.requantize",
    "disco_daemon.engine.tune",
    "disco_daemon.engine.worker",
)
EXECUTABLE = "DISCO_EXECUTABLE"  # variable in which the launcher names its own file; binary/launcher.c sets it
MODEL = "--model-bytes"  # the launcher's own word: it writes the model that it carries to stdout


def is_binary() -> bool:
    """Whether this runs out of the single binary: then there is neither a `python` nor a pip."""
    return bool(getattr(sys, "frozen", False))


def command(module: str, *args: str) -> list[str]:
    """The command that runs a module of this program in a process of its own, as `python -m` does."""
    if is_binary():
        return [sys.executable, PART, module, *args]
    return [sys.executable, "-P", "-m", module, *args]


def verb(*words: str) -> list[str]:
    """The command `disco WORDS…`, carried out by this very program."""
    return [sys.executable, *words] if is_binary() else command(CLI, *words)


def file() -> Path | None:
    """The single binary as the user has it; None from source, or if it has gone.

    `sys.executable` is what the launcher unpacked, which another version removes: nothing that outlives this process
    may point there.
    """
    named = Path(os.environ.get(EXECUTABLE, "")) if is_binary() else Path()
    return named if named.is_absolute() and named.is_file() else None
