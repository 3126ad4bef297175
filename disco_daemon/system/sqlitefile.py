"""A private SQLite file: what the history and the terminal UI's conversations have in common.

A path in the settings may name anything. What is not ours is never opened for writing, moved or given another mode.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LOCK_TIMEOUT_S = 5.0  # for another program that opens a file in the same folder, which takes milliseconds
_HEADER = b"SQLite format 3\0"
_ID = slice(68, 72)  # where a database's header has the application's number
_SEARCHED = 1 << 20  # bytes of a damaged file in which its schema is looked for
# What the files that SQLite keeps beside a database begin with: it replays or empties them when it opens that.
_BESIDE = {
    "-wal": (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83"),
    "-journal": (b"\xd9\xd5\x05\xf9", b"\0\0\0\0"),
    "-shm": (b"\x18\xe2\x2d\0", b"\0\x2d\xe2\x18", b"\0\0\0\0"),
}


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a database of ours is known by: its application's number, tables that all its versions have.

    `made_by` is the text that makes one of them, as SQLite keeps it in the file.
    """

    application_id: int
    tables: frozenset[str]
    made_by: bytes


class ForeignFileError(OSError):
    """A file is not one of ours: it is left alone. The message says why, and does not name it."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EINVAL, f"{why}: it is left alone")


def require_ours(path: Path, kind: FileKind) -> None:
    """Raise ForeignFileError unless there is nothing at `path`, an empty file of our user, or a database of that kind.

    One of ours that is damaged is still ours, as far as it can be told. Nothing is changed, and no lock is taken.
    """
    try:
        seen = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _require_room_beside(path)
    if not stat.S_ISREG(seen.st_mode):
        raise ForeignFileError("it is no regular file")
    if seen.st_size == 0:  # begun by us and not filled, or made for us: nothing in it can be lost
        if seen.st_uid != os.geteuid():
            raise ForeignFileError("it belongs to another user")
        return _require_room_beside(path)
    if not _is_ours(path, kind):
        raise ForeignFileError("it is no database of disco")
    return None


def _require_room_beside(path: Path) -> None:
    """Where there is no database yet, SQLite removes what lies in the place of its log."""
    for suffix, beginnings in _BESIDE.items():
        if (head := _head(path.with_name(path.name + suffix), 4)) and head not in beginnings:
            raise ForeignFileError(f"the file beside it that ends with {suffix} is not SQLite's")


def _is_ours(path: Path, kind: FileKind) -> bool:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            found = _tables(connection)
            number = connection.execute("PRAGMA application_id").fetchone()[0]
    except sqlite3.Error:
        return _was_ours(path, kind)
    if number == kind.application_id or kind.tables <= found:
        return True
    return not found and number == 0 and _is_ours_in_log(path, kind)


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _is_ours_in_log(path: Path, kind: FileKind) -> bool:
    """Whether a database without tables has none, or ours, in its log: a process may have ended before they were in."""
    log = _head(path.with_name(f"{path.name}-wal"), _SEARCHED)
    return kind.made_by in log or b"CREATE " not in log


def _was_ours(path: Path, kind: FileKind) -> bool:
    """Whether a file that SQLite cannot read was once ours, by its header and what is left of its schema."""
    head = _head(path, _SEARCHED)
    if not head.startswith(_HEADER):
        return False
    return head[_ID] == kind.application_id.to_bytes(4, "big") or kind.made_by in head


def _head(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a regular file; none if that cannot be read.

    For damaged files and logs: SQLite's locks on a database go when this process closes it anywhere (POSIX locks).
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(handle, "rb", closefd=True) as file:
        return file.read(n_bytes) if stat.S_ISREG(os.fstat(handle).st_mode) else b""


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
        _locked(handle)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> None:
    """Lock it; without a lock where the file system knows none, or somebody else keeps it for long."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > until:
                return None
        time.sleep(0.005)


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
