"""A running answer moves between a real engine and a real server, and nobody can tell from its text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.client.stream import Link
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.stopwatch import least_of_three
from tests.fixtures.upstream import Upstream

STORY = "Write a short story about a fox who finds a lantern."
LONG = "Summarise this text. " + "The lighthouse keeper climbed the stairs every evening. " * 15


@asynccontextmanager
async def pair(
    folder: Path, policy: str, method: str, *more: str, server_tps: float = 30, **sections: Any
) -> AsyncIterator[DaemonProcess]:
    """A daemon with a device, and another one, device only, as its server: slow enough to be overtaken."""
    settings = {"server": {"model": "disco/device", "continuation": method, "stream_usage": True}} | sections
    async with running(folder / "server", policy="all-device", more=("--shape-tps", f"{server_tps:g}")) as server:
        await server.device_ready()
        async with running(folder / "d", server=server.url, policy=policy, settings=settings, more=more) as daemon:
            await daemon.device_ready()
            yield daemon


def done(disco: dict[str, Any]) -> list[dict[str, Any]]:
    return [move for move in disco["moves"] if move["dropped"] is None]


async def moved(daemon: DaemonProcess, **asked: Any) -> Heard:
    """Ask until the answer has moved: where other programs hold a server up, a quick device may end before it is there.

    Whether it moves or not, its text is the same one.
    """
    texts = set()
    for _ in range(3):
        heard = await ask(daemon, STORY, **asked)
        texts.add(heard.text)
        if done(heard.disco):
            break
    assert len(texts) == 1
    return heard


TRUSTED: dict[str, dict[str, Any]] = {"server": {"continuation": "continue_final_message"}, "policy": {"shadow": False}}
FORCED = ("--force-handoff", "4-20")


async def test_an_answer_moves_from_server_to_device_and_reads_like_an_unbroken_one(tmp_path: Path) -> None:
    async with pair(tmp_path, "all-server", "token_ids", *FORCED) as daemon:
        whole = await ask(daemon, STORY, model="disco/device", max_tokens=120)
        heard = await ask(daemon, STORY, max_tokens=120)
        (move,) = done(heard.disco)
        assert (move["source"], move["target"], move["reason"]) == ("server", "device", "cost")
        assert heard.text == whole.text
        assert heard.finish_reason == whole.finish_reason
        tokens = heard.disco["tokens"]
        assert tokens["server"] == move["at"] >= 4
        assert tokens["device"] > 0
        assert sum(tokens.values()) == sum(whole.disco["tokens"].values())
        server = heard.disco["endpoints"]["server"]
        assert server["completion_tokens"] < sum(tokens.values()), "the server's stream was not closed"


async def test_a_stream_says_who_made_each_piece_though_it_is_read_later(tmp_path: Path) -> None:
    """Paced, most of what the server made is shown after the device has taken over: it is the server's all the same."""
    async with pair(tmp_path, "all-server", "token_ids", *FORCED) as daemon, Link(daemon.root) as link:
        messages = [{"role": "user", "content": STORY}]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "disco": {"delivery": "paced", "pace_tps": 12}}
        for _ in range(3):  # a device that a busy machine holds up does not catch up in time
            text, sides, note, told = "", [], "", None
            async with aclosing(link.chat(messages, **options)) as pieces:
                async for piece in pieces:
                    text += piece.text
                    sides += [piece.side] * len(piece.text)
                    note, told = note or piece.note, piece.disco or told
            assert told is not None
            if done(dict(told)):
                break
        assert told is not None
        (move,) = done(dict(told))
        assert note.startswith("handoff server to device")
        at = move["at_char"]
        assert 0 < at < len(text)
        assert sides == ["server"] * at + ["device"] * (len(text) - at)
        trace = await link.trace(told["request_id"])
        assert trace is not None
        assert trace["put"] == trace["released"] == sum(told["tokens"].values())
        joined, shown = trace["put_s"][move["at"]], trace["released_s"][move["at"]]
        assert joined <= shown
        assert joined > told["endpoints"]["device"]["started_s"], "its token, not the one thrown away"


@pytest.mark.parametrize("method", ["token_ids", "continue_final_message"])
async def test_an_answer_moves_from_device_to_server(tmp_path: Path, method: str) -> None:
    async with pair(tmp_path, "all-device", method, *FORCED) as daemon:
        whole = await ask(daemon, STORY, model="disco/device", max_tokens=120)
        heard = await moved(daemon, max_tokens=120)
        (move,) = done(heard.disco)
        assert (move["source"], move["target"]) == ("device", "server")
        assert heard.text == whole.text
        assert heard.disco["tokens"]["server"] > 0
        assert sum(heard.disco["tokens"].values()) == sum(whole.disco["tokens"].values())


