"""Reads the history file for `disco doctor`; writes, creates and repairs nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_daemon.errors import Unavailable
from disco_daemon.system.sqlitefile import ForeignFileError, require_ours

from .migrations import HISTORY, schema_version
from .tables import MIGRATIONS

NEWEST = len(MIGRATIONS)  # the schema that this version writes
TIMEOUT_S = 2.0  # for a daemon's transaction, which takes milliseconds


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """The number of the file's schema, its requests, and the time of the latest (Unix time, s; None without any)."""

    schema: int
    requests: int
    latest: float | None


def look(path: Path) -> HistoryFacts:
    """Read the history file at `path`. Blocks on disk. Raises Unavailable if it cannot be read, or is no history."""
    try:
        require_ours(path, HISTORY)
    except ForeignFileError as error:
        raise Unavailable(f"{path} is no history: {error.strerror}; give another history.path") from error
    with _opened(path) as connection:
        schema = schema_version(connection)
        if schema == 0:  # created, and not filled yet
            return HistoryFacts(0, 0, None)
        requests, latest = connection.execute("SELECT count(*), max(created) FROM requests").fetchone()
        return HistoryFacts(schema, int(requests), latest)


def profile(path: Path, name: str) -> dict[str, Any] | None:
    """Return the daemon's findings on a server, JSON, or None. Blocks on disk. Raises Unavailable."""
    with _opened(path) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'profiles'").fetchone():
            return None  # a file of an older version
        row = connection.execute("SELECT state FROM profiles WHERE name = ?", (name,)).fetchone()
    try:
        found = json.loads(row[0]) if row is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file to read it. Raises Unavailable for whatever is wrong with it."""
    # Without a log no process has it open. To read it SQLite would make a log, and leave it behind.
    still = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    uri = f"{path.resolve().as_uri()}?mode=ro{still}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise Unavailable(f"the history {path} cannot be read: {error}") from error
