"""A second request to a server that stalls, with a real daemon: the reader gets its answer, and the ledger has both."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.fixtures.daemon import PRICES, DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

ASKED = "Tell me about lighthouses in a few words."
LEARNED = 40  # answers, by which a tail of one in twenty is known
TAIL_S = 0.5


async def counted(daemon: DaemonProcess, name: str) -> float:
    async with daemon.session.get(f"{daemon.root}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_a_server_with_a_tail_is_asked_again_and_both_requests_are_in_the_ledger(tmp_path: Path) -> None:
    settings = {"policy": {"scarcer": "device", "budget": 0.0, "shadow": False}}
    async with (
        Upstream(tokens=4) as upstream,
        running(tmp_path, server=upstream.url, policy="optimal", device=False, settings=settings) as daemon,
    ):
        for i in range(LEARNED):
            with upstream.delay(TAIL_S if i % 20 == 7 else 0.02, times=1):
                await ask(daemon, ASKED, max_tokens=4)
        await daemon.until(lambda s: s["learned"]["hedge"]["after_s"] is not None)
        n_before = upstream.n_requests
        with upstream.held_until(asyncio.Event(), None, times=1):  # the first one will never answer
            heard = await ask(daemon, ASKED, max_tokens=4)
        assert heard.text == "Tell me about lighthouses "
        assert upstream.n_requests == n_before + 2
        await upstream.wait_closed(n_before)

        endpoints = heard.disco["endpoints"]
        assert [(name, endpoints[name]["hedge"]) for name in endpoints] == [("server", None), ("server#2", "won")]
        assert heard.disco["plan"]["hedge_s"] < TAIL_S
        assert endpoints["server#2"]["started_s"] == pytest.approx(heard.disco["plan"]["hedge_s"], abs=0.5)
        assert await counted(daemon, 'disco_hedges_total{result="won"}') >= 1
        sent = await counted(daemon, "disco_hedges_total")

        # A server bills every prompt that it was sent, and the answer as far as it was taken.
        rows = await daemon.recorded(LEARNED + 1)
        asked = [e.usage()["prompt_tokens"] for e in upstream.exchanges]
        billed = 2 * asked[-1] * PRICES["input_usd_per_mtok"] + 4 * PRICES["output_usd_per_mtok"]
        assert rows[0]["server_usd"] == pytest.approx(billed / 1e6)
        money = (await daemon.state())["money"]["spent"]
        assert money["usd_today"] == pytest.approx(sum(row["server_usd"] for row in rows))
        with closing(sqlite3.connect(tmp_path / "history.sqlite")) as connection:
            booked = connection.execute("SELECT count(*), sum(processed_tokens) FROM ttft_samples").fetchone()
        assert booked == (upstream.n_requests, sum(asked))
        assert upstream.n_requests == LEARNED + 1 + sent
        learned = (await daemon.state())["learned"]["hedge"]
        assert 0 < learned["used"] <= learned["share"] == 0.08

        # With nothing to send twice, the same silence is waited out.
        async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json={"policy.hedge": 0.0}) as response:
            assert response.status == 200
        with upstream.delay(4 * heard.disco["plan"]["hedge_s"], times=1):
            heard = await ask(daemon, ASKED, max_tokens=4)
        assert heard.disco["plan"]["hedge_s"] is None
        assert list(heard.disco["endpoints"]) == ["server"]
