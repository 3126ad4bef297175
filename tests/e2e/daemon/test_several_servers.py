"""Several servers behind one daemon: real ones on loopback, each with a key of its own and a meter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from openai import APIStatusError

from disco_daemon.bench.script import Exchange
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.provider import Provider
from tests.fixtures.upstream import Upstream

PRICE = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
ASKED = "one two three four five six seven eight"  # the script's answer says these words again
WHOLE = " ".join(ASKED.split()[:8]) + " "


def key(folder: Path, secret: str) -> str:
    """A file with a key that is its name, too."""
    path = folder / secret
    path.write_text(secret)
    path.chmod(0o600)
    return str(path)


def entry(name: str, url: str, **more: Any) -> dict[str, Any]:
    plain = {"name": name, "base_url": url, "model": "loopback", "probe": False, **PRICE}
    return plain | {"continuation": "continue_final_message"} | more


def cost(exchange: Exchange, price: Mapping[str, float]) -> float:
    """What a server's own meter says of one request, $."""
    used, put, out = exchange.usage(), price["input_usd_per_mtok"], price["output_usd_per_mtok"]
    return (used["prompt_tokens"] * put + used["completion_tokens"] * out) / 1e6


async def cards(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    async with daemon.session.get(f"{daemon.url}/models") as response:
        return {card["id"]: card for card in (await response.json())["data"]}


async def test_a_model_is_asked_for_by_name_at_its_server_with_its_key(tmp_path: Path) -> None:
    async with Provider("key-of-a", ["small", "owner/large"]) as a, Provider("key-of-b", ["small"]) as b:
        servers = [
            entry("a", a.url, model="", api_key_file=key(tmp_path, "key-of-a"), map={"gpt-4o": "owner/large"}),
            entry("b", b.url, model="small", api_key_file=key(tmp_path, "key-of-b"), models=["small"]),
        ]
        more: dict[str, Any] = {"api": {"aliases": {"claude-*": "a/small"}}}
        async with running(tmp_path / "d", device=False, servers=servers, settings=more) as daemon:
            await daemon.until(lambda state: len(state["servers"]) == 1)
            for name, server, model in (
                ("a/small", a, "small"), ("a/owner/large", a, "owner/large"), ("gpt-4o", a, "owner/large"),
                ("claude-opus", a, "small"), ("b/small", b, "small"), ("small", b, "small"), ("disco", b, "small"),
            ):  # fmt: skip
                before = {id(one): one.n_requests for one in (a, b)}
                heard = await ask(daemon, ASKED, model=name, max_tokens=4)
                assert heard.text == "one two three four ", name
                assert server.exchanges[-1].body["model"] == model
                assert {id(one): one.n_requests - before[id(one)] for one in (a, b)} == {
                    id(one): int(one is server) for one in (a, b)
                }
                assert heard.disco["server"] == ("a" if server is a else "b")
            with pytest.raises(APIStatusError) as refused:
                await ask(daemon, ASKED, model="b/large")
            assert refused.value.status_code == 404
            # Each key went to its own server, and to nobody else.
            assert set(a.seen) == {"key-of-a"}
            assert set(b.seen) == {"key-of-b"}
            # What it tells is listed; what the settings name, without asking.
            async with daemon.session.get(f"{daemon.url}/models") as response:
                assert response.status == 200
            found = await cards(daemon)
            assert {"a/small", "a/owner/large", "gpt-4o", "b/small", "small", "claude-*"} <= found.keys()
            assert found["a/owner/large"]["owned_by"] == "a"
            rows = await daemon.recorded(7)
            assert [row["server"] for row in reversed(rows)] == ["a", "a", "a", "a", "b", "b", "b"]


async def chat(daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    """One whole answer, with fields that OpenAI does not have."""
    body = {"model": "disco", "messages": [{"role": "user", "content": ASKED}], **more}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        found: dict[str, Any] = await response.json()
        return found | {"status": response.status}


def text_of(answer: Mapping[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_one_that_fails_is_skipped_and_one_that_breaks_off_goes_on_elsewhere(tmp_path: Path) -> None:
    """No word is lost or doubled, and the ledger is what the servers' meters say."""
    dear = {"input_usd_per_mtok": 3.0, "output_usd_per_mtok": 6.0}
    first_a: dict[str, Any] = {"order": ["a", "b"]}
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers = [entry("a", a.url), entry("b", b.url, **dear)]
        async with running(tmp_path / "d", device=False, servers=servers) as daemon:
            with a.status(500), b.status(503):
                assert (await chat(daemon))["status"] >= 500
            assert (len(a.exchanges), len(b.exchanges)) == (1, 1)
            # The client's wish says who begins; who fails is not billed, and the other one is asked at once.
            with a.status(500):
                answers = [await chat(daemon, provider=first_a) for _ in range(3)]
            assert [text_of(one) for one in answers] == [WHOLE] * 3
            assert all(one["disco"]["server"] == "b" for one in answers)
            assert "provider" not in b.exchanges[-1].body  # said to whoever routes
            n_asked = len(b.exchanges)
            with a.status(500):
                alone = await chat(daemon, provider={"order": ["a"], "allow_fallbacks": False})
            assert alone["status"] >= 500
            # One that is dearer than the client allows is not asked.
            cheap = [await chat(daemon, provider={"max_price": {"prompt": 2}}) for _ in range(3)]
            assert [one["disco"]["server"] for one in cheap] == ["a"] * 3
            assert len(b.exchanges) == n_asked
            # Cut after three words, the answer goes on at the other one.
            with a.cut_after(3):
                moved = await chat(daemon, provider=first_a)
            assert text_of(moved) == WHOLE
            assert moved["disco"]["handoffs"] == 1
            assert [one["server"] for one in moved["disco"]["endpoints"].values()] == ["a", "b"]
            await daemon.recorded(9)
            told = {one["name"]: one for one in (await daemon.state())["servers"]}
            assert told["b"]["usd_today"] == pytest.approx(sum(cost(one, dear) for one in b.exchanges if one.chunks))
            assert told["a"]["usd_today"] >= sum(cost(one, PRICE) for one in a.exchanges if one.chunks == 8)
            assert sum(one["share"] for one in told.values()) == pytest.approx(1)
            assert set(told["a"]) >= {
                "name", "model", "state", "breaker", "ttft_p50_s", "ttft_p99_s", "share", "hedges", "usd_today",
            }  # fmt: skip


async def plan(daemon: DaemonProcess, query: str) -> dict[str, Any]:
    async with daemon.session.get(f"{daemon.root}/disco/v1/plan?{query}") as response:
        assert response.status == 200, (await response.text(), daemon.log)
        found: dict[str, Any] = await response.json()
        return found


async def test_a_plan_names_the_server_that_is_asked_and_what_the_others_would_have_been(tmp_path: Path) -> None:
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        dear = {"input_usd_per_mtok": 300.0, "output_usd_per_mtok": 600.0}
        servers = [entry("a", a.url, map={"mine": "loopback"}), entry("b", b.url, **dear)]
        more = {"capabilities": {"tools": False}}
        async with running(tmp_path / "d", device=False, servers=[servers[0] | more, servers[1]]) as daemon:
            for _ in range(4):
                await chat(daemon, provider={"order": ["a"]})
                await chat(daemon, provider={"order": ["b"]})
            await daemon.recorded(8)
            rows = (await plan(daemon, "tokens=100"))["servers"]
            assert [(one["name"], one["asked"]) for one in rows] == [("a", True), ("b", False)]
            assert rows[1]["usd"] > rows[0]["usd"] > 0
            assert all(one["ttft_p50_s"] > 0 for one in rows)
            rows = (await plan(daemon, "tokens=100&is=tools"))["servers"]
            assert [(one["name"], one["asked"]) for one in rows] == [("b", True), ("a", False)]
            assert "does not support" in rows[1]["why"]
            (only,) = (await plan(daemon, "tokens=100&model=mine"))["servers"]
            assert (only["name"], only["asked"]) == ("a", True)
            assert (await plan(daemon, "tokens=100&model=nobody/x"))["servers"] == []
            with a.status(401):
                await chat(daemon, provider={"order": ["a"], "allow_fallbacks": False})
            rows = (await plan(daemon, "tokens=100"))["servers"]
            assert [(one["name"], one["asked"]) for one in rows] == [("b", True), ("a", False)]
            assert (rows[1]["breaker"]["state"], rows[1]["breaker"]["why"]) == ("open", "unauthorized")


async def test_a_silent_server_is_joined_by_another_one_and_who_is_first_answers(tmp_path: Path) -> None:
    """Both are booked, each at its own price, and the loser is closed; a reload keeps what was learned."""
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers = [entry("a", a.url), entry("b", b.url)]
        async with running(tmp_path / "d", device=False, servers=servers) as daemon:
            with b.delay(0.2):
                for _ in range(40):
                    assert text_of(await chat(daemon)) == WHOLE
                n_a = len(a.exchanges)
                assert n_a > len(b.exchanges)  # the quicker one
            with a.hang():
                answers: list[dict[str, Any]] = []
                while not any(one["disco"]["server"] == "b" and len(a.exchanges) > n_a for one in answers):
                    answers.append(await chat(daemon))
            assert all(text_of(one) == WHOLE for one in answers)
            joined = next(one["disco"]["endpoints"] for one in answers if len(one["disco"]["endpoints"]) > 1)
            assert [(one["server"], one["hedge"]) for one in joined.values()] == [("a", None), ("b", "won")]
            assert all(one["bill_usd"] > 0 for one in joined.values())
            await a.wait_closed(n_a)
            told = {one["name"]: one for one in (await daemon.state())["servers"]}
            assert told["b"]["hedges"] >= 1
            assert told["a"]["ttft_p50_s"] < told["b"]["ttft_p50_s"]
            async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
                assert response.status == 200
            again = {one["name"]: one for one in (await daemon.state())["servers"]}
            assert again["a"]["ttft_p50_s"] == told["a"]["ttft_p50_s"]
            assert text_of(await chat(daemon)) == WHOLE


@pytest.mark.parametrize("n_cut", [0, 3])
async def test_an_answer_whose_next_start_is_refused_ends_and_asks_nobody_again(tmp_path: Path, n_cut: int) -> None:
    """One start fits what the client allows, two do not: the answer ends with the first one's error, at once."""
    dear = {"input_usd_per_mtok": 300.0, "output_usd_per_mtok": 600.0}
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b, Upstream(tokens=8) as cheap:
        servers = [entry("a", a.url, **dear), entry("b", b.url, **dear)]
        wish: dict[str, Any] = {"provider": {"order": ["a", "b"]}, "disco": {"max_cost_usd": 0.03}, "max_tokens": 8}
        async with running(tmp_path / "two", device=False, servers=servers) as daemon:
            with a.cut_after(n_cut):
                ended = await chat(daemon, **wish)
            assert (ended["status"] >= 500, len(a.exchanges), len(b.exchanges)) == (True, 1, 0)
            assert text_of(await chat(daemon, **wish)) == WHOLE  # it is well, and asked again
            spent = (await daemon.state())["money"]["spent"]["usd_today"]
            assert spent <= 2 * 0.03
        # A third one that is cheap enough goes on in the place of both.
        servers.append(entry("cheap", cheap.url))
        wish["provider"] = {"order": ["a", "b", "cheap"]}
        async with running(tmp_path / "three", device=False, servers=servers) as daemon:
            with a.cut_after(n_cut):
                whole = await chat(daemon, **wish)
            assert (whole["status"], text_of(whole), len(b.exchanges)) == (200, WHOLE, 0)
            assert len(cheap.exchanges) == 1


async def test_without_hedges_a_silent_server_is_waited_for_and_nobody_is_asked_as_well(tmp_path: Path) -> None:
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers, settings = [entry("a", a.url), entry("b", b.url)], {"policy": {"hedge": 0.0}}
        async with running(tmp_path / "d", device=False, servers=servers, settings=settings) as daemon:
            with b.delay(0.2):
                for _ in range(30):
                    assert text_of(await chat(daemon)) == WHOLE
            n_a, n_b = len(a.exchanges), len(b.exchanges)
            with a.delay(1.0), b.delay(1.0):
                answers = [await chat(daemon) for _ in range(4)]
            assert all(text_of(one) == WHOLE for one in answers)
            assert len(a.exchanges) - n_a + len(b.exchanges) - n_b == 4
            assert all(len(one["disco"]["endpoints"]) == 1 for one in answers)
            assert [one["hedges"] for one in (await daemon.state())["servers"]] == [0, 0]


async def test_whatever_one_of_two_servers_sends_the_answer_is_whole_and_there_once(tmp_path: Path) -> None:
    """Each fault from the first word on or after the third: the other server begins, or goes on."""
    first_a: dict[str, Any] = {"provider": {"order": ["a", "b"]}}
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers = [entry("a", a.url), entry("b", b.url)]
        async with running(tmp_path / "d", device=False, servers=servers) as daemon:
            faults: list[tuple[AbstractContextManager[None], str]] = [
                (a.status(500), "b"), (a.status(429), "b"), (a.status(401), "b"), (a.status(400), "b"),
                (a.empty_200(), "b"), (a.html_200(), "b"), (a.cut_after(0), "b"), (a.garbage_after(0), "b"),
                (a.redirect("http://127.0.0.1:9/"), "b"),
                (a.cut_after(3), "a"), (a.close_without_finish(3), "a"), (a.close_without_done(), "a"),
                (a.error_event_after(3), "a"), (a.garbage_after(3), "a"), (a.stall_after(3), "a"),
                (a.split_utf8(), "a"), (a.with_comments(), "a"), (a.delay(0.5, headers_first=False), "a"),
            ]  # fmt: skip
            for fault, winner in faults:
                with fault:
                    answer = await chat(daemon, **first_a)
                assert (answer["status"], text_of(answer)) == (200, WHOLE), answer
                assert answer["disco"]["server"] == winner
                async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:  # all are well again
                    assert response.status == 200
            rows = await daemon.recorded(len(faults))
            spent = (await daemon.state())["money"]["spent"]["usd_today"]
            assert spent == pytest.approx(sum(row["server_usd"] for row in rows))
            assert "Traceback" not in daemon.log


async def test_an_answer_goes_on_at_a_server_that_the_settings_no_longer_have(tmp_path: Path) -> None:
    begin = asyncio.Event()
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers = [entry("a", a.url), entry("b", b.url)]
        async with running(tmp_path / "d", device=False, servers=servers) as daemon:
            with a.held_until(begin):
                answer = asyncio.create_task(chat(daemon, provider={"order": ["a"]}))
                await a.wait_request()
                config = daemon.folder / "config.toml"
                document = tomlkit.parse(config.read_text())
                document["servers"] = [servers[1]]
                config.write_text(tomlkit.dumps(document))
                async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
                    assert response.status == 200
                begin.set()
                found = await answer
            assert (found["status"], text_of(found), found["disco"]["server"]) == (200, WHOLE, "a")
            assert (await chat(daemon, model="a/loopback"))["error"]["code"] == "model_not_found"
            assert (await chat(daemon))["disco"]["server"] == "b"
