"""What the configured server charges, and what was spent before this start."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.config.pricelist import load
from disco_daemon.config.schema import CapSettings, Config, ServerSettings
from disco_daemon.daemon.money import limits_of, make_spending, price_of, restore
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.money.spending import Spending
from disco_daemon.store import History
from disco_daemon.store.kept_sums import HALF, KeptSums
from disco_daemon.store.tables import rows_of
from disco_daemon.types import Side
from tests.unit.store.test_ledger import outcome, put

OPENAI = "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("url", "model", "given", "price", "known"),
    [
        (OPENAI, "gpt-4o-mini", (None, None), (0.15, 0.075, 0.6), True),
        (OPENAI, "gpt-4o-mini", (7.0, 8.0), (7.0, 7.0, 8.0), True),
        (OPENAI, "gpt-4o-mini", (None, 8.0), (0.15, 0.075, 8.0), True),
        ("http://127.0.0.1:8000/v1", "any", (None, None), (0.0, 0.0, 0.0), True),
        ("http://127.0.0.1:8000/v1", "any", (1.0, None), (1.0, 1.0, 0.0), True),
        ("https://llm.example.com/v1", "any", (1.0, 2.0), (1.0, 1.0, 2.0), True),
        ("https://llm.example.com/v1", "any", (1.0, None), (1.0, 1.0, None), False),
        ("", "", (None, None), (0.0, 0.0, 0.0), True),
    ],
)
def test_a_price_that_is_set_goes_before_the_lists_and_the_rest_comes_from_them(
    url: str, model: str, given: tuple[float | None, float | None], price: tuple[float | None, ...], known: bool
) -> None:
    server = ServerSettings(url, model, input_usd_per_mtok=given[0], output_usd_per_mtok=given[1])
    found = price_of(Config(server=server), catalog := load())
    wanted = [catalog.dearest.output if p is None else p for p in price]
    assert [found.input, found.cached_input, found.output] == wanted
    assert found.known is known


def test_what_the_ledger_has_of_today_counts_against_the_caps(tmp_path: Path) -> None:
    clock = SystemClock()
    spending = make_spending(Config(caps=CapSettings(usd_per_day=1.0)), tmp_path / "servers", clock)
    with History(tmp_path / "h.db") as history:
        put(history, outcome(1, 0.25, 7200.0, created=clock.wall()))
        restore(spending, history, clock)
    spent = spending.caps.spent(clock.wall())
    assert (spent.usd_today, spent.usd_this_month, spent.wh_today) == (0.25, 0.25, 2.0)


def spent_after(start: Path, *, wreck: Callable[[Path], None], again: bool = False) -> Spending:
    """Spend $0.75 of a cap of $1 in one life of a daemon; return the spending of the next one, after a wreck."""
    clock, config = SystemClock(), Config(caps=CapSettings(usd_per_day=1.0))
    path = start / "h.db"
    with History(path) as history:
        first = make_spending(config, start / "servers", clock)
        restore(first, history, clock)
        put(history, outcome(1, 0.75, 0.0, created=clock.wall()))
        first.caps.book(Side.SERVER, 0.75, clock.wall())
    wreck(path)
    for _ in range(2 if again else 1):
        found = make_spending(config, start / "servers", clock)
        with History(path) as history:
            restore(found, history, clock)
    return found


def sums_of(path: Path) -> Path:
    return path.with_name("h.db.sums")


def nothing(_: Path) -> None:
    """Leave all as it is."""


def damaged_history(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:3000] = b"x" * 2900
    path.write_bytes(data)


def other_history(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def no_history(path: Path) -> None:
    path.unlink()


def no_sums(path: Path) -> None:
    sums_of(path).unlink()


def damaged_sums(path: Path) -> None:
    sums_of(path).write_bytes(b"disco sums 7 8 9" * 3000)


def torn_sums(path: Path) -> None:
    """Of the latest write only a part has come to the disk: the one before is whole."""
    data = bytearray(sums_of(path).read_bytes())
    kept = KeptSums(path)
    kept.load()
    at = HALF * (int(data[:HALF].split(b" ", 3)[2]) < int(data[HALF:].split(b" ", 3)[2]))
    data[at + 100 : at + HALF] = bytes(HALF - 100)
    sums_of(path).write_bytes(data)


def other_sums(path: Path) -> None:
    sums_of(path).write_text("my own notes")


def folder_for_history(path: Path) -> None:
    path.unlink()
    path.mkdir()


def both(*wrecks: Callable[[Path], None]) -> Callable[[Path], None]:
    def wreck(path: Path) -> None:
        for one in wrecks:
            one(path)

    return wreck


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "wreck", [nothing, damaged_history, other_history, no_history, no_sums, damaged_sums, torn_sums, other_sums,
              folder_for_history],
)  # fmt: skip
def test_what_one_of_the_two_knows_is_counted_whatever_becomes_of_the_other(
    wreck: Callable[[Path], None], tmp_path: Path, *, again: bool
) -> None:
    found = spent_after(tmp_path, wreck=wreck, again=again)
    assert found.caps.spent(SystemClock().wall()).usd_today == 0.75
    assert found.caps.check(Side.SERVER, 0.1, SystemClock().wall()) is None


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "wreck",
    [
        both(damaged_history, no_sums), both(damaged_history, damaged_sums), both(no_history, damaged_sums),
        both(no_history, other_sums), both(other_history, no_sums), both(folder_for_history, no_sums),
    ],
)  # fmt: skip
def test_where_neither_knows_a_cap_is_closed_with_the_reason_and_at_the_next_start_too(
    wreck: Callable[[Path], None], tmp_path: Path, *, again: bool
) -> None:
    found = spent_after(tmp_path, wreck=wreck, again=again)
    no = found.caps.check(Side.SERVER, 0.1, SystemClock().wall())
    assert no is not None
    assert "is closed: what was spent before is not known" in no.reason
    assert "disco config set caps" in no.reason
    found.set_limits(limits_of(Config()))
    assert found.caps.check(Side.SERVER, 0.1, SystemClock().wall()) is None


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    spent_after(tmp_path, wreck=other_sums)
    assert (tmp_path / "h.db.sums").read_text() == "my own notes"


def test_a_first_start_has_nothing_spent(tmp_path: Path) -> None:
    spending = make_spending(Config(caps=CapSettings(usd_per_day=1.0)), tmp_path / "servers", SystemClock())
    restore(spending, History(tmp_path / "none.db"), SystemClock())
    assert spending.caps.check(Side.SERVER, 0.1, SystemClock().wall()) is None
    assert (tmp_path / "none.db.sums").stat().st_mode & 0o777 == 0o600


def test_where_nothing_can_be_kept_a_cap_is_closed(tmp_path: Path) -> None:
    """As on a disk that is full from the first start on: each start would give all of the cap once more."""
    (tmp_path / "file").write_text("")
    spending = make_spending(Config(caps=CapSettings(usd_per_day=1.0)), tmp_path / "servers", SystemClock())
    with History(tmp_path / "file" / "h.db") as history:
        restore(spending, history, SystemClock())
    assert spending.caps.check(Side.SERVER, 0.1, SystemClock().wall()) is not None


@pytest.mark.parametrize(
    "zone",
    ["CET-1CEST,M3.5.0,M10.5.0/3", ":Europe/Berlin", "/usr/share/zoneinfo/Europe/Berlin", "Europe/Berlin", "UTC",
     "EST5EDT,M3.2.0,M11.1.0", "<-03>3", "NZST-12NZDT,M9.5.0,M4.1.0/3", "IST-5:30", "nonsense", ":/no/such/file"],
)  # fmt: skip
def test_caps_and_ledger_agree_on_midnight_in_any_zone_and_when_it_changes(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In summer, in winter and around both changes; the caps were made in another zone."""
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    caps = Caps(CapLimits(usd_per_day=1.0), None, datetime(2025, 1, 1, tzinfo=UTC).timestamp())
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for hours in range(0, 366 * 24, 7):
            now = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + hours * 3600
            row, _ = rows_of(outcome(1, 0.25, 0.0, created=now), keep_text=False)
            reset = caps.state(now)["usd_per_day"]["reset_at"]
            assert isinstance(reset, float)
            assert 0 < reset - now <= 25 * 3600
            assert rows_of(outcome(1, 0.25, 0.0, created=reset - 1), keep_text=False)[0]["day"] == row["day"]
            assert str(rows_of(outcome(1, 0.25, 0.0, created=reset), keep_text=False)[0]["day"]) > str(row["day"])
    finally:
        monkeypatch.undo()
        time.tzset()
