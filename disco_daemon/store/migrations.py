"""Opens the file: private, in WAL mode, migrated to the newest schema by the scripts of `schema`."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from disco_daemon.errors import ConfigError
from disco_daemon.system.sqlitefile import (
    FileKind,
    folder_lock,
    is_damage,
    make_private,
    move_aside,
    require_ours,
    statements,
)

from .tables import MIGRATIONS

_log = logging.getLogger("disco.store")

FREE_PAGES_KEPT = 256  # 1 MiB of free pages is reused by the next rows; more is given back to the file system
WAL_LIMIT_BYTES = 4 << 20  # SQLite checkpoints at 1000 pages of 4 KiB; a larger log is cut back to this

DAMAGED = "corrupt"  # in the name of a history that was moved aside
HISTORY = FileKind(0x64736368, frozenset({"requests", "ttft_samples"}), b"CREATE TABLE requests (")


def migrate(connection: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Bring the schema to the newest version, each step in one transaction; raise `ConfigError` for a newer file.

    `connection` must be in autocommit mode (`isolation_level=None`). Several processes may do this at once.
    """
    found = schema_version(connection)
    if found > len(migrations):
        _, _, path = connection.execute("PRAGMA database_list").fetchone()
        msg = (
            f"the history file {path} was written by a newer version of disco "
            f"(its schema is number {found}, this version knows up to {len(migrations)}): "
            f"update disco, or move the file away to start a new history"
        )
        raise ConfigError(msg)
    for number in range(found + 1, len(migrations) + 1):
        _apply(connection, number, migrations[number - 1])


def schema_version(connection: sqlite3.Connection) -> int:
    """Return how many migrations were applied to this file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _apply(connection: sqlite3.Connection, number: int, script: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Checked again under the write lock: another process may have been first.
        if schema_version(connection) < number:
            for statement in statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number:d}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_database(path: Path, busy_timeout_s: float, *, thorough: bool = False) -> sqlite3.Connection:
    """Return a writing connection to a migrated file; a damaged history is moved aside first.

    `thorough` checks every page. Raises `ConfigError` for a newer schema, `ForeignFileError` for a file that is no
    history, which stays untouched, `OSError` or `sqlite3.Error` if the disk refuses.
    """
    with folder_lock(path.parent):
        require_ours(path, HISTORY)
        try:
            return _connect(path, busy_timeout_s, thorough=thorough)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            aside = move_aside(path, DAMAGED)
            _log.warning("history: %s is unusable (%s); moved to %s, a new one starts", path, error, aside)
        return _connect(path, busy_timeout_s)


def _connect(path: Path, busy_timeout_s: float, *, thorough: bool = False) -> sqlite3.Connection:
    make_private(path)
    # Opened by the caller of `open()`, then used by the writer thread alone.
    connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only before the first write
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last rows, never the file
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # a deleted text does not stay in free pages
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES:d}")
        migrate(connection)
        if connection.execute("PRAGMA application_id").fetchone()[0] != HISTORY.application_id:
            connection.execute(f"PRAGMA application_id = {HISTORY.application_id:d}")  # identifies it if it is damaged
        if thorough:
            _examine(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(connection: sqlite3.Connection) -> None:
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def give_back_free_pages(connection: sqlite3.Connection) -> None:
    """Shrink the file after more rows went than came."""
    with suppress(sqlite3.Error):  # the rows are safe; the next batch tries again
        if connection.execute("PRAGMA freelist_count").fetchone()[0] > FREE_PAGES_KEPT:
            # Not execute(): this pragma frees one page a step and returns no columns, so execute() stops at the first.
            connection.executescript("PRAGMA incremental_vacuum")
