"""The history of finished answers: one SQLite file, written by `writer`, with a read-only connection per query."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Self

import msgspec

from disco_daemon.errors import Unavailable
from disco_daemon.system.sqlitefile import is_damage
from disco_daemon.types import EarlierAnswer, LedgerEntry, Outcome, Side

from .recorded_outcomes import outcomes
from .tables import text_of
from .usage import DAYS_OF_KEY, SUMS, USD_OF_SERVERS, By, used
from .writer import BUSY_TIMEOUT_S, QUEUE_LIMIT, SavedState, Writer

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
_KEY_DAYS = "SELECT day, requests, picousd, microj FROM key_days WHERE key = ? ORDER BY day DESC LIMIT ?"
_SAVE_LEARNED = """
INSERT INTO estimators (endpoints, saved, state) VALUES (?, ?, ?)
ON CONFLICT (endpoints) DO UPDATE SET saved = excluded.saved, state = excluded.state
"""
_SAVE_PROFILE = """
INSERT INTO profiles (name, updated, state) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET updated = excluded.updated, state = excluded.state
"""
# The columns that show whether an answer did, of a model's latest: none of them has a text of anybody.
_TAUGHT = """
SELECT prompt_tokens, kind, followed, stopped, finish_reason, ttft_s, duration_s FROM requests
WHERE teaches_of = ? ORDER BY id DESC LIMIT ?
"""
_MAX_ID = (1 << 63) - 1
READ_PATIENCE_S = 2.0  # how long a reader waits for what is queued before it, which is written within milliseconds
PICO, MICRO = 1e12, 1e6  # the ledger counts in these parts of a $ and of a J


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over some days: finished requests, the servers' bill, $, and this machine's energy, J."""

    requests: int
    server_usd: float
    energy_j: float


