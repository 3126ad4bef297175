"""History: what was answered is on disk, bounded, private, and never in the daemon's way."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disco_daemon.errors import ConfigError, Unavailable
from disco_daemon.store import History
from disco_daemon.store.history_lock import claimed
from disco_daemon.store.migrations import migrate, open_database
from disco_daemon.store.tables import MIGRATIONS, rows_of
from disco_daemon.types import (
    Attempt,
    Delivery,
    EarlierAnswer,
    HandoffRecord,
    NextAct,
    Outcome,
    Plan,
    Reading,
    Side,
    Usage,
)
from disco_tui.data.store import Store

WAIT_S = 30.0  # far more than any disk needs: only a hang gets there
WON = Attempt(Side.DEVICE, "tiny", 0.0, 0.125, censored=False, usage=Usage(12, 30, 0.75), energy_j=4.5)
LATE = Attempt(Side.SERVER, "gpt", 0.25, 1.5, censored=True, usage=Usage(), error="timeout", bill_usd=0.0015)
OUTCOME = Outcome(
    request_id="r-1",
    created=1_700_000_000.5,
    model="disco",
    policy="paper",
    plan=Plan(0.0, math.inf),
    prompt_tokens=12,
    winner=Side.DEVICE,
    finish_reason="stop",
    error=None,
    ttft_s=0.125,
    duration_s=2.5,
    handoffs=1,
    tokens={Side.DEVICE: 30, Side.SERVER: 7},
    attempts=(WON, LATE),
    cost_usd=0.002,
    energy_j=4.5,
    moves=(HandoffRecord(8, Side.SERVER, Side.DEVICE, "cost", 0.5, overlap=3),),
    reading=Reading(0.98, 7.5, 0.25, 2, 0.2, 0.24),
    delivery=Delivery.PACED,
)
DAY = datetime.fromtimestamp(OUTCOME.created).date().isoformat()  # noqa: DTZ006 - the day here, as a user sees it
MOVE = asdict(OUTCOME.moves[0])  # sides are strings


def outcome(number: int, **changes: Any) -> Outcome:
    return replace(OUTCOME, request_id=f"r-{number}", **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.db"


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def put(history: History, *outcomes: Outcome) -> None:
    for one in outcomes:
        history.record(one)
    history.flush(WAIT_S)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the write lock, as another daemon in a long transaction would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def assert_sound(path: Path) -> None:
    """The file is whole and each request has the two samples it came with."""
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    assert ask(path, "PRAGMA foreign_key_check") == []
    requests = ask(path, "SELECT id FROM requests ORDER BY id")
    assert ask(path, "SELECT request FROM ttft_samples GROUP BY request HAVING count(*) = 2 ORDER BY 1") == requests
    assert ask(path, "SELECT count(*) FROM ttft_samples") == [(2 * len(requests),)]


# What goes in comes out


def test_an_outcome_with_two_attempts_comes_back(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME)
        (row,) = history.recent(10)
        assert row == {
            "id": 1,
            "request_id": "r-1",
            "created": 1_700_000_000.5,
            "model": "disco",
            "policy": "paper",
            "plan_device_s": 0.0,
            "plan_server_s": None,
            "prompt_tokens": 12,
            "winner": "device",
            "finish_reason": "stop",
            "error": None,
            "ttft_s": 0.125,
            "duration_s": 2.5,
            "handoffs": 1,
            "device_tokens": 30,
            "server_tokens": 7,
            "cost_usd": 0.002,
            "server_usd": 0.0015,
            "day": DAY,
            "energy_j": 4.5,
            "prompt": None,
            "answer": None,
            "qoe": 0.98,
            "ttlt_s": 7.5,
            "largest_gap_s": 0.25,
            "stalled": 2,
            "tbt_p50_s": 0.2,
            "tbt_p99_s": 0.24,
            "delivery": "paced",
            "moves": [MOVE],
            "stopped": None,
            "key": "",
            "used_prompt_tokens": 12,
            "server": None,
            "rule": "",
            "kind": "",
            "followed": None,
            "private": 0,
            "teaches_of": None,
        }
        (won,) = history.samples(Side.DEVICE, "tiny", 10)
        assert won == {
            "request_id": "r-1",
            "created": 1_700_000_000.5,
            "side": "device",
            "model": "tiny",
            "started_s": 0.0,
            "ttft_s": 0.125,
            "censored": False,
            "prompt_tokens": 12,
            "processed_tokens": 12,
            "completion_tokens": 30,
            "busy_s": 0.75,
            "error": None,
        }
        (late,) = history.samples(Side.SERVER, "gpt", 10)
        assert (late["censored"], late["ttft_s"], late["started_s"], late["error"]) == (True, 1.5, 0.25, "timeout")
        assert history.dropped == 0


def test_rows_say_which_server_it_was(path: Path) -> None:
    """One that stands alone is called as its section of the settings is; the device is none."""
    device, server = OUTCOME.attempts
    won = replace(server, censored=False, error=None, server="box")
    with History(path) as history:
        put(history, OUTCOME, outcome(2, winner=Side.SERVER, attempts=(device, won)))
        assert [row["server"] for row in history.recent(10)] == ["box", None]
    assert ask(path, "SELECT server FROM ttft_samples ORDER BY id") == [(None,), ("server",), (None,), ("box",)]


def test_an_answer_nobody_could_read_has_no_reading(path: Path) -> None:
    with History(path) as history:
        put(history, outcome(1, reading=None, moves=(), winner=None))
        (row,) = history.recent(1)
    assert [row[k] for k in ("qoe", "ttlt_s", "largest_gap_s", "stalled", "tbt_p50_s", "tbt_p99_s")] == [None] * 6
    assert (row["moves"], row["delivery"]) == ([], "paced")


def test_a_profile_is_kept_under_its_name_and_replaced_by_a_newer_one(path: Path) -> None:
    name = "http://127.0.0.1:1/v1 tiny\ud83d"  # half a pair: a name comes from the configuration
    with History(path) as history:
        assert history.profile(name) is None
        history.save_profile(name, 1.0, {"method": "none"})
        history.save_profile(name, 2.0, {"method": "text", "verdicts": {"text": "exact"}})
        history.save_profile("other", 3.0, {})
        history.save_learned(name, 4.0, {"of": "the estimators"})
        history.flush(WAIT_S)
        assert history.profile(name) == {"method": "text", "verdicts": {"text": "exact"}}
        assert history.profile("other") == {}
        assert history.learned(name) == {"of": "the estimators"}
    assert ask(path, "SELECT name, updated FROM profiles ORDER BY updated") == [
        ("http://127.0.0.1:1/v1 tiny?", 2.0), ("other", 3.0),
    ]  # fmt: skip
    with pytest.raises(ValueError):
        history.save_profile(name, 5.0, {"seconds": math.nan})


def test_what_was_learned_comes_back_to_the_last_bit(path: Path) -> None:
    numbers = [0.1, 1 / 3, 1e-300, 12345.678901234567, float(np.nextafter(1.0, 2.0))]
    with History(path) as history:
        history.save_learned("x", 1.0, {"plain": numbers, "numpy": [np.float64(n) for n in numbers], "n": 3})
        history.flush(WAIT_S)
        assert history.learned("x") == {"plain": numbers, "numpy": numbers, "n": 3}
        with pytest.raises(TypeError):
            history.save_learned("x", 2.0, {"object": object()})


@pytest.mark.parametrize("state", ["{", "[]", "3", ""])
def test_a_profile_that_is_no_object_is_none(path: Path, state: str) -> None:
    with History(path) as history:
        history.save_profile("x", 1.0, {})
        history.flush(WAIT_S)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE profiles SET state = ?", (state,))
        assert history.profile("x") is None


def test_samples_belong_to_one_endpoint_and_come_newest_first(path: Path) -> None:
    with History(path) as history:
        put(history, *(outcome(n) for n in range(5)), outcome(9, attempts=(replace(WON, model="other"),)))
        assert [s["request_id"] for s in history.samples(Side.DEVICE, "tiny", 2)] == ["r-4", "r-3"]
        assert history.samples(Side.SERVER, "tiny", 10) == []


def test_pages_follow_each_other_without_gap_or_overlap(path: Path) -> None:
    with History(path) as history:
        put(history, *(outcome(n) for n in range(7)))
        seen: list[str] = []
        before = None
        while page := history.recent(3, before):
            seen += [row["request_id"] for row in page]
            before = page[-1]["id"]
        assert seen == [f"r-{n}" for n in range(6, -1, -1)]
        assert history.recent(0) == history.recent(-1) == []


def test_totals_add_up(path: Path) -> None:
    with History(path) as history:
        empty = {"requests": 0, "tokens": {"device": 0, "server": 0}, "cost_usd": 0.0, "energy_j": 0.0, "errors": 0}
        assert history.totals() == empty
        failed = outcome(3, winner=None, error="both failed", tokens={}, attempts=(LATE,), ttft_s=None)
        put(history, outcome(1), outcome(2), failed)
        expected = {"requests": 3, "tokens": {"device": 60, "server": 14}, "energy_j": 13.5, "errors": 1}
        assert history.totals() == {**expected, "cost_usd": pytest.approx(0.006)}


def test_reading_needs_no_open_history(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME)
    assert history.recent(1) == History(path).recent(1) != []


def test_reading_what_is_not_there_says_so(path: Path) -> None:
    with pytest.raises(Unavailable, match="history cannot be read"):
        History(path).totals()


# Privacy


@pytest.mark.parametrize("keep_text", [False, True])
def test_text_is_stored_only_when_asked_for(path: Path, keep_text: bool) -> None:
    with History(path, keep_text=keep_text) as history:
        put(history, outcome(1, prompt="my secret", answer="told to none"), outcome(2))
        texts = [(row["prompt"], row["answer"]) for row in history.recent(2)]
        assert texts == [(None, None), ("my secret", "told to none") if keep_text else (None, None)]
    assert (b"my secret" in path.read_bytes()) is keep_text


def test_deleted_text_leaves_no_trace_in_the_file(path: Path) -> None:
    with History(path, max_rows=1, keep_text=True) as history:
        put(history, outcome(1, prompt="my secret " * 2000))
        put(history, outcome(2))
    assert b"my secret" not in path.read_bytes()


def test_folder_and_files_are_for_the_owner_alone(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME)
        modes = {p.name: p.stat().st_mode & 0o777 for p in (path.parent, *path.parent.iterdir())}
    assert modes == {"state": 0o700, "history.db": 0o600, "history.db-wal": 0o600, "history.db-shm": 0o600}


def test_a_file_that_was_open_to_all_is_closed_and_a_foreign_folder_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o755)
    path.touch(0o644)
    with History(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o755


# Bounds


def test_only_the_newest_rows_stay_with_their_samples(path: Path) -> None:
    with History(path, max_rows=10) as history:
        put(history, *(outcome(n) for n in range(25)))
        put(history, *(outcome(n) for n in range(25, 37)))
        assert [row["request_id"] for row in history.recent(100)] == [f"r-{n}" for n in range(36, 26, -1)]
    assert_sound(path)


def test_a_smaller_bound_shrinks_the_file_at_once(path: Path) -> None:
    with History(path, keep_text=True) as history:
        put(history, *(outcome(n, prompt="x" * 20_000) for n in range(300)))
    large = path.stat().st_size
    with History(path, max_rows=5):
        pass
    assert path.stat().st_size < large / 10
    assert len(History(path).recent(100)) == 5


def test_a_full_queue_drops_the_newest_and_counts_it(path: Path) -> None:
    with History(path, queue_limit=4) as history:
        with locked(path):
            for n in range(20):
                history.record(outcome(n))
            # At most one batch of 4 is in the writer's hands, waiting for the lock, and 4 are queued.
            assert 12 <= history.dropped <= 16
        history.flush(WAIT_S)
        kept = [row["request_id"] for row in history.recent(100)]
        assert kept[-4:] == ["r-3", "r-2", "r-1", "r-0"]
        assert len(kept) + history.dropped == 20


def test_a_bound_below_one_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="max_rows"):
        History(path, max_rows=0)
    with pytest.raises(ValueError, match="queue_limit"):
        History(path, queue_limit=0)


# Life and death


def test_close_writes_what_is_queued_and_may_be_called_twice(path: Path) -> None:
    history = History(path)
    history.open()
    history.open()
    for n in range(500):
        history.record(outcome(n))
    history.close()
    history.close()
    assert history.totals()["requests"] == 500
    assert "closed, queued 0, dropped 0" in repr(history)
    history.record(outcome(501))
    assert history.dropped == 1


def test_a_page_of_the_history_has_every_answer_that_ended_before_it_was_asked_for(path: Path) -> None:
    with History(path) as history:
        for n in range(20):
            history.record(outcome(n))
            assert len(history.recent(100)) == n + 1
            assert sum(day["requests"] for day in history.days(7)) == n + 1


def test_whatever_is_read_has_what_was_queued_before(path: Path) -> None:
    """A reload reads what was learned a moment before; a prediction, the request that has just ended."""
    with History(path) as history:
        for n in range(20):
            history.record(outcome(n))
            assert history.totals()["requests"] == n + 1
            assert len(history.outcomes()) == n + 1
            history.save_learned("here", float(n), {"n": n})
            assert history.learned("here") == {"n": n}
            history.save_profile("there", float(n), {"n": n})
            assert history.profile("there") == {"n": n}


def test_a_page_of_the_history_comes_though_the_disk_is_stuck(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{History.__module__}.READ_PATIENCE_S", 0.01)
    with History(path) as history:
        put(history, outcome(1))
        with locked(path):
            history.record(outcome(2))
            assert len(history.recent(100)) == 1


def test_flush_gives_up_in_time_and_close_before_open_is_nothing(path: Path) -> None:
    History(path).close()
    with History(path) as history, locked(path):
        history.record(OUTCOME)
        with pytest.raises(TimeoutError, match="not written within"):
            history.flush(0.01)


def test_rows_survive_a_second_opening(path: Path) -> None:
    for n in range(3):
        with History(path) as history:
            put(history, outcome(n))
    assert [row["id"] for row in History(path).recent(10)] == [3, 2, 1]
    assert_sound(path)


ROOT = Path(__file__).parents[3]
PRELUDE = """
import sys
from pathlib import Path
from tests.unit.store.test_store import History, outcome, put
path = Path(sys.argv[1])
"""
RECORD = """
history = History(path, max_rows=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
history.open()
for n in range(int(sys.argv[2])):
    history.record(outcome(n))
    if n % 10 == 9:
        history.flush(30)
    print(n, flush=True)
history.close()
print("dropped", history.dropped, flush=True)
"""


@contextmanager
def daemon(path: Path, rows: int, max_rows: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that records `rows` outcomes, flushes each tenth and prints a line for each; `go()` starts it."""
    command = [sys.executable, "-c", PRELUDE + RECORD, str(path), str(rows), str(max_rows)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


@pytest.mark.parametrize("printed", [1, 37, 250])
def test_kill_minus_nine_in_the_middle_of_writing_loses_no_written_row(path: Path, printed: int) -> None:
    with daemon(path, 1_000_000, 200) as process:
        go(process)
        for number, _ in enumerate(lines(process), 1):
            if number == printed:
                process.kill()
                break
        process.wait(WAIT_S)
    with History(path) as history:
        put(history, outcome(-1))
        # Each tenth line is printed after a flush.
        assert history.totals()["requests"] >= min(200, printed // 10 * 10 + 1)
    assert_sound(path)


def test_two_daemons_write_at_once_and_all_rows_arrive(path: Path) -> None:
    """They even create the file at the same moment."""
    with daemon(path, 300, 20_000) as one, daemon(path, 300, 20_000) as other:
        go(one)
        go(other)
        assert list(lines(one))[-1] == "dropped 0\n"
        assert list(lines(other))[-1] == "dropped 0\n"
    assert History(path).totals()["requests"] == 600
    assert_sound(path)


# Migrations


def test_every_column_gets_a_value_of_each_outcome(path: Path) -> None:
    """A column that is added to the schema and forgotten in the rows would hold its default for ever."""
    with closing(open_database(path, 1.0)) as connection:
        columns = {
            table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for table in ("requests", "ttft_samples")
        }
    request, samples = rows_of(OUTCOME, keep_text=True)
    assert {"id", *request} == columns["requests"]
    assert [{"id", "request", *sample} for sample in samples] == [columns["ttft_samples"]] * 2


def test_all_of_a_migration_happens_or_nothing(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            migrate(connection, [*MIGRATIONS, "ALTER TABLE requests ADD COLUMN mood TEXT;\nNONSENSE;\n"])
        assert not connection.in_transaction
    assert ask(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]
    assert "mood" not in History(path).recent(1)[0]


def stored_by(path: Path, version: int) -> None:
    """A file as that version of the schema left it, with a row in each table."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, MIGRATIONS[:version])
        connection.execute(
            "INSERT INTO requests (request_id, created, model, policy, prompt_tokens, duration_s, handoffs,"
            " device_tokens, server_tokens, cost_usd, energy_j) VALUES ('old', 1, 'm', 'p', 3, 1, 0, 2, 0, 0, 0)"
        )
        connection.execute(
            "INSERT INTO ttft_samples (request, created, side, model, started_s, ttft_s, censored, prompt_tokens,"
            " processed_tokens, completion_tokens, busy_s) VALUES (1, 1, 'device', 'tiny', 0, 0.5, 1, 3, 3, 0, 0)"
        )
        if version >= 2:
            connection.execute("INSERT INTO estimators VALUES ('both', 1, '{\"k\": 2}')")


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_migration_keeps_the_rows_of_each_older_schema(path: Path, version: int) -> None:
    stored_by(path, version)
    with History(path) as history:
        put(history, outcome(2))
        new, old = history.recent(9)
        assert (new["request_id"], new["qoe"], new["moves"]) == ("r-2", 0.98, [MOVE])
        assert (old["request_id"], old["qoe"], old["delivery"], old["moves"]) == ("old", None, None, [])
        assert [s["censored"] for s in history.samples(Side.DEVICE, "tiny", 9)] == [False, True]
        assert history.learned("both") == ({"k": 2} if version >= 2 else None)
        history.save_profile("x", 1.0, {"method": "none"})
        history.flush(WAIT_S)
        assert history.profile("x") == {"method": "none"}
    assert ask(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]


def test_a_step_that_a_later_version_adds_keeps_todays_rows(path: Path) -> None:
    stored_by(path, len(MIGRATIONS))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, [*MIGRATIONS, "ALTER TABLE requests ADD COLUMN mood TEXT NOT NULL DEFAULT 'calm';"])
        assert connection.execute("SELECT request_id, mood FROM requests").fetchall() == [("old", "calm")]


def test_a_file_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME)
    ask(path, f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match=r"history\.db was written by a newer version.*update disco"):
        History(path).open()
    assert [p.name for p in path.parent.iterdir()] == ["history.db"]
    assert History(path).totals()["requests"] == 1


def test_the_file_runs_in_wal_mode_and_can_shrink(path: Path) -> None:
    with closing(open_database(path, 1.0)) as connection:
        pragmas = {
            p: connection.execute(f"PRAGMA {p}").fetchone()[0] for p in ("journal_mode", "auto_vacuum", "synchronous")
        }
    assert pragmas == {"journal_mode": "wal", "auto_vacuum": 2, "synchronous": 1}


# Trouble with the disk


def asides(path: Path) -> list[Path]:
    return [p for p in path.parent.iterdir() if ".corrupt-" in p.name]


def damaged(path: Path) -> bytes:
    """A history of ours whose pages are gone, but for the first one's beginning."""
    with History(path) as history:
        put(history, OUTCOME)
    spoil(path, 100, path.stat().st_size - 100)
    return path.read_bytes()


def test_a_damaged_history_is_moved_aside_and_a_new_one_starts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    junk = damaged(path)
    with History(path) as history:
        put(history, OUTCOME)
        assert history.totals()["requests"] == 1
        assert history.error == ""
    (aside,) = asides(path)
    assert aside.name.removeprefix("history.db.corrupt-").isdigit()
    assert aside.read_bytes() == junk
    assert [r.name for r in caplog.records if "moved to" in r.getMessage()] == ["disco.store"]


def test_a_second_damaged_history_does_not_overwrite_the_first(path: Path) -> None:
    first, second = damaged(path), damaged(path)
    with History(path):
        pass
    assert sorted(p.read_bytes() for p in asides(path)) == sorted([first, second])


def test_a_history_of_an_older_version_is_known_by_its_schema_when_it_is_damaged(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection)
        assert connection.execute("PRAGMA application_id").fetchone() == (0,)
    spoil(path, 100, 8)  # the root of the schema
    with History(path) as history:
        put(history, OUTCOME)
    assert len(asides(path)) == 1


# --- files that are not ours


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.execute("INSERT INTO bookmarks VALUES ('https://example.com')")
        connection.commit()


def in_its_log(path: Path) -> None:
    """All that another program has written is in the log still, as after a crash."""
    script = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA journal_mode = WAL'); c.execute('CREATE TABLE bookmarks (url TEXT)'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a text": lambda path: path.write_text("alias ll='ls -l'\n" * 300),
    "a short text": lambda path: path.write_text("ssh-ed25519 AAAA me\n"),
    "a database": other_database,
    "a database in its log": in_its_log,
    "the terminal UI's conversations": lambda path: Store(path).close(),
    "a header and no more": lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/full"),
    "a file in the place of the log": lambda path: path.with_name(f"{path.name}-wal").write_text("mine"),
    "a file in the place of the journal": lambda path: path.with_name(f"{path.name}-journal").write_text("mine"),
}


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files of a folder: their modes, and what is in them."""
    return {
        p.name: (p.lstat().st_mode, p.read_bytes() if p.is_file() and not p.is_symlink() else b"")
        for p in sorted(folder.iterdir())
    }


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_not_ours_is_left_alone_and_there_is_no_history(
    what: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    FOREIGN[what](path)
    before = everything(path.parent)
    with History(path) as history, claimed(path):
        put(history, OUTCOME, OUTCOME)
        assert "left alone" in history.error
        assert str(path) not in history.error, "who may not know paths may know this"
        with pytest.raises(Unavailable, match="left alone"):
            history.recent(5)
        assert history.dropped == 2
    assert everything(path.parent) == before
    assert len([r for r in caplog.records if "unrecorded" in r.getMessage()]) == 1, "it is said once"
    assert str(path) in caplog.text


def test_an_empty_file_of_one_s_own_becomes_a_history(path: Path) -> None:
    """A daemon that ended before its first page was written leaves one; nothing in it can be lost."""
    path.parent.mkdir()
    path.touch()
    with History(path) as history:
        put(history, OUTCOME)
        assert history.totals()["requests"] == 1


def test_a_history_begins_once_the_file_in_its_place_is_gone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("mine")
    with History(path) as history:
        put(history, OUTCOME)
        path.rename(path.with_name("mine"))
        put(history, OUTCOME)
        assert (history.error, history.totals()["requests"]) == ("", 1)


@pytest.mark.parametrize("content", ["[[package]]\nname = 'numpy'\n", "12345 and more", "1" * 40])
def test_a_lock_file_that_is_somebody_else_s_is_left_alone(
    content: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    lock = path.with_name(f"{path.name}.lock")
    lock.write_text(content)
    with claimed(path):
        pass
    assert lock.read_text() == content
    assert "left alone" in caplog.text


def test_a_lock_is_taken_again_and_says_who_has_it(path: Path) -> None:
    for _ in range(2):
        with claimed(path), pytest.raises(ConfigError, match=str(os.getpid())), claimed(path):
            pass


@pytest.mark.parametrize("folder", ["/proc/nope", "/sys/nope"])
def test_where_nothing_can_be_written_there_is_no_history_and_it_is_said(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(folder) / "history.sqlite"
    with claimed(path), History(path) as history:
        put(history, OUTCOME)
        assert history.error
        assert history.dropped == 1
        with pytest.raises(Unavailable):
            history.recent(1)
    assert "nothing keeps a second daemon from it" in caplog.text


def spoil(path: Path, start: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * size)


def test_damage_that_a_write_meets_costs_that_write_and_the_next_one_starts_anew(path: Path) -> None:
    with History(path) as history:
        put(history, *(outcome(n) for n in range(2000)))
    spoil(path, 8192, path.stat().st_size - 8192)  # the header stays good, so that opening notices nothing
    with History(path) as history:
        put(history, outcome(1))
        put(history, outcome(2))
        put(history, outcome(3))
        assert [row["request_id"] for row in history.recent(9)][:2] == ["r-3", "r-2"]
        assert history.dropped <= 1
    assert len(asides(path)) == 1
    assert_sound(path)


def test_damage_that_a_reader_meets_is_reported_and_mended_by_the_next_write(path: Path) -> None:
    with History(path) as history:
        put(history, *(outcome(n) for n in range(2000)))
    page = path.read_bytes().index(b"r-100") // 4096  # an old row's page, which no write touches
    spoil(path, page * 4096, 4096)
    with History(path) as history:
        put(history, outcome(2000))
        with pytest.raises(Unavailable, match="malformed"):
            history.recent(5000)
        put(history, outcome(2001))
        assert [row["request_id"] for row in history.recent(5000)] == ["r-2001"]
        assert history.dropped == 0
    (aside,) = asides(path)
    assert ask(aside, "SELECT request_id FROM requests ORDER BY id DESC LIMIT 1") == [("r-2000",)]


def test_a_locked_file_costs_rows_but_neither_the_thread_nor_more_than_one_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "disco.store")
    with History(path, busy_timeout_s=0.05) as history:
        put(history, outcome(0))
        with locked(path):
            put(history, outcome(1))
            put(history, outcome(2))
            assert history.dropped == 2
        put(history, outcome(3))
        assert [row["request_id"] for row in history.recent(9)] == ["r-3", "r-0"]
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.RLIM_INFINITY
with History(path, keep_text=True) as history:
    put(history, outcome(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, unlimited))
    for n in range(1, 4):
        put(history, outcome(n, prompt="x" * 1_000_000))
    print(history.dropped)
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    put(history, outcome(4))
    print([row["request_id"] for row in history.recent(9)])
"""


def test_a_full_disk_costs_rows_until_there_is_room_again(path: Path) -> None:
    """A file size limit of the process stands for the full disk: SQLite's writes fail the same way."""
    command = [sys.executable, "-c", PRELUDE + FULL, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "3\n['r-4', 'r-0']\n"
    assert done.stderr.count("cannot be written") == 1
    assert_sound(path)


def test_a_folder_that_cannot_be_made_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """And once it can be made, rows are kept."""
    (tmp_path / "state").write_text("a file where the folder should be")
    with History(tmp_path / "state" / "history.db") as history:
        put(history, outcome(0))
        assert history.dropped == 1
        (tmp_path / "state").unlink()
        put(history, outcome(1))
        assert history.totals()["requests"] == 1


def test_one_odd_outcome_is_lost_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with History(path) as history:
        odd = [outcome(1, prompt_tokens=1 << 80), outcome(2, attempts=(WON, replace(LATE, ttft_s=math.nan)))]
        put(history, outcome(0), *odd, outcome(3, error="half a pair: \ud83d"))
        assert [row["error"] for row in history.recent(9)] == ["half a pair: ?", None]
        assert history.dropped == 2
    assert_sound(path)
    assert len(caplog.records) == 2


def test_a_queue_holds_no_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bounded in outcomes; an answer of thousands of tokens must not take more of it than a short one."""
    history = History(tmp_path / "history.sqlite")
    queued: list[object] = []
    monkeypatch.setattr(history._writer, "put", queued.append)
    history.record(replace(OUTCOME, arrivals_s=(1.0, 2.0)))
    assert queued == [OUTCOME]


# What the reader did next


@pytest.mark.parametrize("act", NextAct)
def test_what_the_reader_did_next_goes_with_the_answer_that_would_not_do(path: Path, act: NextAct) -> None:
    with History(path) as history:
        put(history, replace(OUTCOME, rule="code"))
        put(history, replace(OUTCOME, request_id="r-2", earlier=EarlierAnswer("r-1", act)))
        later, earlier = history.recent(10)
    assert (earlier["request_id"], earlier["rule"], earlier["followed"]) == ("r-1", "code", act.value)
    assert later["followed"] is None


def test_an_answer_that_another_one_was_preferred_to_is_noted_if_it_is_the_owners(path: Path) -> None:
    with History(path) as history:
        put(history, OUTCOME, outcome(2, key="ann"), outcome(3, private=True))
        ids = [row["request_id"] for row in history.recent(3)]
        for one in (*ids, "of-nobody"):
            history.follow(EarlierAnswer(one, NextAct.OUTDONE))
        found = {row["request_id"]: row["followed"] for row in history.recent(3)}
    assert found == {one: "outdone" if one == OUTCOME.request_id else None for one in ids}


def test_the_row_of_a_private_answer_keeps_nothing_of_its_text_its_kind_or_its_reader(path: Path) -> None:
    own: dict[str, Any] = {"prompt": "a", "answer": "b", "kind": "code", "tokens": {Side.DEVICE: 30}}
    redone: dict[str, Any] = {"earlier": EarlierAnswer("r-1", NextAct.REDONE)}
    with History(path, keep_text=True) as history:
        put(history, replace(OUTCOME, **own), replace(OUTCOME, request_id="r-2", **own, **redone, private=True))
        put(history, outcome(3, earlier=EarlierAnswer("r-2", NextAct.EDITED)))
        _, hidden, open_ = history.recent(3)
    kept = ("prompt", "answer", "kind", "followed", "teaches_of", "private")
    assert [open_[name] for name in kept] == ["a", "b", "code", None, "tiny", 0], "the private one says nothing of it"
    assert [hidden[name] for name in kept] == [None, None, "", None, None, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": None}, {"private": True}, {"winner": Side.SERVER}, {"winner": None}, {"error": "stalled"},
        {"tokens": {Side.DEVICE: 30, Side.SERVER: 1}}, {"attempts": (replace(WON, model="other"), LATE)},
    ],
)  # fmt: skip
def test_only_the_present_models_own_answers_whose_kind_was_looked_at_teach(
    path: Path, changes: dict[str, Any]
) -> None:
    teaches = replace(OUTCOME, kind="code", tokens={Side.DEVICE: 30})
    with History(path) as history:
        put(history, teaches, replace(teaches, request_id="r-2", **changes))
        assert [row["kind"] for row in history.taught("tiny", 10)] == ["code"]


def test_what_answers_teach_is_read_without_a_text_and_without_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with History(path, keep_text=True) as history:
        put(history, replace(OUTCOME, kind="", tokens={Side.DEVICE: 30}, prompt="secret", answer="secret"))
        monkeypatch.setattr(history, "flush", lambda _: pytest.fail("it waits for the writer"))
        monkeypatch.setattr(history._writer, "flush", lambda _: pytest.fail("it waits for the writer"))
        (row,) = history.taught("tiny", 10)
        monkeypatch.undo()
    assert set(row.keys()) == {"prompt_tokens", "kind", "followed", "stopped", "finish_reason", "ttft_s", "duration_s"}


def test_an_answer_that_is_no_longer_kept_is_not_missed(path: Path) -> None:
    with History(path) as history:
        put(history, replace(OUTCOME, earlier=EarlierAnswer("gone", NextAct.REDONE)))
        assert [row["followed"] for row in history.recent(10)] == [None]
