"""What the configured server charges, and what was spent before this start."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.config.pricelist import load
from disco_daemon.config.schema import CapSettings, Config, ServerSettings
from disco_daemon.daemon.money import make_spending, price_of, restore
from disco_daemon.store import History
from tests.unit.test_ledger import outcome, put

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


def test_a_history_that_cannot_be_read_leaves_the_caps_at_nothing_spent(tmp_path: Path) -> None:
    spending = make_spending(Config(), tmp_path / "servers", SystemClock())
    restore(spending, History(tmp_path / "none.db"), SystemClock())
    assert spending.caps.spent(SystemClock().wall()).usd_today == 0.0
