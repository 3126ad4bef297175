"""What was used, by key, model, server and day: sums that outlive their rows, also those of before there were keys."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

from disco_daemon.store import History
from disco_daemon.store.migrations import migrate
from disco_daemon.store.tables import MIGRATIONS
from disco_daemon.types import Attempt, EntryKind, LedgerEntry, Outcome, Plan, Side, Usage

WAIT_S = 30.0
TODAY = date(2026, 3, 10)
NOON = datetime.combine(TODAY, datetime.min.time()).timestamp() + 12 * 3600  # local noon
DAY_S = 86_400.0
BEFORE_KEYS = 5  # migrations


def outcome(key: str, usd: float = 0.25, *, created: float = NOON) -> Outcome:
    """An answer of a server, whose own count of the prompt is 12; the device lost."""
    server = Attempt(Side.SERVER, "big", 0.0, 0.1, censored=False, usage=Usage(12, 7), bill_usd=usd)
    device = Attempt(Side.DEVICE, "small", 0.0, 0.1, censored=True, usage=Usage(9, 2), energy_j=3600.0)
    return Outcome(
        "r", created, "disco", "race", Plan(0.0, 0.0), 10, Side.SERVER, "stop", None, 0.1, 0.2, 0,
        {Side.SERVER: 7}, (server, device), usd, 3600.0, key=key,
    )  # fmt: skip


def entry(kind: EntryKind, key: str = "") -> LedgerEntry:
    attempt = Attempt(Side.DEVICE, "small", 0.0, 0.1, censored=True, usage=Usage(5), energy_j=1800.0)
    return LedgerEntry(kind, "e", NOON, "disco", attempt, 0.0, 0.1, key=key)


def used(key: str, requests: int, prompt: int, completion: int, usd: float, wh: float) -> dict[str, object]:
    names = ("key", "requests", "prompt_tokens", "completion_tokens", "usd", "wh")
    return dict(zip(names, (key, requests, prompt, completion, usd, wh), strict=True))


def test_each_key_has_its_sums_with_the_tokens_that_its_client_was_told(tmp_path: Path) -> None:
    with History(tmp_path / "h.db", max_rows=1) as history:
        for one in (outcome("anna"), outcome("anna", 0.5), outcome(""), outcome("anna", created=NOON - DAY_S)):
            history.record(one)
        history.book(entry(EntryKind.EMBEDDING, "bert"))
        history.book(entry(EntryKind.PROBE))
        history.flush(WAIT_S)
        assert len(history.recent(9)) == 1, "the sums are of all, also of rows that are gone"
        assert history.usage("key", TODAY) == [
            used("anna", 2, 24, 14, 0.75, 2.0), used("", 1, 17, 7, 0.25, 1.5), used("bert", 1, 5, 0, 0.0, 0.5),
        ]  # fmt: skip
        assert [(row["day"], row["requests"]) for row in history.usage("day", date(2026, 3, 9))] == [
            ("2026-03-10", 4), ("2026-03-09", 1),
        ]  # fmt: skip
        assert [(d["day"], d["server_usd"]) for d in history.days(9, "anna")] == [
            ("2026-03-10", 0.75), ("2026-03-09", 0.25),
        ]  # fmt: skip
        assert history.days(9, "nobody") == []


def test_models_and_servers_have_what_they_processed_themselves(tmp_path: Path) -> None:
    with History(tmp_path / "h.db") as history:
        history.record(outcome("anna"))
        history.record(replace(outcome(""), attempts=outcome("").attempts[1:]))
        history.flush(WAIT_S)
        assert [(r["model"], r["requests"], r["prompt_tokens"], r["completion_tokens"], r["usd"], r["wh"])
                for r in history.usage("model", TODAY)] == [
            ("big", 1, 12, 7, 0.25, 0.0), ("small", 2, 18, 4, 0.0, 2.0),
        ]  # fmt: skip
        named = tuple(replace(attempt, server="mine") for attempt in outcome("").attempts[:1])
        history.record(replace(outcome(""), attempts=named))
        history.flush(WAIT_S)
        assert [(r["server"], r["usd"], r["requests"]) for r in history.usage("server", TODAY)] == [
            ("mine", 0.25, 1), ("server", 0.25, 1), ("", 0.0, 2),
        ]  # fmt: skip


def test_what_was_spent_before_there_were_keys_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, MIGRATIONS[:BEFORE_KEYS])
        connection.execute(
            "INSERT INTO requests (request_id, created, model, policy, prompt_tokens, duration_s, handoffs,"
            " device_tokens, server_tokens, cost_usd, energy_j, server_usd, day)"
            " VALUES ('r', ?, 'disco', 'race', 10, 1, 0, 3, 4, 0.5, 3600, 0.5, '2026-03-10')",
            (NOON,),
        )
    with History(path) as history:
        assert history.usage("key", TODAY) == [used("", 1, 10, 7, 0.5, 1.0)]