async def test_money_moves_an_answer_and_the_ledger_shows_it(tmp_path: Path) -> None:
    """The server is so slow that the move pays on a machine that is busy with other tests, too.

    What the device does there in a second was measured at its start, perhaps in a bad moment: it is seen again first.
    """
    async with pair(tmp_path, "all-server", "token_ids", server_tps=8, handoff={"for_cost": True}) as daemon:
        for again in range(3):
            await ask(daemon, f"{again} times over. {LONG}", model="disco/device", max_tokens=8)
        alone = await ask(daemon, STORY, model="disco/server", max_tokens=48)
        moved = await ask(daemon, STORY, max_tokens=48)
        assert done(moved.disco)
        assert moved.text == alone.text
        assert moved.disco["cost_usd"] < alone.disco["cost_usd"]
        stays = {"delivery": "off"}
        request = {"model": "disco", "messages": [{"role": "user", "content": STORY}], "max_tokens": 48}
        async with daemon.session.post(f"{daemon.url}/chat/completions", json=request | {"disco": stays}) as response:
            assert (await response.json())["disco"]["moves"] == []


async def test_the_prefill_of_a_loser_is_kept_for_the_handoff(tmp_path: Path) -> None:
    """A scripted server that is quicker than a long prefill: certain to win, slow enough to be overtaken."""
    async with (
        Upstream(tokens=400, interval_s=0.05) as upstream,
        running(tmp_path, server=upstream.url, policy="race", settings=TRUSTED, more=FORCED) as daemon,
    ):
        await daemon.device_ready()
        heard = await ask(daemon, LONG, max_tokens=300)
        assert heard.disco["winner"] == "server"
        (move,) = done(heard.disco)
        assert set(heard.disco["endpoints"]) == {"device", "server"}, "the device was started twice"
        device = heard.disco["endpoints"]["device"]
        assert device["censored"], "it lost the race: its TTFT is not known"
        assert device["prompt_tokens"] < heard.disco["prompt_tokens"] + move["at"] + 16, (
            "the prompt was prefilled twice"
        )
        assert heard.text.startswith("".join(upstream.exchanges[0].tokens)[: move["at_char"]])


async def test_a_server_that_stalls_in_mid_answer_is_replaced_before_its_time_is_over(tmp_path: Path) -> None:
    settings = {"handoff": {"stall_s": 0.3}}
    async with (
        Upstream(tokens=20) as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        with upstream.stall_after(7):
            heard = await ask(daemon, STORY, max_tokens=30)
        (move,) = done(heard.disco)
        assert (move["reason"], move["at"]) == ("stall", 7)
        assert heard.text.startswith("".join(upstream.exchanges[0].tokens[:7]))
        assert heard.disco["tokens"]["device"] > 0
        assert heard.disco["reading"]["largest_gap_s"] < 5.0


async def test_a_server_that_starts_its_answer_again_is_not_joined(tmp_path: Path) -> None:
    """The engine stands still, the server is asked, ignores what was said, and the engine goes on after all."""
    async with (
        Upstream(interval_s=0.05) as upstream,
        running(tmp_path, server=upstream.url, policy="all-device", settings={"handoff": {"stall_s": 0.3}}) as daemon,
    ):
        await daemon.device_ready()
        engine = (await daemon.state())["endpoints"]["device"]["pid"]
        whole = await ask(daemon, STORY, model="disco/device", max_tokens=160)

        def stop(heard: Heard) -> None:
            if len(heard.pieces) == 20:
                os.kill(engine, signal.SIGSTOP)

        with upstream.answering(whole.text[:40] + " and then something else entirely happened to everybody."):
            asking = asyncio.create_task(ask(daemon, STORY, max_tokens=160, on_piece=stop))
            await upstream.wait_request(0)
            await upstream.wait_closed(0)
            os.kill(engine, signal.SIGCONT)
            heard = await asking
        assert heard.text == whole.text
        assert heard.disco["handoffs"] == 0
        (move,) = heard.disco["moves"]
        assert (move["reason"], move["dropped"]) == ("stall", "restart")


async def test_a_probe_that_finds_no_way_keeps_answers_on_the_device(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=60) as upstream,
        running(
            tmp_path, server=upstream.url, policy="all-device", settings={"server": {"probe": True}}, more=FORCED
        ) as daemon,
    ):
        await daemon.device_ready()
        text = "Once there was a fox who walked through the autumn leaves and found a small brass lantern by the road."
        with upstream.answering(text):
            await ask(daemon, STORY, model="disco/server")
            state = await daemon.until(lambda s: s["endpoints"]["server"]["probed"] is not None)
            assert state["endpoints"]["server"]["continuation"] == "none"
            heard = await ask(daemon, STORY, max_tokens=30)
        assert heard.disco["moves"] == []
        assert heard.disco["tokens"]["server"] == 0


