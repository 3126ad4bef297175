"""The file of the conversations: private, in WAL mode, migrated; and the thread that keeps its log short."""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path

from disco_daemon.errors import DiscoError
from disco_daemon.system.sqlitefile import (
    FileKind,
    folder_lock,
    is_damage,
    make_private,
    move_aside,
    require_ours,
    statements,
)

_log = logging.getLogger("disco.tui.store")

BUSY_TIMEOUT_S = 2.0  # for another terminal's transaction, which takes milliseconds
CHECKPOINT_PASSES = 3
LOG_LIMIT_BYTES = 8 << 20  # a longer log is cut back to this

# Times are Unix times, s. `sides` is JSON, [[from character, side], …]; `disco` the JSON of the answer's last chunk.
# `pieces` are the parts of an answer that are not in `turns.text` yet: a row is a commit of a page or two, however long
# the answer is. Turns that were cut have the number of the cut, and the id of the turn at which it began.
_V1 = """
CREATE TABLE conversations (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  title TEXT NOT NULL,
  system TEXT NOT NULL,
  model TEXT NOT NULL,
  created REAL NOT NULL,
  updated REAL NOT NULL,
  deleted REAL
);
CREATE TABLE turns (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
  parent INTEGER,
  role TEXT NOT NULL,
  text TEXT NOT NULL,
  sides TEXT NOT NULL,
  disco TEXT,
  finish TEXT,
  created REAL NOT NULL,
  cut INTEGER,
  cut_at INTEGER
);
CREATE INDEX turns_by_conversation ON turns (conversation);
CREATE TABLE pieces (
  id INTEGER PRIMARY KEY,
  turn INTEGER NOT NULL REFERENCES turns (id) ON DELETE CASCADE,
  side TEXT NOT NULL,
  text TEXT NOT NULL
);
CREATE VIRTUAL TABLE words USING fts5 (
  text, content = 'turns', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3'
);
CREATE TRIGGER turns_added AFTER INSERT ON turns BEGIN
  INSERT INTO words (rowid, text) VALUES (NEW.id, NEW.text);
END;
CREATE TRIGGER turns_gone AFTER DELETE ON turns BEGIN
  INSERT INTO words (words, rowid, text) VALUES ('delete', OLD.id, OLD.text);
END;
CREATE TRIGGER turns_changed AFTER UPDATE OF text ON turns BEGIN
  INSERT INTO words (words, rowid, text) VALUES ('delete', OLD.id, OLD.text);
  INSERT INTO words (rowid, text) VALUES (NEW.id, NEW.text);
END;
CREATE VIRTUAL TABLE titles USING fts5 (
  title, content = 'conversations', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3'
);
CREATE TRIGGER conversations_added AFTER INSERT ON conversations BEGIN
  INSERT INTO titles (rowid, title) VALUES (NEW.id, NEW.title);
END;
CREATE TRIGGER conversations_gone AFTER DELETE ON conversations BEGIN
  INSERT INTO titles (titles, rowid, title) VALUES ('delete', OLD.id, OLD.title);
END;
CREATE TRIGGER conversations_changed AFTER UPDATE OF title ON conversations BEGIN
  INSERT INTO titles (titles, rowid, title) VALUES ('delete', OLD.id, OLD.title);
  INSERT INTO titles (rowid, title) VALUES (NEW.id, NEW.title);
END;
"""
MIGRATIONS: tuple[str, ...] = (_V1,)  # append only: what a released version has run is never edited
CONVERSATIONS = FileKind(0x64736374, frozenset({"conversations", "turns"}), b"CREATE TABLE conversations (")


class StoreError(DiscoError):
    """The conversations cannot be read or written; the message says where they are."""


def open_database(path: Path | None) -> sqlite3.Connection:
    """Return a writing connection in autocommit mode to a migrated file, or to memory.

    A damaged file is moved aside, and a new one begins; a foreign file is left alone. Raises StoreError.
    """
    if path is None:
        return _connect(":memory:")
    try:
        with folder_lock(path.parent):
            require_ours(path, CONVERSATIONS)
            try:
                return _private(path)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                aside = move_aside(path, "damaged")
                _log.warning("%s is damaged (%s); it was moved to %s, a new one begins", path, error, aside)
                return _private(path)
    except (OSError, sqlite3.Error) as error:
        raise unusable(path, error) from error


def open_reader(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads, and never waits for a writer. Raises StoreError."""
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA query_only = ON")
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    return connection


def unusable(path: Path | None, error: Exception) -> StoreError:
    """Return an error of the disk or of SQLite, worded for the user."""
    return StoreError(f"the conversations in {path or 'memory'} cannot be read or written: {error}")


def _private(path: Path) -> sqlite3.Connection:
    make_private(path)
    return _connect(path)


def _connect(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # Nothing is flushed to the disk here: a commit is a write to the log, 15 µs, and survives the process. The
        # Checkpointer flushes log and file, in this order, so a power cut costs the last seconds, not the file.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_LIMIT_BYTES:d}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # a deleted text does not stay in free pages
        _migrate(connection, path)
        if connection.execute("PRAGMA application_id").fetchone()[0] != CONVERSATIONS.application_id:
            connection.execute(
                f"PRAGMA application_id = {CONVERSATIONS.application_id:d}"
            )  # identifies it if it is damaged
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: Path | str) -> None:
    for number, script in enumerate(MIGRATIONS, 1):
        if _version(connection) >= number:
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection) < number:  # again under the lock: another terminal may have been first
                for statement in statements(script):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number:d}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if _version(connection) > len(MIGRATIONS):
        msg = f"{path} was written by a newer version of disco: update disco, or move the file away"
        raise StoreError(msg)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


class Checkpointer:
    """The thread that moves the log into the file. It waits for the disk, so that no writer has to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="disco-conversations", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Ask for a checkpoint; return at once."""
        self._due.set()

    def close(self) -> None:
        """End the thread. Close all other connections first: the last one empties the log."""
        self._closing = True
        self._due.set()
        self._thread.join()

    def _keep(self) -> None:
        with suppress(sqlite3.Error), closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as connection:
            while self._due.wait():
                self._due.clear()
                with suppress(sqlite3.Error):  # a full disk: the log holds all, and the next one tries again
                    # The log begins anew only if all of it is in the file between two commits. The first pass has much
                    # to write, while more comes in; the later ones are short.
                    for _ in range(CHECKPOINT_PASSES):
                        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                if self._closing:
                    return
