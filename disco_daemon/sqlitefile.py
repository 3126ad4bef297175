"""A private SQLite file: what the history and the terminal UI's conversations have in common."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def statements(script: str) -> Iterator[str]:
    """The statements of a script, to be executed within one transaction."""
    # Not executescript(): that one commits first and so would tear the step out of its transaction.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder, made if it is missing. Raises OSError."""
    # Two programs that find the same damaged file must not move each other's fresh one aside.
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # a folder that was there before keeps its owner's choice
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def make_private(path: Path) -> None:
    """Make the file if it is missing, readable by its owner only. Raises OSError."""
    # O_EXCL: opening and closing an existing file here would drop this process's SQLite locks on it (POSIX locks).
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        with suppress(PermissionError):
            if path.is_file():
                path.chmod(0o600)


def move_aside(path: Path, why: str) -> Path:
    """Give a file and its log another name, `why` in it; the new one. Raises OSError."""
    stamp = int(time.time())
    while (aside := path.with_name(f"{path.name}.{why}-{stamp}")).exists():
        stamp += 1
    # The log goes first: next to a new file, an old log would be replayed into it.
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def is_damage(error: Exception) -> bool:
    """Whether the content of the file is at fault, not the disk and not a lock."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