async def test_a_stop_string_is_found_behind_the_seam_and_the_stream_ends_once(tmp_path: Path) -> None:
    async with pair(tmp_path, "all-device", "token_ids", *FORCED) as daemon:
        whole = (await ask(daemon, STORY, model="disco/device", max_tokens=240)).text
        # Far behind the seam, and before the limit: what a server says is counted by our own tokens, which may be more.
        middle = len(whole) // 2
        stop = whole[middle : middle + 10]
        assert whole.index(stop) > len(whole) // 4
        body = {"model": "disco", "messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 240}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        for _ in range(3):  # as often as `moved`
            async with daemon.session.post(
                f"{daemon.url}/chat/completions", json=body | stream | {"stop": [stop]}
            ) as response:
                lines = (await response.text()).splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
            assert text == whole[: whole.index(stop)]
            assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]].count("stop") == 1
            assert sum("usage" in c and c["usage"] is not None for c in chunks) == 1
            if moves := [line for line in lines if line.startswith(": disco handoff device to server")]:
                break
        assert moves


async def test_a_tool_call_stays_where_it_began(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=40, interval_s=0.02) as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", more=("--force-handoff", "2-3")) as daemon,
    ):
        await daemon.device_ready()
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        body = {"model": "disco", "messages": [{"role": "user", "content": STORY}], "tools": [tool]}
        async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | {"stream": True}) as response:
            text = await response.text()
        assert '"moves":[]' in text
        assert text.rstrip().endswith("data: [DONE]")


async def test_paced_answers_flow_at_the_readers_pace_and_end_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, policy="all-device") as daemon:
        await daemon.device_ready()
        body = {"model": "disco", "messages": [{"role": "user", "content": STORY}], "max_tokens": 200, "stream": True}
        manner = {"disco": {"delivery": "paced", "pace_tps": 20}}
        n_rows = count(1)

        async def early_s() -> float:
            """How much earlier than at its pace the reader had the tokens that came before the answer was whole."""
            times = []
            async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | manner) as response:
                async for line in response.content:
                    if b'"content":"' in line:
                        times.append(asyncio.get_running_loop().time())
            row = (await daemon.recorded(next(n_rows)))[0]
            assert row["delivery"] == "paced"
            assert 0 < row["qoe"] <= 1
            made_s: float = row["duration_s"] - row["ttft_s"]
            return sum(t < times[0] + made_s - 0.2 for t in times) / 20 - made_s

        assert await least_of_three(early_s, 0.1) <= 0.1, "two tokens more than the pace allows"


async def test_the_pace_of_a_running_answer_can_be_changed(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=30, interval_s=0.05) as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", device=False) as daemon,
    ):
        body = {"model": "disco", "messages": [{"role": "user", "content": STORY}], "stream": True}
        slow = {"disco": {"delivery": "paced", "pace_tps": 0.5}}
        n_rows = count(1)

        async def gap_s() -> float:
            seen: list[bytes] = []
            async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | slow) as response:
                name = response.headers["X-Disco-Request-Id"]
                async for line in response.content:
                    if b'"content":"' in line:
                        seen.append(line)
                    if len(seen) == 1 and b'"content":"' in line:
                        adjust = f"{daemon.root}/disco/v1/answers/{name}"
                        async with daemon.session.post(adjust, json={"delivery": "off"}) as told:
                            assert told.status == 200
            row = (await daemon.recorded(next(n_rows)))[0]
            assert len(seen) == 30
            async with daemon.session.post(f"{daemon.root}/disco/v1/answers/{name}", json={"pace_tps": 9}) as told:
                assert told.status == 404
            longest_s: float = row["tbt_p99_s"]
            return longest_s

        assert await least_of_three(gap_s, 1.0) < 1.0, "at half a token a second each gap is two seconds"
