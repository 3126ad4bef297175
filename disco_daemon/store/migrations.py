"""Opens the file: private, in WAL mode, migrated to the newest schema.

The schema is a numbered list of scripts. Append only: what a released version has run is never edited.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from disco_daemon.errors import ConfigError
from disco_daemon.sqlitefile import FileKind, folder_lock, is_damage, make_private, move_aside, require_ours, statements

_log = logging.getLogger("disco.store")

FREE_PAGES_KEPT = 256  # 1 MiB of free pages is reused by the next rows; more is given back to the file system
WAL_LIMIT_BYTES = 4 << 20  # SQLite checkpoints at 1000 pages of 4 KiB; a larger log is cut back to this

# Times in s (`created` is Unix time), money in US dollars, energy in J. A plan delay of NULL means "not planned" (inf).
# AUTOINCREMENT: an id is never used twice, so paging by id stays right while old rows go.
_V1 = """
CREATE TABLE requests (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  request_id TEXT NOT NULL,
  created REAL NOT NULL,
  model TEXT NOT NULL,
  policy TEXT NOT NULL,
  plan_device_s REAL,
  plan_server_s REAL,
  prompt_tokens INTEGER NOT NULL,
  winner TEXT,
  finish_reason TEXT,
  error TEXT,
  ttft_s REAL,
  duration_s REAL NOT NULL,
  handoffs INTEGER NOT NULL,
  device_tokens INTEGER NOT NULL,
  server_tokens INTEGER NOT NULL,
  cost_usd REAL NOT NULL,
  energy_j REAL NOT NULL,
  prompt TEXT,
  answer TEXT
);
CREATE TABLE ttft_samples (
  id INTEGER PRIMARY KEY,
  request INTEGER NOT NULL REFERENCES requests (id) ON DELETE CASCADE,
  created REAL NOT NULL,
  side TEXT NOT NULL,
  model TEXT NOT NULL,
  started_s REAL NOT NULL,
  ttft_s REAL NOT NULL,
  censored INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  processed_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  busy_s REAL NOT NULL,
  error TEXT
);
CREATE INDEX ttft_samples_by_request ON ttft_samples (request);
CREATE INDEX ttft_samples_by_endpoint ON ttft_samples (side, model);
"""

# The conditions of each attempt, and the learned state: `state` is the estimators' own JSON, for these `endpoints`.
_V2 = """
ALTER TABLE ttft_samples ADD COLUMN load_s REAL NOT NULL DEFAULT 0;
ALTER TABLE ttft_samples ADD COLUMN n_busy INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ttft_samples ADD COLUMN continued INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ttft_samples ADD COLUMN disturbed INTEGER NOT NULL DEFAULT 0;
CREATE TABLE estimators (
  endpoints TEXT PRIMARY KEY,
  saved REAL NOT NULL,
  state TEXT NOT NULL
);
"""

# How the answer read (NULL: it had no tokens, or an older version wrote the row), its handoffs as JSON, and the probe's
# findings on each server.
_V3 = """
ALTER TABLE requests ADD COLUMN qoe REAL;
ALTER TABLE requests ADD COLUMN ttlt_s REAL;
ALTER TABLE requests ADD COLUMN largest_gap_s REAL;
ALTER TABLE requests ADD COLUMN stalled INTEGER;
ALTER TABLE requests ADD COLUMN tbt_p50_s REAL;
ALTER TABLE requests ADD COLUMN tbt_p99_s REAL;
ALTER TABLE requests ADD COLUMN delivery TEXT;
ALTER TABLE requests ADD COLUMN moves TEXT;
CREATE TABLE profiles (
  name TEXT PRIMARY KEY,
  updated REAL NOT NULL,
  state TEXT NOT NULL
);
"""

# The ledger: the cost of every start, and the sums of each day, which outlive their rows. Triggers keep the sums in the
# transaction that writes a row, so that rows and sums agree whenever the process dies. The sums are whole numbers of
# millionths of a micro-$, and of micro-J, since a sum of floats depends on its order. `day` is a local date; `gone_*`
# is the part of a sum whose rows were deleted to make room. A change of time zone moves no row. Rows of an older
# version that still runs have no day.
_V4 = """
ALTER TABLE requests ADD COLUMN server_usd REAL NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN day TEXT;
ALTER TABLE ttft_samples ADD COLUMN bill_usd REAL NOT NULL DEFAULT 0;
ALTER TABLE ttft_samples ADD COLUMN energy_j REAL NOT NULL DEFAULT 0;
ALTER TABLE ttft_samples ADD COLUMN unseen_tokens INTEGER NOT NULL DEFAULT 0;
CREATE TABLE ledger (
  day TEXT PRIMARY KEY,
  requests INTEGER NOT NULL DEFAULT 0,
  picousd INTEGER NOT NULL DEFAULT 0,
  microj INTEGER NOT NULL DEFAULT 0,
  gone_requests INTEGER NOT NULL DEFAULT 0,
  gone_picousd INTEGER NOT NULL DEFAULT 0,
  gone_microj INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
UPDATE requests SET day = date(created, 'unixepoch', 'localtime');
INSERT INTO ledger (day, requests, microj)
  SELECT day, count(*), sum(CAST(round(energy_j * 1e6) AS INTEGER)) FROM requests WHERE day IS NOT NULL GROUP BY day;
CREATE TRIGGER booked AFTER INSERT ON requests BEGIN
  INSERT INTO ledger (day, requests, picousd, microj) VALUES (
    coalesce(NEW.day, ''), 1, CAST(round(NEW.server_usd * 1e12) AS INTEGER), CAST(round(NEW.energy_j * 1e6) AS INTEGER)
  ) ON CONFLICT (day) DO UPDATE SET
    requests = requests + excluded.requests,
    picousd = picousd + excluded.picousd,
    microj = microj + excluded.microj;
END;
CREATE TRIGGER gone AFTER DELETE ON requests BEGIN
  UPDATE ledger SET
    gone_requests = gone_requests + 1,
    gone_picousd = gone_picousd + CAST(round(OLD.server_usd * 1e12) AS INTEGER),
    gone_microj = gone_microj + CAST(round(OLD.energy_j * 1e6) AS INTEGER)
  WHERE day = coalesce(OLD.day, '');
END;
"""

MIGRATIONS: tuple[str, ...] = (_V1, _V2, _V3, _V4)
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
            aside = move_aside(path, "corrupt")
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
