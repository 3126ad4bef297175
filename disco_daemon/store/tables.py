"""The tables of the history, and the value that each of their columns gets: a new column is added in this file only.

The tables are a numbered list of scripts. Append only: what a released version has run is never edited. A column is an
`ALTER TABLE` in a script of its own, with a default for the rows that are there, and a line in `_request_row` or in
`_sample_row`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from datetime import datetime

import msgspec

from disco_daemon.types import Attempt, Delivery, LedgerEntry, Outcome, Reading, Side, finite

Row = dict[str, object]

# What the reader of an earlier answer did next goes with that answer's row, for as long as that is kept; a private one
# keeps nothing. Nobody says so of an answer that another key got: what is learned of such rows moves the owner's money.
FOLLOW = "UPDATE requests SET followed = ? WHERE request_id = ? AND key = ? AND NOT private"

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

# What an answer was stopped for, such as a repetition; NULL for nearly all.
_V5 = "ALTER TABLE requests ADD COLUMN stopped TEXT;"

# Which key asked ("": none with a name), the prompt as the client's `usage` has it, and the sums of each day and key,
# which outlive their rows as the ledger's do: caps of keys go by them. A question of the daemon's own is no request.
_V6 = """
ALTER TABLE requests ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE requests ADD COLUMN used_prompt_tokens INTEGER;
CREATE TABLE key_days (
  day TEXT NOT NULL,
  key TEXT NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  picousd INTEGER NOT NULL,
  microj INTEGER NOT NULL,
  PRIMARY KEY (day, key)
) WITHOUT ROWID;
INSERT INTO key_days
  SELECT ledger.day, '', ledger.requests, coalesce(sum(r.prompt_tokens), 0),
    coalesce(sum(r.device_tokens + r.server_tokens), 0), ledger.picousd, ledger.microj
  FROM ledger LEFT JOIN requests r ON r.day = ledger.day GROUP BY ledger.day;
CREATE TRIGGER booked_key AFTER INSERT ON requests BEGIN
  INSERT INTO key_days VALUES (
    coalesce(NEW.day, ''), NEW.key, NEW.policy <> 'probe', coalesce(NEW.used_prompt_tokens, NEW.prompt_tokens),
    NEW.device_tokens + NEW.server_tokens,
    CAST(round(NEW.server_usd * 1e12) AS INTEGER), CAST(round(NEW.energy_j * 1e6) AS INTEGER)
  ) ON CONFLICT (day, key) DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    picousd = picousd + excluded.picousd,
    microj = microj + excluded.microj;
