"""`policy.private`: nothing leaves this machine, whatever a request says. And the tail's knobs, turned in passing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from disco_daemon.bench.child import BenchError
from disco_daemon.config.layers import load
from tests.e2e.cli.test_cli import disco
from tests.e2e.cli.test_doctor import doctor
from tests.e2e.daemon.test_money import change
from tests.e2e.daemon.test_whatif import remembered, whatif
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

HELLO = "Tell me about lighthouses."
PATIENCE_S = 60.0
PRIVATE: dict[str, Any] = {"policy": {"private": True}}


async def models(daemon: DaemonProcess) -> set[str]:
    return {card.id for card in (await daemon.client.models.list()).data}


async def health(daemon: DaemonProcess) -> dict[str, Any]:
    async with daemon.session.get(f"{daemon.root}/health") as response:
        found: dict[str, Any] = await response.json()
    return found


@asynccontextmanager
async def trap() -> AsyncIterator[tuple[str, list[object]]]:
    """The address of a server that nobody should call, and who did: a connection is too much."""
    callers: list[object] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", callers


async def test_a_private_daemon_asks_the_server_nothing(tmp_path: Path) -> None:
    settings = PRIVATE | {"server": {"probe": True}, "device": {"spill_gib": 0.1, "spill_after_s": 0.0}}
    async with (
        trap() as (url, callers),
        running(tmp_path, server=url, policy="all-server", settings=settings) as daemon,
    ):
        assert (await health(daemon))["endpoints"]["server"] is False
        await daemon.device_ready()
        heard = [await ask(daemon, f"{HELLO * 8} {i}", max_tokens=6) for i in range(3)]
        assert all(list(one.disco["endpoints"]) == ["device"] for one in heard)
        await daemon.client.completions.create(model="disco", prompt="Once", max_tokens=3)
        await daemon.client.embeddings.create(model="disco", input="a lamp")
        assert "disco/server" not in await models(daemon)
        assert (await daemon.state())["private"] is True
        for model, route in (("disco/server", None), ("disco", "server")):
            with pytest.raises(openai.PermissionDeniedError, match=r"policy\.private") as refused:
                await daemon.client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": HELLO}],
                    max_tokens=3,
                    extra_body={"disco": {"route": route}},
                )
            assert refused.value.code == "private"
        assert callers == [], "not even a connection"
    assert list((tmp_path / "disco" / "kv").glob("*.kv")) == [], "nor is it on disk"


async def test_it_is_turned_on_and_off_while_the_daemon_runs(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, policy="all-server") as daemon:
        await daemon.device_ready()
        assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "server"
        said = await change(daemon, policy__private=True)
        assert said["needs_restart"] == []
        assert load(tmp_path / "config.toml", {}).policy.private
        assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "device"
        assert upstream.n_requests == 1
        await change(daemon, policy__private=False)
        assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "server"
        assert "disco/server" in await models(daemon)


@pytest.mark.parametrize("private", [False, True])
async def test_an_answer_that_is_running_starts_no_server_any_more(tmp_path: Path, private: bool) -> None:
    async with Upstream() as here, Upstream() as away:
        settings: dict[str, Any] = {
            "device": {"base_url": here.url, "model": "here"},
            "server": {"continuation": "continue_final_message"},
            "handoff": {"stall_s": 60.0},
        }
        async with running(tmp_path, server=away.url, device=None, policy="all-device", settings=settings) as daemon:
            begun = asyncio.Event()
            with here.stall_after(3):
                answer = asyncio.create_task(ask(daemon, HELLO, on_piece=lambda heard: begun.set()))
                await asyncio.wait_for(begun.wait(), PATIENCE_S)
            await change(daemon, policy__private=private)
            async with here.refuse():  # the device breaks: the server would go on
                if private:
                    with pytest.raises(openai.APIError):
                        await answer
                else:
                    assert (await answer).finish_reason == "stop"
            assert away.n_requests == (0 if private else 1)


async def test_a_probe_that_is_under_way_is_ended(tmp_path: Path) -> None:
    settings = {"server": {"probe": True}}
    async with (
        Upstream(interval_s=0.1) as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        answer = asyncio.create_task(ask(daemon, HELLO, max_tokens=4))
        await upstream.wait_request(0)
        with upstream.hang():  # all that comes behind the answer: the probe's first question
            assert (await answer).disco["winner"] == "server"
            await upstream.wait_request(1)
            await change(daemon, policy__private=True)
            await upstream.wait_closed(1)
        assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "device"
        assert upstream.n_requests == 2
        assert (await daemon.state())["endpoints"]["server"]["probed"] is None


async def test_a_check_of_a_server_asks_nobody_and_says_so(tmp_path: Path) -> None:
    """What F5 does in the terminal UI; also where the switch is turned between its two questions."""
    async with trap() as (url, callers), running(tmp_path, settings=PRIVATE) as daemon:

        async def checked(base_url: str) -> dict[str, Any]:
            wish = {"base_url": base_url, "api_key": "k", "model": "m"}
            async with daemon.controls.post(f"{daemon.root}/disco/v1/server/check", json=wish) as response:
                assert response.status == 200, await response.text()
                found: dict[str, Any] = await response.json()
            return found

        found = await checked(url)
        assert (found["ok"], found["problem"]["code"]) == (False, "private")
        assert "policy.private" in found["problem"]["text"]
        assert callers == []
        await change(daemon, policy__private=False)
        assert (await checked(url))["problem"]["code"] != "private"
        assert callers


async def test_setup_and_doctor_ask_nobody_either_unless_they_are_told_to(tmp_path: Path) -> None:
    env = {"DISCO_POLICY_PRIVATE": "true", "DISCO_API_PORT": "9"}
    async with trap() as (url, callers):
        code, out, err = await disco("setup", "--server", url, "--model", "m", home=tmp_path, env=env)
        assert (code, out) == (1, "")
        assert "policy.private" in err
        assert "--no-test" in err
        code, _, err = await disco("setup", "--server", url, "--model", "m", "--no-test", home=tmp_path, env=env)
        assert (code, err) == (0, "")
        server = {"DISCO_POLICY_PRIVATE": "true", "DISCO_SERVER_BASE_URL": url, "DISCO_SERVER_MODEL": "m"}
        found = await doctor(tmp_path, env=server)
        assert "policy.private" in found["network"]["found"]
        assert "server model" not in found
        assert callers == []
        found = await doctor(tmp_path, "--online", code=1, env=server)
        assert "server model" in found
        assert callers


async def test_without_a_device_it_cannot_be_wished_for(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        with pytest.raises(BenchError, match=r"policy\.private keeps every request on this machine"):
            async with running(tmp_path / "a", server=upstream.url, device=False, settings=PRIVATE):
                pass
        async with running(tmp_path / "b", server=upstream.url, device=False) as daemon:
            before = (tmp_path / "b" / "config.toml").read_text()
            error = (await change(daemon, 400, policy__private=True, policy__budget=0.25))["error"]
            assert (error["code"], "device.enabled = true" in error["message"]) == ("invalid_setting", True)
            assert (tmp_path / "b" / "config.toml").read_text() == before
            assert (await ask(daemon, HELLO, max_tokens=4)).disco["winner"] == "server"


@pytest.mark.parametrize(("policy", "knob", "value"), [("paper", "alpha", 0.45), ("optimal", "kappa", 10.0)])
async def test_the_tails_knob_is_taken_up_at_once(tmp_path: Path, policy: str, knob: str, value: float) -> None:
    remembered(tmp_path, 200)
    settings = {"policy": {"scarcer": "device", "budget": 0.5}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy=policy, settings=settings) as daemon,
    ):
        await daemon.device_ready()  # its loading is part of a plan

        async def waits() -> list[Any]:
            async with daemon.session.get(f"{daemon.root}/disco/v1/plan?tokens=400") as response:
                return [point["device_s"] for point in (await response.json())["picture"]]

        before, usual = await waits(), await whatif(daemon, "rate=1&budget=0.5")
        foreseen = await whatif(daemon, f"rate=1&budget=0.5&{knob}={value}")
        assert foreseen["p99_ttft_s"] != usual["p99_ttft_s"]
        assert (await whatif(daemon, "rate=1&budget=0.5&alpha=1.5", 400))["error"]["param"] == "alpha"
        assert await waits() == before, "asking changes nothing"
        assert (await change(daemon, 200, **{f"policy__{knob}": value}))["needs_restart"] == []
        assert await waits() != before
        assert await whatif(daemon, "rate=1&budget=0.5") == foreseen
        assert getattr(load(tmp_path / "config.toml", {}).policy, knob) == value
