"""Four servers of which three fall ill and heal: what `python -m benchmarks.servers` measures, with fewer requests."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.servers.live import measure
from tests.e2e.daemon.test_several_servers import chat, entry
from tests.fixtures.daemon import running
from tests.fixtures.upstream import Upstream


async def test_nothing_is_lost_or_doubled_while_servers_fall_ill_and_heal() -> None:
    figures = await measure(100, 4, 20.0, 1, lambda _: None)
    assert figures["wrong_ones"] == []
    assert figures["asked_of_servers"] == figures["starts_told"]
    assert figures["booked_requests"] == 100
    assert figures["ledger_usd"] == pytest.approx(figures["meter_usd"], rel=0.01)


async def test_one_that_falls_silent_in_mid_answer_is_let_go_for_another_one(tmp_path: Any) -> None:
    """Neither the time-out of a token nor that of a first one is waited for."""
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        more: dict[str, Any] = {"handoff": {"stall_s": 0.2}}
        servers = [entry("a", a.url, token_timeout_s=600.0), entry("b", b.url)]
        async with running(tmp_path / "d", device=False, servers=servers, settings=more) as daemon:
            with a.stall_after(3):
                moved = await chat(daemon, provider={"order": ["a", "b"]})
            assert moved["choices"][0]["message"]["content"] == "one two three four five six seven eight "
            assert [one["server"] for one in moved["disco"]["endpoints"].values()] == ["a", "b"]
            await a.wait_closed(0)
