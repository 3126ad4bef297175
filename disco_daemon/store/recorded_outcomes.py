"""Reads recorded outcomes, to compute what another setting would have cost; never a text."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from disco_daemon.errors import Unavailable
from disco_daemon.types import Attempt, Delivery, Outcome, Plan, Side, Usage

BUSY_TIMEOUT_S = 5.0  # as the history itself waits for another's transaction
MOST = 20_000  # requests; as many as the history keeps by default

# Columns that every version of the schema has but for `{later}`; the texts are not among them.
_REQUESTS = """
SELECT id, request_id, created, model, policy, plan_device_s, plan_server_s, prompt_tokens, winner, finish_reason,
  error, ttft_s, duration_s, handoffs, device_tokens, server_tokens, cost_usd, energy_j, {later}
FROM requests WHERE created >= ? ORDER BY id DESC LIMIT ?
"""
_LATER = ("delivery", "kind", "private")
_SAMPLES = "SELECT * FROM ttft_samples WHERE request >= ? ORDER BY request, id"


def outcomes(path: Path, since: float = 0.0, limit: int = MOST) -> list[Outcome]:
    """Return the newest `limit` requests since a Unix time, s, oldest first; a daemon may be writing meanwhile.

    Embeddings and probes have rows, too, and come as outcomes without a TTFT. What a row does not have keeps its
    default: texts, moves, the reading. Tokens that an uncancelled device did not process were in its cache. Raises
    Unavailable if the file cannot be read.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            connection.row_factory = sqlite3.Row
            rows = connection.execute(_query(connection), (since, max(0, limit))).fetchall()[::-1]
            samples = connection.execute(_SAMPLES, (rows[0]["id"],)).fetchall() if rows else []
    except sqlite3.Error as error:
        raise Unavailable(f"the history cannot be read: {error}") from error
    attempts = {request: list(own) for request, own in groupby(samples, key=lambda sample: sample["request"])}
    return [_outcome(row, tuple(_attempts(row, attempts.get(row["id"], ())))) for row in rows]


def _query(connection: sqlite3.Connection) -> str:
    """Return the query for requests of this file's schema: older ones lack some columns, which are NULL then."""
    columns = {row["name"] for row in connection.execute("PRAGMA table_info(requests)")}
    return _REQUESTS.format(later=", ".join(name if name in columns else f"NULL AS {name}" for name in _LATER))


def _outcome(row: Mapping[str, Any], attempts: tuple[Attempt, ...]) -> Outcome:
    return Outcome(
        request_id=row["request_id"],
        created=row["created"],
        model=row["model"],
        policy=row["policy"],
        plan=Plan(_delay(row["plan_device_s"]), _delay(row["plan_server_s"])),
        prompt_tokens=row["prompt_tokens"],
        winner=None if row["winner"] is None else Side(row["winner"]),
        finish_reason=row["finish_reason"],
        error=row["error"],
        ttft_s=row["ttft_s"],
        duration_s=row["duration_s"],
        handoffs=row["handoffs"],
        tokens={side: row[f"{side.value}_tokens"] for side in Side},
        attempts=attempts,
        cost_usd=row["cost_usd"],
        energy_j=row["energy_j"],
        delivery=Delivery(row["delivery"] or Delivery.RESERVE),
        kind=row["kind"] or None,
        private=bool(row["private"]),
    )


def _attempts(row: Mapping[str, Any], samples: Sequence[sqlite3.Row]) -> Iterator[Attempt]:
    for sample in samples:
        found = dict(sample)  # an older schema lacks some columns
        side, censored = Side(found["side"]), bool(found["censored"])
        processed = found["processed_tokens"]
        whole = side is Side.DEVICE and not censored and processed > 0
        cached = max(0, row["prompt_tokens"] - processed) if whole else 0
        yield Attempt(
            side=side,
            model=found["model"],
            started_s=found["started_s"],
            ttft_s=found["ttft_s"],
            censored=censored,
            usage=Usage(processed, found["completion_tokens"], found["busy_s"], cached),
            error=found["error"],
            load_s=found.get("load_s", 0.0),
            n_busy=found.get("n_busy", 0),
            continued=bool(found.get("continued", 0)),
            disturbed=bool(found.get("disturbed", 0)),
            bill_usd=found.get("bill_usd", 0.0),
            server=found.get("server"),
        )


def _delay(stored: float | None) -> float:
    return math.inf if stored is None else stored