END;
"""

# Which server made an answer, or was asked, by its name in the settings; NULL for the device, and in older rows.
_V7 = """
ALTER TABLE requests ADD COLUMN server TEXT;
ALTER TABLE ttft_samples ADD COLUMN server TEXT;
"""

# The user's rule that decided who may answer ("" for none), and what the reader did in place of reading the answer on:
# redone, regenerated, edited; NULL for nearly all. A stopped answer has the reason to finish `cancelled`.
_V8 = """
ALTER TABLE requests ADD COLUMN rule TEXT NOT NULL DEFAULT '';
ALTER TABLE requests ADD COLUMN followed TEXT;
"""

# What of its kind the request was (tools, code …), where a rule asks what was learned of such ones; "" where none does.
_V9 = "ALTER TABLE requests ADD COLUMN kind TEXT NOT NULL DEFAULT '';"

# Whether it was private, so that its row keeps nothing of what its reader did next; and of which model of this machine
# an answer teaches how likely the next one is to do. NULL: it teaches nothing, since nobody looked at its kind, it was
# private, another model's, or one that editors stop as a habit.
_V10 = """
ALTER TABLE requests ADD COLUMN private INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN teaches_of TEXT;
CREATE INDEX requests_that_teach ON requests (teaches_of, id) WHERE teaches_of IS NOT NULL;
"""

MIGRATIONS: tuple[str, ...] = (_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8, _V9, _V10)

_READING = tuple(field.name for field in fields(Reading))  # columns of the same names
# The columns of `requests` in which a cost without an answer has nothing to say.
_NULL = (*_READING, "ttft_s", "prompt", "answer", "stopped", "used_prompt_tokens", "followed", "teaches_of")
_NO_ANSWER: Row = dict.fromkeys(_NULL) | {
    "rule": "", "kind": "", "private": False,
    "handoffs": 0, "device_tokens": 0, "server_tokens": 0, "delivery": Delivery.RESERVE.value, "moves": "[]",
}  # fmt: skip


def rows_of(item: Outcome | LedgerEntry, keep_text: bool) -> tuple[Row, list[Row]]:
    """Return the row of `requests` for one finished work, and its rows of `ttft_samples` without their `request`."""
    if isinstance(item, Outcome):
        samples = [_sample_row(attempt, item.created, item.prompt_tokens) for attempt in item.attempts]
        return _request_row(item, keep_text), samples
    sample = _sample_row(item.attempt, item.created, item.attempt.usage.prompt_tokens)
    return _entry_row(item), [sample | {"disturbed": True}]  # its time is no TTFT, whatever reads these samples


def _request_row(outcome: Outcome, keep_text: bool) -> Row:
    reading = dict.fromkeys(_READING) if outcome.reading is None else msgspec.to_builtins(outcome.reading)
    return reading | {
        "request_id": text_of(outcome.request_id),
        "created": outcome.created,
        "model": text_of(outcome.model),
        "policy": outcome.policy,
        "plan_device_s": finite(outcome.plan.device_s),
        "plan_server_s": finite(outcome.plan.server_s),
        "prompt_tokens": outcome.prompt_tokens,
        "winner": text_of(outcome.winner),
        "finish_reason": text_of(outcome.finish_reason),
        "error": text_of(outcome.error),
        "ttft_s": outcome.ttft_s,
        "duration_s": outcome.duration_s,
        "handoffs": outcome.handoffs,
        "device_tokens": outcome.tokens.get(Side.DEVICE, 0),
        "server_tokens": outcome.tokens.get(Side.SERVER, 0),
        "cost_usd": outcome.cost_usd,
        "server_usd": outcome.server_usd,
        "energy_j": outcome.energy_j,
        "day": _day(outcome.created),
        "prompt": text_of(outcome.prompt) if keep_text and not outcome.private else None,
        "answer": text_of(outcome.answer) if keep_text and not outcome.private else None,
        "delivery": outcome.delivery.value,
        "moves": json.dumps([asdict(move) for move in outcome.moves], allow_nan=False),
        "stopped": outcome.stopped,
        "key": text_of(outcome.key),
        "used_prompt_tokens": outcome.billed[0],
        "server": _server(outcome.winner, outcome.server),
        "rule": text_of(outcome.rule),
        "kind": "" if outcome.private else outcome.kind or "",
        "private": outcome.private,
        "teaches_of": text_of(outcome.teaches_of),
        "followed": None,  # that is the future
    }


def _entry_row(entry: LedgerEntry) -> Row:
    """Return the row of a cost without an answer, in the form that such rows have had since they are written.

    The plan's columns name the one side that worked: started at once, and the other one not at all.
    """
    attempt = entry.attempt
    return _NO_ANSWER | {
        "request_id": text_of(entry.request_id),
        "created": entry.created,
        "model": text_of(entry.model),
        "policy": entry.kind.value,
        "plan_device_s": 0.0 if attempt.side is Side.DEVICE else None,
        "plan_server_s": 0.0 if attempt.side is Side.SERVER else None,
        "prompt_tokens": attempt.usage.prompt_tokens,
        "winner": text_of(entry.served),
        "finish_reason": text_of(entry.finish_reason),
        "error": text_of(attempt.error),
        "duration_s": entry.duration_s,
        "cost_usd": entry.cost_usd,
        "server_usd": attempt.bill_usd,
        "energy_j": attempt.energy_j,
        "day": _day(entry.created),
        "key": text_of(entry.key),
        "server": _server(attempt.side, attempt.server),
    }


def _sample_row(attempt: Attempt, created: float, prompt_tokens: int) -> Row:
    return {
        "created": created,
        "side": attempt.side.value,
        "model": text_of(attempt.model),
        "started_s": attempt.started_s,
        "ttft_s": attempt.ttft_s,
        "censored": attempt.censored,
        "prompt_tokens": prompt_tokens,
        "processed_tokens": attempt.usage.prompt_tokens,
        "completion_tokens": attempt.usage.completion_tokens,
        "busy_s": attempt.usage.busy_s,
        "error": text_of(attempt.error),
        "load_s": attempt.load_s,
        "n_busy": attempt.n_busy,
        "continued": attempt.continued,
        "disturbed": attempt.disturbed,
        "bill_usd": attempt.bill_usd,
        "energy_j": attempt.energy_j,
        "unseen_tokens": attempt.unseen_tokens,
        "server": _server(attempt.side, attempt.server),
    }


def _server(side: Side | None, name: str | None) -> str | None:
    """Return which server it was; one that stands alone is called as its section of the settings is."""
    return text_of(name or side.value) if side is Side.SERVER else None


def _day(created: float) -> str:
    """Return the local day of a Unix time; "" if no calendar has it."""
    try:
        return datetime.fromtimestamp(created).date().isoformat()  # noqa: DTZ006 - the user's own day is wanted
    except (ValueError, OverflowError, OSError):
        return ""


def text_of(text: str | None) -> str | None:
    """Replace lone surrogates, which JSON can carry and SQLite cannot."""
    return None if text is None else text.encode("utf-8", "replace").decode()
