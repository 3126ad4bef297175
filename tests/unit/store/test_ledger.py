"""The ledger: what was spent is summed up with each row, exactly, and stays when the row goes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_daemon.store import History
from disco_daemon.types import Attempt, Outcome, Plan, Side, Usage

WAIT_S = 30.0
NOON = datetime.combine(date(2026, 3, 10), datetime.min.time()).timestamp() + 12 * 3600  # local noon
DAY_S = 86_400.0


def outcome(number: int, usd: float, joules: float, *, created: float = NOON) -> Outcome:
    server = Attempt(Side.SERVER, "m", 0.0, 0.1, censored=False, usage=Usage(1, 1), bill_usd=usd)
    device = Attempt(Side.DEVICE, "d", 0.0, 0.1, censored=True, usage=Usage(1, 0), energy_j=joules)
    return Outcome(
        f"r-{number}", created, "disco", "race", Plan(0.0, 0.0), 1, Side.SERVER, "stop", None, 0.1, 0.2, 0,
        {Side.SERVER: 1}, (server, device), usd, joules,
    )  # fmt: skip


def put(history: History, *outcomes: Outcome) -> None:
    for one in outcomes:
        history.record(one)
    history.flush(WAIT_S)


def balance(path: Path) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Rows kept and the ledger less what is gone: requests, millionths of a micro-$, micro-J."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT count(*), coalesce(sum(CAST(round(server_usd * 1e12) AS INTEGER)), 0),"
            " coalesce(sum(CAST(round(energy_j * 1e6) AS INTEGER)), 0) FROM requests"
        ).fetchone()
        sums = connection.execute(
            "SELECT coalesce(sum(requests - gone_requests), 0), coalesce(sum(picousd - gone_picousd), 0),"
            " coalesce(sum(microj - gone_microj), 0) FROM ledger"
        ).fetchone()
    return rows, sums


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 1e5), st.integers(-40, 40)), min_size=1, max_size=30
    ),
    st.integers(1, 12),
)  # fmt: skip
def test_rows_and_sums_agree_to_the_last_digit_whatever_was_trimmed(
    tmp_path_factory: pytest.TempPathFactory, spent: list[tuple[float, float, int]], max_rows: int
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "history.db"
    with History(path, max_rows=max_rows) as history:
        for n, (usd, joules, day) in enumerate(spent):
            put(history, outcome(n, usd, joules, created=NOON + day * DAY_S))
        rows, sums = balance(path)
        assert rows == sums
        whole = history.spent(date(2025, 1, 1), date(2027, 1, 1))
    assert whole.requests == len(spent), "also of those that are not kept any more"
    assert whole.server_usd == pytest.approx(sum(usd for usd, *_ in spent), abs=1e-9)
    assert whole.energy_j == pytest.approx(sum(j for _, j, _ in spent), abs=1e-3)


def test_a_day_has_its_own_sum(tmp_path: Path) -> None:
    with History(tmp_path / "h.db", max_rows=1) as history:
        put(history, outcome(1, 0.5, 10), outcome(2, 0.25, 5), outcome(3, 8, 1, created=NOON - DAY_S))
        today = date(2026, 3, 10)
        assert (history.spent(today, today).server_usd, history.spent(today, today).energy_j) == (0.75, 15.0)
        assert history.spent(today - timedelta(days=1), today).server_usd == 8.75
        assert history.spent(today + timedelta(days=1), today + timedelta(days=9)).requests == 0
        assert [(d["day"], d["requests"], d["server_usd"]) for d in history.days(9)] == [
            ("2026-03-10", 2, 0.75), ("2026-03-09", 1, 8.0),
        ]  # fmt: skip
        assert len(history.days(1)) == 1


def test_each_start_is_booked_with_its_bill_and_its_energy(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    lost = replace(outcome(1, 0.5, 10).attempts[0], unseen_tokens=40)
    with History(path) as history:
        put(history, replace(outcome(1, 0.5, 10), attempts=(lost, outcome(1, 0.5, 10).attempts[1])))
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT side, bill_usd, energy_j, unseen_tokens FROM ttft_samples").fetchall()
    assert rows == [("server", 0.5, 0.0, 40), ("device", 0.0, 10.0, 0)]


def test_a_moment_that_no_calendar_has_is_booked_too(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with History(path) as history:
        put(history, outcome(1, 1.0, 2.0, created=1e18))
        assert history.dropped == 0
    rows, sums = balance(path)
    assert rows == sums == (1, 10**12, 2_000_000)


def test_an_older_version_that_still_runs_can_book(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with History(path) as history:
        put(history, outcome(1, 1.0, 2.0, created=datetime(2026, 3, 10, tzinfo=UTC).timestamp()))
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [
            row[1]
            for row in connection.execute("PRAGMA table_info(requests)")
            if row[1] not in ("id", "day", "server_usd")
        ]
        listed = ", ".join(names)
        connection.execute(f"INSERT INTO requests ({listed}) SELECT {listed} FROM requests")
    rows, sums = balance(path)
    assert rows == sums
    assert rows[0] == 2
