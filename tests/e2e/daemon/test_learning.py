"""The daemon learns both sides from its own requests, tells what it knows, and keeps it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.upstream import Upstream

# Server asked at once for every prompt, the device after a wait: what "the device is the scarcer side" means.
DEVICE_LIMITED: Mapping[str, Mapping[str, Any]] = {"policy": {"scarcer": "device", "budget": 0.9}}
N_FIRST_FIT = 10  # answers after which the planner fits again


def optimal(folder: Path, upstream: Upstream, settings: Mapping[str, Mapping[str, Any]] = DEVICE_LIMITED) -> Any:
    return running(folder, server=upstream.url, policy="optimal", settings=settings)


async def learned(daemon: DaemonProcess) -> dict[str, Any]:
    known: dict[str, Any] = (await daemon.state())["learned"]
    return known


async def ask_until(daemon: DaemonProcess, n: int) -> list[Heard]:
    """Ask until `n` of the server's times are learned; what was answered.

    What is measured while the daemon itself stood still is not learned, and on a busy machine it does now and then.
    """
    heard, known = list[Heard](), await learned(daemon)
    n_before = known["prompts"]["n"]
    async with asyncio.timeout(60):
        while known["server_ttft"]["n"] < n:
            heard.append(await ask(daemon, "Say yes.", max_tokens=4))
            known = (await daemon.until(lambda s: s["learned"]["prompts"]["n"] >= n_before + len(heard)))["learned"]
    assert heard, "what was to be learned was known before"
    assert known["server_ttft"]["n"] == n
    return heard


async def test_what_was_learned_is_shown_and_survives_a_restart(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        async with optimal(tmp_path, upstream) as daemon:
            n_asked = len(await ask_until(daemon, N_FIRST_FIT))
            known = (await daemon.until(lambda s: s["learned"]["fits"] >= 1))["learned"]
            assert known["server_ttft"]["n"] == N_FIRST_FIT
            assert known["server_ttft"]["censored_share"] == 0
            assert known["prompts"]["n"] == n_asked
            assert known["realised"]["requests"] == n_asked
        async with optimal(tmp_path, upstream) as daemon:
            again = await learned(daemon)
            assert again["server_ttft"] == known["server_ttft"]
            assert again["prompts"] == known["prompts"]


async def test_figures_learned_of_one_server_are_not_believed_of_another(tmp_path: Path) -> None:
    async with Upstream() as one, Upstream() as other:
        async with optimal(tmp_path, one) as daemon:
            await ask_until(daemon, 1)
        async with optimal(tmp_path, other) as daemon:
            assert (await learned(daemon))["server_ttft"]["n"] == 0


async def test_a_server_that_lost_the_race_shows_its_first_token_and_no_more(tmp_path: Path) -> None:
    # How long the device's answer to a question is differs by processor; to this one it goes on to its limit.
    story = "Write a long story about a fox who finds a lantern. Begin with its childhood, and describe each day."
    async with Upstream(tokens=50, interval_s=0.5) as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        lost = asyncio.Event()
        began_at = list[float]()

        def begun(_: Heard) -> None:
            began_at.append(asyncio.get_running_loop().time())
            lost.set()

        with upstream.held_until(lost):
            heard = await ask(daemon, story, max_tokens=200, on_piece=begun)
        assert heard.disco["winner"] == "device"
        assert heard.disco["tokens"]["device"] > 100, "too short for a server's token to come meanwhile"
        server = heard.disco["endpoints"]["server"]
        assert not server["censored"], "its first token came while the answer ran"
        assert server["ttft_s"] >= began_at[0] - upstream.exchanges[0].started_at
        assert server["completion_tokens"] == 1
        assert heard.disco["tokens"]["server"] == 0, "a token of the shadow reached the reader"
        await upstream.wait_closed(0)
        assert upstream.exchanges[0].chunks <= 2
        assert (await learned(daemon))["server_ttft"]["censored_share"] == 0


async def test_without_the_shadow_a_loser_is_stopped_and_its_time_is_a_bound(tmp_path: Path) -> None:
    settings = {"policy": {**DEVICE_LIMITED["policy"], "shadow": False}}
    async with Upstream() as upstream, optimal(tmp_path, upstream, settings) as daemon:
        await daemon.device_ready()
        with upstream.delay(30):
            for heard in await ask_until(daemon, 1):
                assert heard.disco["endpoints"]["server"]["censored"]
        await upstream.wait_closed(0)
        assert (await learned(daemon))["server_ttft"]["censored_share"] == 1


async def test_a_shadow_does_not_hold_up_the_end_of_the_answer(tmp_path: Path) -> None:
    async with Upstream() as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        with upstream.delay(300):
            async with asyncio.timeout(60):
                heard = await ask(daemon, "Name three colours.")
            await upstream.wait_closed(0)
        assert heard.disco["winner"] == "device"
        assert heard.disco["endpoints"]["server"]["censored"]


async def test_a_server_that_asks_to_be_left_alone_is(tmp_path: Path) -> None:
    async with Upstream() as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        with upstream.status(429, headers={"Retry-After": "60"}):
            await ask(daemon, "Say yes.", max_tokens=4)
            state = await daemon.state()
            n_asked = len(upstream.exchanges)
            heard = await ask(daemon, "Say yes.", max_tokens=4)
        assert 50 < state["endpoints"]["server"]["down_s"] <= 60
        assert heard.disco["plan"] == {"device_s": 0.0, "server_s": None, "hedge_s": None}
        assert list(heard.disco["endpoints"]) == ["device"]
        assert len(upstream.exchanges) == n_asked


async def test_a_server_that_fails_is_left_alone_and_is_back_when_it_answers(tmp_path: Path) -> None:
    async with Upstream() as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        with upstream.status(500):
            for _ in range(3):
                heard = await ask(daemon, "Say yes.", max_tokens=4)
                assert heard.disco["winner"] == "device", "a failure is none of the answer"
            server = (await daemon.state())["endpoints"]["server"]
            assert (server["breaker"]["why"], server["down_s"] is not None) == ("server_error", True)
        assert server["breaker"]["state"] in ("open", "half_open"), "the back-off may be over on a busy machine"
        await daemon.until(lambda s: not s["endpoints"]["server"]["down_s"])
        assert (await ask(daemon, "Say yes.", model="disco/server", max_tokens=4)).disco["winner"] == "server"
        assert (await daemon.state())["endpoints"]["server"]["breaker"]["state"] == "closed"
        with upstream.status(401):
            await ask(daemon, "Say yes.", max_tokens=4)
            n_asked = len(upstream.exchanges)
            heard = await ask(daemon, "Say yes.", max_tokens=4)
            assert (list(heard.disco["endpoints"]), len(upstream.exchanges)) == (["device"], n_asked)
        state = await daemon.state()
        assert state["endpoints"]["server"]["breaker"] == {"state": "open", "why": "unauthorized", "until_s": None}
        async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as reply:
            assert reply.status == 200
        heard = await ask(daemon, "Say yes.", max_tokens=4)
        assert "server" in heard.disco["endpoints"]


async def test_times_across_a_stop_of_the_daemon_are_not_learned_from(tmp_path: Path) -> None:
    async with Upstream() as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        pid = (await daemon.state())["pid"]
        stopped = asyncio.Event()
        with upstream.held_until(stopped):
            answer = asyncio.create_task(ask(daemon, "Summarise. " + "Once upon a time. " * 300, max_tokens=4))
            await upstream.wait_request(0)
            os.kill(pid, signal.SIGSTOP)  # as a debugger would, or a full machine
            stopped.set()
            await asyncio.sleep(1.0)  # the stall itself
            os.kill(pid, signal.SIGCONT)
            await answer
        assert (await learned(daemon))["server_ttft"]["n"] == 0
        await ask_until(daemon, 1)


async def test_plan_tells_what_would_be_done_and_why(tmp_path: Path) -> None:
    async with Upstream() as upstream, optimal(tmp_path, upstream) as daemon:
        await daemon.device_ready()
        told = json.loads(await disco("plan", "--tokens", "120", "--json", "--url", daemon.root))
        assert told["tokens"] == 120
        assert told["plan"]["server_s"] == 0
        assert told["plan"]["device_s"] >= 0
        assert told["learned"]["constrained"] == "device"
        assert {row["tokens"] for row in told["picture"]} >= {4}
        shown = await disco("plan", "--tokens", "120", "--url", daemon.root)
        for word in ("server starts at once", "device-constrained", "T_d", "b = 0.9", "w(l), s"):
            assert word in shown
        bad = await daemon.session.get(f"{daemon.root}/disco/v1/plan?tokens=0")
        assert bad.status == 400
        assert "tokens must be between 1" in (await bad.json())["error"]["message"]


async def disco(*argv: str) -> str:
    """Run the command line; its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *argv, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()


