"""Money and energy live: caps move traffic and never let it overshoot, the rate acts at once, the ledger is right."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.eval.money import Setup, bench_money, main, table
from disco_daemon.config.layers import load
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

HELLO = "Tell me about lighthouses."


async def change(daemon: DaemonProcess, status: int = 200, **changes: Any) -> dict[str, Any]:
    body = {key.replace("__", "."): value for key, value in changes.items()}
    async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
    return found


async def test_a_cap_that_is_reached_moves_traffic_to_the_device(tmp_path: Path) -> None:
    settings = {"caps": {"usd_per_day": 0.0}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        heard = await ask(daemon, HELLO, max_tokens=4)
        assert (heard.disco["winner"], heard.disco["server_usd"]) == ("device", 0.0)
        assert upstream.n_requests == 0
        await change(daemon, caps__usd_per_day=1.0)
        heard = await ask(daemon, HELLO, max_tokens=4)
        assert heard.disco["winner"] == "server"
        assert heard.disco["server_usd"] == heard.disco["endpoints"]["server"]["bill_usd"] > 0


async def test_where_both_sides_are_capped_the_client_is_told_when_to_come_back(tmp_path: Path) -> None:
    settings = {"caps": {"usd_per_day": 0.0, "wh_per_day": 0.0}}
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, settings=settings) as daemon:
        await daemon.device_ready()
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(daemon, HELLO)
        error = refused.value
        assert (error.code, error.type) == ("cap_reached", "insufficient_quota")
        assert 1 <= int(error.response.headers["Retry-After"]) <= 86_400
        assert "usd_per_day" in error.message
        assert "wh_per_day" in error.message
        with pytest.raises(openai.RateLimitError, match="wh_per_day"):
            await daemon.client.embeddings.create(model="disco", input="hello")
        await change(daemon, caps__wh_per_day=None)
        assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "device"
        with pytest.raises(openai.RateLimitError):
            await ask(daemon, HELLO, model="disco/server")


async def test_the_rate_takes_effect_at_the_next_request_and_survives_a_restart(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        async with running(tmp_path, server=upstream.url, policy="optimal") as daemon:
            money = (await daemon.state())["money"]
            assert money["scarcer"] == (await daemon.state())["learned"]["constrained"] == "server"
            dear = 2 * money["threshold_usd_per_kwh"]
            told = await change(daemon, device__usd_per_kwh=dear)
            assert told["money"]["scarcer"] == "device"
            assert told["needs_restart"] == []
            state = await daemon.state()
            assert state["learned"]["constrained"] == "device"
            assert state["money"]["usd_per_kwh"] == dear
        assert load(tmp_path / "config.toml", {}).device.usd_per_kwh == dear


async def test_disco_config_set_reaches_the_running_daemon(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        port = daemon.root.rsplit(":", 1)[1]
        env = os.environ | {"DISCO_CONFIG": str(tmp_path / "config.toml"), "DISCO_API_PORT": port}
        said = await _disco(env, "config", "set", "device.usd_per_kwh", "7.5")
        assert "from now on" in said
        assert (await daemon.state())["money"]["usd_per_kwh"] == 7.5
        said = await _disco(env, "config", "set", "server.model", "m")
        assert "at its next start" in said


async def test_settings_that_are_wrong_change_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        before = (tmp_path / "config.toml").read_text()
        for changes in ({"caps__usd_per_day": -1}, {"device__usd_per_kwh": "much"}, {"policy__nonsense": 1}):
            error = (await change(daemon, 400, caps__wh_per_day=3.0, **changes))["error"]
            assert error["code"] == "invalid_setting"
        await change(daemon, 400)
        await change(daemon, 403, api__key="mine")
        assert (tmp_path / "config.toml").read_text() == before
        assert (await daemon.state())["money"]["caps"] == {}
        async with daemon.controls.get(f"{daemon.root}/disco/v1/settings") as response:
            assert (await response.json())["settings"]["caps"]["wh_per_day"] is None


async def test_what_was_spent_today_counts_after_a_restart(tmp_path: Path) -> None:
    async with Upstream(tokens=20) as upstream:
        async with running(tmp_path, server=upstream.url, policy="all-server") as daemon:
            heard = await ask(daemon, HELLO, max_tokens=20)
        spent = heard.disco["server_usd"]
        assert spent > 0
        settings = {"caps": {"usd_per_day": spent}}
        async with running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon:
            await daemon.device_ready()
            assert (await daemon.state())["money"]["spent"]["usd_today"] == pytest.approx(spent)
            assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "device"


async def test_both_starts_of_a_race_are_booked(tmp_path: Path) -> None:
    async with Upstream(interval_s=0.01) as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        with upstream.delay(30.0):
            heard = await ask(daemon, HELLO, max_tokens=8)
        assert heard.disco["winner"] == "device"
        assert heard.disco["endpoints"]["server"]["bill_usd"] > 0, "it lost, and was asked all the same"
        assert heard.disco["endpoints"]["device"]["energy_j"] > 0
        with closing(sqlite3.connect(tmp_path / "history.sqlite")) as connection:
            await daemon.recorded(1)
            (booked,) = connection.execute("SELECT sum(bill_usd) FROM ttft_samples").fetchone()
        assert booked == pytest.approx(heard.disco["server_usd"])


async def test_what_the_probe_asks_is_booked_too(tmp_path: Path) -> None:
    settings = {"server": {"probe": True}}
    async with (
        Upstream(tokens=60) as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        # To the server's own end: `lighthouses. ` counts as two here, so a limit might close it before its bill comes.
        asked = await ask(daemon, HELLO)
        async with asyncio.timeout(60):
            while not (probes := [row for row in await daemon.history() if row["policy"] == "probe"]):
                await asyncio.sleep(0.02)  # the other process has no event to wait for
        (probe,) = probes
        assert probe["server_usd"] > 0
        money = (await daemon.state())["money"]
        assert money["spent"]["usd_today"] == pytest.approx(probe["server_usd"] + asked.disco["server_usd"])
        sent = sum(len(e.tokens) for e in upstream.exchanges)
        with closing(sqlite3.connect(tmp_path / "history.sqlite")) as connection:
            (booked,) = connection.execute("SELECT sum(completion_tokens) FROM ttft_samples").fetchone()
        assert booked == sent


async def test_a_server_that_bills_on_is_booked_at_its_full_price(tmp_path: Path) -> None:
    """The user's own price list says that closing a stream does not end its bill there."""
    async with Upstream(tokens=200, interval_s=0.05) as upstream:
        prices = tmp_path / "servers" / "mine.toml"
        prices.parent.mkdir()
        prices.write_text(
            f'base_url = "{upstream.url}"\nclosing_stops_billing = false\n'
            '[models."loopback"]\ninput = 1.0\noutput = 2.0\n'
        )
        settings = {"server": {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}}
        async with running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon:
            stream = await daemon.client.chat.completions.create(
                model="disco", messages=[{"role": "user", "content": HELLO}], stream=True, max_tokens=150
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            await stream.close()
            await daemon.until(lambda s: s["served"] == 1 and s["in_flight"] == 0)
            await daemon.recorded(1)
        with closing(sqlite3.connect(tmp_path / "history.sqlite")) as connection:
            made, unseen, bill = connection.execute(
                "SELECT completion_tokens, unseen_tokens, bill_usd FROM ttft_samples"
            ).fetchone()
        assert 0 < unseen <= 150 - made
        assert bill > 2.0 * (made + unseen) / 1e6


@pytest.mark.slow
async def test_the_ledger_is_what_the_server_bills_and_a_cap_holds_whatever_is_killed(tmp_path: Path) -> None:
    figures = await bench_money(Setup(requests=120, clients=20, kills=2), print)
    assert abs(figures["ledger"]["difference_usd"]) < 0.005, "to the cent"
    assert figures["ledger"]["booked_requests"] == 120
    assert figures["cap"]["over_in_dearest_requests"] <= 1
    assert figures["cap"]["refused"] > 0
    assert figures["kills"]["worst_beyond_running_usd"] < 0.005
    assert "kill -9" in table(figures)


async def _disco(env: dict[str, str], *args: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


def test_the_bench_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "20", "--kills", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"ledger", "cap", "kills"} <= set(found)
