"""The history: one SQLite file, one writer thread with the only writing connection, a read-only one per query."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Self

from disco_daemon.errors import DiscoError, Unavailable
from disco_daemon.sqlitefile import ForeignFileError, is_damage
from disco_daemon.types import Attempt, Outcome, Reading, Side, finite

from .migrations import give_back_free_pages, open_database

_log = logging.getLogger("disco.store")

QUEUE_LIMIT = 10_000  # outcomes that wait for a slow disk; some 10 MB without texts, hours of one user's requests
BUSY_TIMEOUT_S = 5.0  # how long a write waits for another daemon's transaction, which takes milliseconds

_RECENT = "SELECT * FROM requests WHERE id < ? ORDER BY id DESC LIMIT ?"
_SAMPLES = """
SELECT r.request_id, s.side, s.model, s.started_s, s.ttft_s, s.censored, s.prompt_tokens, s.processed_tokens,
  s.completion_tokens, s.busy_s, s.error, s.created
FROM ttft_samples s JOIN requests r ON r.id = s.request
WHERE s.side = ? AND s.model = ? ORDER BY s.id DESC LIMIT ?
"""
_TOTALS = """
SELECT count(*) AS requests, coalesce(sum(device_tokens), 0) AS device, coalesce(sum(server_tokens), 0) AS server,
  total(cost_usd) AS cost_usd, total(energy_j) AS energy_j, count(error) AS errors
FROM requests
"""
_LEDGER = """
SELECT total(requests) AS requests, total(picousd) AS picousd, total(microj) AS microj,
  total(gone_requests) AS gone_requests, total(gone_picousd) AS gone_picousd, total(gone_microj) AS gone_microj
FROM ledger WHERE day >= ? AND day <= ?
"""
_DAYS = "SELECT day, requests, picousd, microj FROM ledger ORDER BY day DESC LIMIT ?"
_SAVE_LEARNED = """
INSERT INTO estimators (endpoints, saved, state) VALUES (?, ?, ?)
ON CONFLICT (endpoints) DO UPDATE SET saved = excluded.saved, state = excluded.state
"""
_SAVE_PROFILE = """
INSERT INTO profiles (name, updated, state) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET updated = excluded.updated, state = excluded.state
"""
_MAX_ID = (1 << 63) - 1
PICO, MICRO = 1e12, 1e6  # the ledger counts in these parts of a $ and of a J
_READING = tuple(field.name for field in fields(Reading))  # columns of the same names
# The errors that one odd outcome can cause: the disk is fine, so only that outcome is lost, not its batch.
_SQL_FAULTS = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_ROW_FAULTS: tuple[type[Exception], ...] = (*_SQL_FAULTS, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over some days: finished requests, the servers' bill, $, and this machine's energy, J."""

    requests: int
    server_usd: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class _State:
    """A state at one time, JSON, that the statement `save` writes under its name."""

    save: str
    name: str
    saved: float
    state: str