class History:
    """Finished answers on disk, newest `max_rows` kept; texts only with `keep_text`.

    Every thread may use it. Reading works before `open()` and after `close()` too. What is read has all that was queued
    before, unless the disk takes longer than `READ_PATIENCE_S`.
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
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._writer = Writer(
            path, max_rows=max_rows, keep_text=keep_text, queue_limit=queue_limit, busy_timeout_s=busy_timeout_s
        )

    def __repr__(self) -> str:
        return f"<History by {self._writer!r}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """The outcomes lost since this object was made: queue full, not open, or a disk error."""
        return self._writer.dropped

    @property
    def error(self) -> str:
        """Why nothing can be recorded now, without the file's name; empty if all is well."""
        return self._writer.error

    def open(self) -> None:
        """Create folder, file and schema and start the writer; `ConfigError` if a newer version wrote the file.

        A damaged file is moved aside. A file that is no history is left alone, and nothing is recorded. If the disk
        refuses, the history opens all the same and tries again later.
        """
        self._writer.open()

    def record(self, outcome: Outcome) -> None:
        """Queue one outcome and return at once; a full queue drops it and counts it."""
        self._writer.put(replace(outcome, arrivals_s=()))  # the queue is bounded in outcomes, not in tokens

    def book(self, entry: LedgerEntry) -> None:
        """Queue one cost without an answer, as `record` does."""
        self._writer.put(entry)

    def follow(self, earlier: EarlierAnswer) -> None:
        """Queue what the owner did next after an answer of theirs; of an unknown or a private one nothing is kept."""
        self._writer.put(earlier)

    def save_learned(self, endpoints: str, saved: float, state: Mapping[str, Any]) -> None:
        """Queue the estimators' state, JSON, under the name of its endpoints; `saved` is Unix time, s.

        It has thousands of numbers, of which `json` would make text for half a millisecond, ten times as long. One that
        is not finite becomes null, which no estimator takes. Raises TypeError on what is no JSON.
        """
        text = msgspec.json.encode(state, enc_hook=float).decode()  # numpy's numbers are no plain ones
        self._writer.put(SavedState(_SAVE_LEARNED, endpoints, saved, text))

    def learned(self, endpoints: str) -> dict[str, Any] | None:
        """Return the state last saved under that name; None if it is missing or no JSON object."""
        return self._state("SELECT state FROM estimators WHERE endpoints = ?", endpoints)

    def save_profile(self, name: str, now: float, state: Mapping[str, Any]) -> None:
        """Queue a server's profile, JSON, under its name; `now` is Unix time, s."""
        self._writer.put(SavedState(_SAVE_PROFILE, name, now, json.dumps(state, allow_nan=False)))

    def profile(self, name: str) -> dict[str, Any] | None:
        """Return the profile last saved under that name, or None. Blocks on disk."""
        return self._state("SELECT state FROM profiles WHERE name = ?", name)

    def _state(self, sql: str, name: str) -> dict[str, Any] | None:
        rows = self._read(sql, (text_of(name),))
        try:
            state = json.loads(rows[0]["state"]) if rows else None
        except ValueError:
            return None
        return state if isinstance(state, dict) else None

    def flush(self, timeout_s: float) -> None:
        """Wait until all that is queued now is written or counted as dropped; `TimeoutError` after `timeout_s`."""
        self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what is queued and end the writer; may be called twice. Takes a few busy time-outs at worst."""
        self._writer.close()

    def recent(self, limit: int, before_id: int | None = None) -> list[dict[str, Any]]:
        """Return the newest requests, newest first; the next page starts with `before_id` = the last `id`.

        `moves` is a list, which is empty in rows of older versions.
        """
        rows = self._read(_RECENT, (_MAX_ID if before_id is None else before_id, max(0, limit)))
        return [{**dict(row), "moves": json.loads(row["moves"] or "[]")} for row in rows]

    def taught(self, model: str, limit: int) -> list[sqlite3.Row]:
        """Return what the newest answers of a model of this machine teach, newest first; nothing is waited for."""
        return self._read(_TAUGHT, (text_of(model), max(0, limit)), after_queued=False)

    def outcomes(self) -> list[Outcome]:
        """Return the newest requests to compute with, oldest first, as `past.outcomes` does."""
        self._await_queued()
        return outcomes(self.path)

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

    def days(self, limit: int, key: str | None = None) -> list[dict[str, Any]]:
        """Return the spending of each of the latest days, newest first: `server_usd` and `energy_j`.

        That of all, or of what the key with that name has asked.
        """
        if key is None:
            rows = self._read(_DAYS, (max(0, limit),))
        else:
            rows = self._read(_KEY_DAYS, (text_of(key), max(0, limit)))
        return [
            {
                "day": row["day"],
                "requests": row["requests"],
                "server_usd": row["picousd"] / PICO,
                "energy_j": row["microj"] / MICRO,
            }
            for row in rows
        ]

    def usage(self, by: By, first: date) -> list[dict[str, Any]]:
        """Return what was used from a local day on, by key, model, server or day; see `usage`."""
        return used(self._read(SUMS[by], (first.isoformat(),)), by)

    def usage_of_key(self, key: str, first: date) -> list[dict[str, Any]]:
        """Return what one key has used on each local day from that one on, newest first."""
        return used(self._read(DAYS_OF_KEY, (first.isoformat(), key)), "day")

    def usd_of_servers(self, day: date) -> dict[str, float]:
        """Return what each model of each server has cost on a local day, $, by `SERVER/MODEL`."""
        return {row["what"]: row["usd"] for row in self._read(USD_OF_SERVERS, (day.isoformat(),))}

    def _await_queued(self) -> None:
        with suppress(TimeoutError):
            self._writer.flush(READ_PATIENCE_S)

    def _read(self, sql: str, arguments: tuple[object, ...], *, after_queued: bool = True) -> list[sqlite3.Row]:
        if self._writer.foreign:
            raise Unavailable(f"there is no history: {self._writer.error}")
        if after_queued:
            self._await_queued()
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=self._busy_timeout_s)) as connection:
                connection.row_factory = sqlite3.Row
                return connection.execute(sql, arguments).fetchall()
        except sqlite3.Error as error:
            if is_damage(error):
                self._writer.doubt()
            raise Unavailable(f"the history cannot be read: {error}") from error