async def test_by_default_the_daemon_learns_and_without_a_server_the_device_answers_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, policy="optimal") as daemon:
        await daemon.device_ready()
        for _ in range(2):
            heard = await ask(daemon, "Say yes.", max_tokens=4)
            assert heard.disco["plan"] == {"device_s": 0.0, "server_s": None, "hedge_s": None}
        known = await learned(daemon)
        assert known["policy"] == "optimal"
        assert known["device_ttft"]["n"] == 2
        assert known["server_ttft"]["n"] == 0


async def test_an_answer_that_the_client_has_begun_is_a_part_of_the_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, policy="optimal") as daemon:
        await daemon.device_ready()
        begun = "Once upon a time there was a king who had three sons, and each of them was wiser than he"
        asked = {"role": "user", "content": "Tell me a story."}
        lengths = []
        cases: list[tuple[Any, dict[str, bool]]] = [
            ([asked], {}),
            ([asked, {"role": "assistant", "content": begun}], {"continue_final_message": True}),
        ]
        for messages, more in cases:
            answer = await daemon.client.chat.completions.create(
                model="disco/device", messages=messages, max_tokens=2, extra_body=more
            )
            lengths.append((answer.model_extra or {})["disco"]["prompt_tokens"])
            assert answer.usage is not None
            # What was planned with is what was read; the last token of what was begun is drawn again.
            assert answer.usage.prompt_tokens == pytest.approx(lengths[-1], abs=1)
        assert lengths[1] - lengths[0] >= len(begun.split())