class History:
    """Finished answers on disk, newest `max_rows` kept; texts only with `keep_text`.

    Owners: the caller's threads own nothing but the queue, under `_changed`; the writer thread owns `_writer` and
    `_failing` from `open()` to `close()`. Reading works before `open()` and after `close()` too.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_rows: int = 20_000,
        keep_text: bool = False,
        queue_limit: int = QUEUE_LIMIT,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        if max_rows < 1 or queue_limit < 1:
            msg = f"max_rows and queue_limit must be >= 1: {max_rows}, {queue_limit}"
            raise ValueError(msg)
        self.path = path
        self._max_rows = max_rows
        self._keep_text = keep_text
        self._queue_limit = queue_limit
        self._busy_timeout_s = busy_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Outcome | _State] = deque()
        self._accepted = self._settled = self._dropped = 0
        self._running = False
        self._thread: threading.Thread | None = None
        self._writer: sqlite3.Connection | None = None
        self._failing = False
        self._error = ""
        self._foreign = False  # the file is not ours, and is not read
        self._doubted = False  # a damaged page was met: check the whole file before the next write

    def __repr__(self) -> str:
        state = "open" if self._running else "closed"
        return f"<History {self.path.name} {state}, queued {len(self._queue)}, dropped {self._dropped}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """The outcomes lost since this object was made: queue full, not open, or a disk error."""
        with self._changed:
            return self._dropped

    @property
    def error(self) -> str:
        """Why nothing can be recorded now, without the file's name; empty if all is well."""
        return self._error

    def open(self) -> None:
        """Create folder, file and schema and start the writer; `ConfigError` if a newer version wrote the file.

        A damaged file is moved aside. A file that is no history is left alone, and nothing is recorded. If the disk
        refuses, the history opens all the same and tries again later.
        """
        if self._thread is not None:
            return
        try:
            self._writer = open_database(self.path, self._busy_timeout_s)
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
        self._running = True
        # Not a daemon thread: the interpreter must not end in the middle of a transaction.
        self._thread = threading.Thread(target=self._write_all, name="disco-history", daemon=False)
        self._thread.start()

    def record(self, outcome: Outcome) -> None:
        """Queue one outcome and return at once; a full queue drops it and counts it."""
        self._put(replace(outcome, arrivals_s=()))  # the queue is bounded in outcomes, not in tokens

    def save_learned(self, endpoints: str, saved: float, state: Mapping[str, Any]) -> None:
        """Queue the estimators' state, JSON, under the name of its endpoints; `saved` is Unix time, s."""
        self._put(_State(_SAVE_LEARNED, endpoints, saved, json.dumps(state, allow_nan=False)))

    def learned(self, endpoints: str) -> dict[str, Any] | None:
        """Return the state last saved under that name; None if it is missing or no JSON object."""
        return self._state("SELECT state FROM estimators WHERE endpoints = ?", endpoints)

    def save_profile(self, name: str, now: float, state: Mapping[str, Any]) -> None:
        """Queue a server's profile, JSON, under its name; `now` is Unix time, s."""
        self._put(_State(_SAVE_PROFILE, name, now, json.dumps(state, allow_nan=False)))

    def profile(self, name: str) -> dict[str, Any] | None:
        """Return the profile last saved under that name, or None. Blocks on disk."""
        return self._state("SELECT state FROM profiles WHERE name = ?", name)

    def _state(self, sql: str, name: str) -> dict[str, Any] | None:
        rows = self._read(sql, (_text(name),))
        try:
            state = json.loads(rows[0]["state"]) if rows else None
        except ValueError:
            return None
        return state if isinstance(state, dict) else None

    def _put(self, item: Outcome | _State) -> None:
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
                msg = f"the history was not written within {timeout_s} s"
                raise TimeoutError(msg)

    def close(self) -> None:
        """Write what is queued and join the writer; may be called twice. Takes a few busy time-outs at worst."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def recent(self, limit: int, before_id: int | None = None) -> list[dict[str, Any]]:
        """Return the newest requests, newest first; the next page starts with `before_id` = the last `id`.

        `moves` is a list, which is empty in rows of older versions.
        """
        rows = self._read(_RECENT, (_MAX_ID if before_id is None else before_id, max(0, limit)))
        return [{**dict(row), "moves": json.loads(row["moves"] or "[]")} for row in rows]

    def samples(self, side: Side, model: str, limit: int) -> list[dict[str, Any]]:
        """Return the newest TTFT samples of one endpoint, newest first; times in s.

        `prompt_tokens` is the length of the request's prompt, `processed_tokens` what the endpoint reported.
        """
        rows = self._read(_SAMPLES, (side.value, model, max(0, limit)))
        return [{**dict(row), "censored": bool(row["censored"])} for row in rows]

    def totals(self) -> dict[str, Any]:
        """Sum up the rows kept: requests, tokens of each side, `cost_usd`, `energy_j` in J, failed requests."""
        row = dict(self._read(_TOTALS, ())[0])
        row["tokens"] = {side.value: row.pop(side.value) for side in Side}
        return row

    def spent(self, first: date, last: date) -> Ledger:
        """Sum up the spending from one local day to another, both included, also of requests no longer kept."""
        row = self._read(_LEDGER, (first.isoformat(), last.isoformat()))[0]
        return Ledger(int(row["requests"]), row["picousd"] / PICO, row["microj"] / MICRO)

    def days(self, limit: int) -> list[dict[str, Any]]:
        """Return the spending of each of the latest days, newest first: `server_usd` and `energy_j`."""
        rows = self._read(_DAYS, (max(0, limit),))
        return [
            {
                "day": row["day"],
                "requests": row["requests"],
                "server_usd": row["picousd"] / PICO,
                "energy_j": row["microj"] / MICRO,
            }
            for row in rows
        ]

    def _read(self, sql: str, arguments: tuple[object, ...]) -> list[sqlite3.Row]:
        if self._foreign:
            msg = f"there is no history: {self._error}"
            raise Unavailable(msg)
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=self._busy_timeout_s)) as connection:
                connection.row_factory = sqlite3.Row
                return connection.execute(sql, arguments).fetchall()
        except sqlite3.Error as error:
            self._doubted = self._doubted or is_damage(error)
            msg = f"the history cannot be read: {error}"
            raise Unavailable(msg) from error

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

    def _take(self) -> list[Outcome | _State]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._running)
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _store(self, batch: Sequence[Outcome | _State]) -> int:
        """Write one batch; return how many of it were lost."""
        try:
            if self._writer is None or self._doubted:
                self._drop_connection()
                self._writer = open_database(self.path, self._busy_timeout_s, thorough=self._doubted)
                self._doubted = False
            lost = _write(self._writer, batch, self._max_rows, self._keep_text)
        except (OSError, sqlite3.Error, DiscoError) as error:
            self._fail(error)
            return len(batch)
        if self._failing:
            _log.info("history: %s can be written again", self.path)
            self._failing = self._foreign = False
            self._error = ""
        give_back_free_pages(self._writer)
        return lost

    def _fail(self, error: Exception) -> None:
        self._drop_connection()
        self._doubted = self._doubted or is_damage(error)
        self._foreign = isinstance(error, ForeignFileError)
        self._error = getattr(error, "strerror", None) or str(error)
        if not self._failing:  # once per failure: a full disk must not fill the log as well
            why = self._error
            _log.warning("history: %s cannot be written, requests go unrecorded meanwhile: %s", self.path, why)
            self._failing = True

    def _drop_connection(self) -> None:
        if self._writer is not None:
            with suppress(sqlite3.Error):
                self._writer.close()
            self._writer = None


def _write(connection: sqlite3.Connection, batch: Sequence[Outcome | _State], max_rows: int, keep_text: bool) -> int:
    lost = 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        for item in batch:
            if isinstance(item, _State):
                connection.execute(item.save, (_text(item.name), item.saved, item.state))
            else:
                lost += not _insert(connection, item, keep_text)
        connection.execute("DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - ?", (max_rows,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return lost


def _insert(connection: sqlite3.Connection, outcome: Outcome, keep_text: bool) -> bool:
    connection.execute("SAVEPOINT outcome")
    try:
        request = _put(connection, "requests", _request_row(outcome, keep_text))
        for attempt in outcome.attempts:
            _put(connection, "ttft_samples", _sample_row(outcome, attempt, request))
    except _ROW_FAULTS as error:
        connection.execute("ROLLBACK TO outcome")
        _log.warning("history: request %r cannot be stored: %s", outcome.request_id, error)
        return False
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE outcome")
    return True


def _put(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int | None:
    columns, marks = ", ".join(row), ", ".join(f":{column}" for column in row)
    sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - the names are the keys written below
    return connection.execute(sql, row).lastrowid


def _request_row(outcome: Outcome, keep_text: bool) -> dict[str, object]:
    reading = dict.fromkeys(_READING) if outcome.reading is None else asdict(outcome.reading)
    return reading | {
        "request_id": _text(outcome.request_id),
        "created": outcome.created,
        "model": _text(outcome.model),
        "policy": outcome.policy,
        "plan_device_s": finite(outcome.plan.device_s),
        "plan_server_s": finite(outcome.plan.server_s),
        "prompt_tokens": outcome.prompt_tokens,
        "winner": _text(outcome.winner),
        "finish_reason": _text(outcome.finish_reason),
        "error": _text(outcome.error),
        "ttft_s": outcome.ttft_s,
        "duration_s": outcome.duration_s,
        "handoffs": outcome.handoffs,
        "device_tokens": outcome.tokens.get(Side.DEVICE, 0),
        "server_tokens": outcome.tokens.get(Side.SERVER, 0),
        "cost_usd": outcome.cost_usd,
        "server_usd": outcome.server_usd,
        "energy_j": outcome.energy_j,
        "day": _day(outcome.created),
        "prompt": _text(outcome.prompt) if keep_text else None,
        "answer": _text(outcome.answer) if keep_text else None,
        "delivery": outcome.delivery.value,
        "moves": json.dumps([asdict(move) for move in outcome.moves], allow_nan=False),
    }


def _sample_row(outcome: Outcome, attempt: Attempt, request: int | None) -> dict[str, object]:
    return {
        "request": request,
        "created": outcome.created,
        "side": attempt.side.value,
        "model": _text(attempt.model),
        "started_s": attempt.started_s,
        "ttft_s": attempt.ttft_s,
        "censored": attempt.censored,
        "prompt_tokens": outcome.prompt_tokens,
        "processed_tokens": attempt.usage.prompt_tokens,
        "completion_tokens": attempt.usage.completion_tokens,
        "busy_s": attempt.usage.busy_s,
        "error": _text(attempt.error),
        "load_s": attempt.load_s,
        "n_busy": attempt.n_busy,
        "continued": attempt.continued,
        "disturbed": attempt.disturbed,
        "bill_usd": attempt.bill_usd,
        "energy_j": attempt.energy_j,
        "unseen_tokens": attempt.unseen_tokens,
    }


def _day(created: float) -> str:
    """Return the local day of a Unix time; "" if no calendar has it."""
    try:
        return datetime.fromtimestamp(created).date().isoformat()  # noqa: DTZ006 - the user's own day is wanted
    except (ValueError, OverflowError, OSError):
        return ""


def _text(text: str | None) -> str | None:
    """Replace lone surrogates, which JSON can carry and SQLite cannot."""
    return None if text is None else text.encode("utf-8", "replace").decode()
