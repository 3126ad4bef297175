"""The writing half of the history: a bounded queue, and one thread with the only writing connection."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from disco_daemon.errors import DiscoError
from disco_daemon.system.sqlitefile import ForeignFileError, is_damage
from disco_daemon.types import OWNER, EarlierAnswer, LedgerEntry, Outcome

from .migrations import give_back_free_pages, open_database
from .tables import FOLLOW, rows_of, text_of

_log = logging.getLogger("disco.store")

QUEUE_LIMIT = 10_000  # outcomes that wait for a slow disk; some 10 MB without texts, hours of one user's requests
BUSY_TIMEOUT_S = 5.0  # how long a write waits for another daemon's transaction, which takes milliseconds

# The errors that one odd outcome can cause: the disk is fine, so only that outcome is lost, not its batch.
_SQL_FAULTS = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_ROW_FAULTS: tuple[type[Exception], ...] = (*_SQL_FAULTS, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state at one time, JSON, that the statement `save` writes under its name."""

    save: str
    name: str
    saved: float
    state: str


Item = Outcome | LedgerEntry | SavedState | EarlierAnswer


class Writer:
    """Writes items into the file at `path`, and keeps its newest `max_rows` requests; texts only with `keep_text`.

    Owners: the caller's threads own nothing but the queue, under `_changed`; the writer thread owns `_connection` and
    `_failing` from `open()` to `close()`. What cannot be written is dropped and counted, and said once in the log.
    """

    def __init__(self, path: Path, *, max_rows: int, keep_text: bool, queue_limit: int, busy_timeout_s: float) -> None:
        if max_rows < 1 or queue_limit < 1:
            raise ValueError(f"max_rows and queue_limit must be >= 1: {max_rows}, {queue_limit}")
        self.path = path
        self.error = ""  # why nothing can be written now, without the file's name
        self.foreign = False  # the file is not ours, and is not read
        self._max_rows = max_rows
        self._keep_text = keep_text
        self._queue_limit = queue_limit
        self._busy_timeout_s = busy_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._accepted = self._settled = self._dropped = 0
        self._running = False
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._failing = False
        self._doubted = False  # a damaged page was met: check the whole file before the next write

    def __repr__(self) -> str:
        state = "open" if self._running else "closed"
        return f"<Writer {self.path.name} {state}, queued {len(self._queue)}, dropped {self._dropped}>"

    @property
    def dropped(self) -> int:
        """The items lost since this object was made: queue full, not open, or a disk error."""
        with self._changed:
            return self._dropped

    def open(self) -> None:
        """Open the file and start the thread; `ConfigError` if a newer version wrote the file."""
        if self._thread is not None:
            return
        try:
            self._connection = open_database(self.path, self._busy_timeout_s)
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
        self._running = True
        # Not a daemon thread: the interpreter must not end in the middle of a transaction.
        self._thread = threading.Thread(target=self._write_all, name="disco-history", daemon=False)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue one item and return at once; a full queue drops it and counts it."""
        with self._changed:
            if not self._running or len(self._queue) >= self._queue_limit:
                self._dropped += 1
                return
            self._queue.append(item)
            self._accepted += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all that is queued now is written or counted as dropped; `TimeoutError` after `timeout_s`."""
        with self._changed:
            target = self._accepted
            if not self._changed.wait_for(lambda: self._settled >= target, timeout_s):
                raise TimeoutError(f"the history was not written within {timeout_s} s")

    def close(self) -> None:
        """Write what is queued and join the thread; may be called twice. Takes a few busy time-outs at worst."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def doubt(self) -> None:
        """Check the whole file before the next write: a reader has met a damaged page."""
        self._doubted = True

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        self._store([])  # applies a smaller `max_rows` than last time from the start
        try:
            while batch := self._take():
                lost = self._store(batch)
                with self._changed:
                    self._dropped += lost
                    self._settled += len(batch)
                    self._changed.notify_all()
        finally:
            self._drop_connection()

    def _take(self) -> list[Item]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._running)
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _store(self, batch: Sequence[Item]) -> int:
        """Write one batch; return how many of it were lost."""
        try:
            if self._connection is None or self._doubted:
                self._drop_connection()
                self._connection = open_database(self.path, self._busy_timeout_s, thorough=self._doubted)
                self._doubted = False
            lost = _write(self._connection, batch, self._max_rows, self._keep_text)
        except (OSError, sqlite3.Error, DiscoError) as error:
            self._fail(error)
            return len(batch)
        if self._failing:
            _log.info("history: %s can be written again", self.path)
            self._failing = self.foreign = False
            self.error = ""
        give_back_free_pages(self._connection)
        return lost

    def _fail(self, error: Exception) -> None:
        self._drop_connection()
        self._doubted = self._doubted or is_damage(error)
        self.foreign = isinstance(error, ForeignFileError)
        self.error = getattr(error, "strerror", None) or str(error)
        if not self._failing:  # once per failure: a full disk must not fill the log as well
            why = self.error
            _log.warning("history: %s cannot be written, requests go unrecorded meanwhile: %s", self.path, why)
            self._failing = True

    def _drop_connection(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _write(connection: sqlite3.Connection, batch: Sequence[Item], max_rows: int, keep_text: bool) -> int:
    lost = 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        for item in batch:
            if isinstance(item, SavedState):
                connection.execute(item.save, (text_of(item.name), item.saved, item.state))
            elif isinstance(item, EarlierAnswer):
                _follow(connection, item, OWNER.name)
            else:
                lost += not _insert(connection, item, keep_text)
        connection.execute("DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - ?", (max_rows,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return lost


def _insert(connection: sqlite3.Connection, item: Outcome | LedgerEntry, keep_text: bool) -> bool:
    connection.execute("SAVEPOINT outcome")
    try:
        row, samples = rows_of(item, keep_text)
        request = _put(connection, "requests", row)
        for sample in samples:
            _put(connection, "ttft_samples", sample | {"request": request})
        if isinstance(item, Outcome) and item.earlier is not None and not item.private:
            _follow(connection, item.earlier, item.key)
    except _ROW_FAULTS as error:
        connection.execute("ROLLBACK TO outcome")
        _log.warning("history: request %r cannot be stored: %s", item.request_id, error)
        return False
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE outcome")
    return True


def _follow(connection: sqlite3.Connection, earlier: EarlierAnswer, key: str) -> None:
    connection.execute(FOLLOW, (earlier.act.value, text_of(earlier.request_id), text_of(key)))


def _put(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int | None:
    columns, marks = ", ".join(row), ", ".join(f":{column}" for column in row)
    sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - the names are the keys of `schema`
    return connection.execute(sql, row).lastrowid
