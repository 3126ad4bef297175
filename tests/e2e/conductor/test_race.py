"""Device and server race for each answer; the first token wins and the loser stops."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from disco_daemon.bench.script import script
from disco_daemon.store.recorded_outcomes import outcomes
from disco_daemon.types import Plan
from tests.e2e.daemon.test_whatif import remembered
from tests.fixtures.daemon import ask, running
from tests.fixtures.upstream import Upstream

LONG = "Summarise this text. " + "The lighthouse keeper climbed the stairs every evening. " * 60


async def test_device_wins_against_a_slow_server_whose_stream_is_then_closed(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        with upstream.delay(30):
            heard = await ask(daemon, "Name three colours.")
        await upstream.wait_closed(0)
        assert heard.disco["winner"] == "device"
        assert heard.disco["tokens"] == {"device": heard.disco["tokens"]["device"], "server": 0}
        assert upstream.exchanges[0].chunks == 0
        server = heard.disco["endpoints"]["server"]
        assert server["censored"], "a server that lost has no TTFT, only a lower bound of it"


async def test_server_wins_against_a_long_prefill_which_is_then_stopped(tmp_path: Path) -> None:
    async with Upstream(tokens=9) as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        heard = await ask(daemon, LONG)
        assert heard.disco["winner"] == "server"
        device = heard.disco["endpoints"]["device"]
        assert device["completion_tokens"] == 0, "the device generated after it had lost"
        assert device["prompt_tokens"] < heard.disco["prompt_tokens"], "its prefill was not stopped"
        assert heard.text == "".join(upstream.exchanges[0].tokens)


async def test_delay_gives_the_server_a_head_start(tmp_path: Path) -> None:
    """A busy machine may hold up one answer or two of three."""
    settings = {"policy": {"delay_s": 0.2}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy="delay", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        quick = [await ask(daemon, "Say yes.") for _ in range(3)]
        assert ["server"] in [list(heard.disco["endpoints"]) for heard in quick]
        with upstream.delay(30):
            slow = [await ask(daemon, "Say yes.", max_tokens=4) for _ in range(3)]
        assert {heard.disco["winner"] for heard in slow} == {"device"}
        started_s = min(heard.disco["endpoints"]["device"]["started_s"] for heard in slow)
        assert started_s == pytest.approx(0.2, abs=0.1)


async def test_a_request_may_choose_its_side(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        models = [m.id for m in (await daemon.client.models.list()).data]
        assert {"disco", "disco/device", "disco/server"} <= set(models)
        assert (await ask(daemon, "Hello!", model="disco/server")).disco["tokens"]["device"] == 0
        assert (await ask(daemon, "Hello!", model="disco/device")).disco["tokens"]["server"] == 0
        private = await daemon.client.chat.completions.create(
            model="disco",
            messages=[{"role": "user", "content": "My secret."}],
            max_tokens=3,
            extra_body={"disco": {"private": True}},
        )
        assert list((private.model_extra or {})["disco"]["endpoints"]) == ["device"]
        assert len(upstream.exchanges) == 1, "a private request reached the server"


async def test_an_answer_that_is_not_streamed_is_the_same_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        streamed = await ask(daemon, "What is the capital of France?")
        raw = await daemon.client.chat.completions.with_raw_response.create(
            model="disco",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
        )
        whole = raw.parse()
        assert whole.choices[0].message.content == streamed.text
        assert whole.choices[0].finish_reason == streamed.finish_reason
        assert raw.headers["X-Disco-Route"] == "device"
        assert raw.headers["X-Disco-Request-Id"].startswith("req-")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == streamed.disco["tokens"]["device"]


async def test_both_sides_stop_within_200_ms_when_the_client_leaves(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        closed_s, stopped_s = [], []
        for i in range(3):  # a busy machine may hold one of them up
            with upstream.delay(30):
                request = asyncio.create_task(ask(daemon, f"{i}: {LONG}"))
                await upstream.wait_request(i)
                await daemon.until(lambda s: s["endpoints"]["device"]["in_flight"] == 1)
                request.cancel()
                left_at = asyncio.get_running_loop().time()
                closed_s.append(await upstream.wait_closed(i) - left_at)
                await daemon.until(lambda s: s["endpoints"]["device"]["in_flight"] == 0 and s["in_flight"] == 0)
                stopped_s.append(asyncio.get_running_loop().time() - left_at)
        assert min(closed_s) < 0.2
        assert min(stopped_s) < 0.2
        assert [row["finish_reason"] for row in await daemon.history()] == ["cancelled"] * 3


async def test_fifty_streams_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=60, interval_s=0.01) as upstream,
        running(tmp_path, server=upstream.url, device=False) as daemon,
    ):
        prompts = [f"client{i} asks {i * i}" for i in range(50)]
        answers = await asyncio.gather(*(ask(daemon, prompt, max_tokens=None) for prompt in prompts))
        for prompt, heard in zip(prompts, answers, strict=True):
            assert heard.text == "".join(script(prompt, 60))
            assert heard.finish_reason == "stop"


async def test_history_has_a_row_a_request_and_no_text(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        heard = await ask(daemon, "An unusual question about xylophones.")
        [row] = await daemon.history()
        assert row["request_id"] == heard.disco["request_id"]
    files = b"".join(p.read_bytes() for p in tmp_path.glob("history.sqlite*"))
    assert b"xylophones" not in files
    assert "xylophones" not in daemon.log
    assert "secret-of-the-test" not in daemon.log


async def test_the_device_s_name_means_the_device_even_if_the_server_s_model_is_called_so(tmp_path: Path) -> None:
    settings = {"server": {"model": "disco/device"}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        heard = await ask(daemon, "Hello", model="disco/device", max_tokens=3)
        assert heard.disco["winner"] == "device"
        assert not upstream.exchanges
        assert (await ask(daemon, "Hello", model="disco/server", max_tokens=3)).disco["winner"] == "server"


@pytest.mark.parametrize("private", [False, True])
async def test_a_device_that_serves_alone_waits_for_nobody(tmp_path: Path, private: bool) -> None:
    remembered(tmp_path, 200)
    settings = {"policy": {"scarcer": "device", "budget": 0.5, "private": private}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url if private else None, policy="optimal", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        async with daemon.session.get(f"{daemon.root}/disco/v1/plan?tokens=400") as response:
            told = await response.json()
        assert {(plan["device_s"], plan["server_s"]) for plan in (told["plan"], *told["picture"])} == {(0.0, None)}
        for i in range(4):
            assert (await ask(daemon, f"Say yes, {i}.", max_tokens=2)).disco["winner"] == "device"
    assert {row.plan for row in outcomes(tmp_path / "history.sqlite", limit=4)} == {Plan(0.0, math.inf)}
