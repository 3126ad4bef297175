"""Hosts under pressure: an owner allows less memory while eight answers are drawn, and answers that are late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from disco_daemon.models.default import default_model_path
from tests.e2e.cli.test_cli import disco
from tests.e2e.machines.test_fleet import PROMPTS
from tests.fixtures.daemon import PATIENCE_S, DaemonProcess, ask, running
from tests.fixtures.machines import LendingMachine, fleet_home, folders, lending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

RELIEVED_S = 30.0  # in which a host has to have no more than its owner allows
GIB = 2**30
ASKED = [f"{prompt} {more}" for prompt in PROMPTS for more in ("Be brief.", "Be kind.")]  # eight


async def eight_answers(daemon: DaemonProcess, n: int = 16) -> list[str]:
    return [one.text for one in await asyncio.gather(*(ask(daemon, prompt, max_tokens=n) for prompt in ASKED))]


@asynccontextmanager
async def readers(daemon: DaemonProcess, expected: list[str], n: int = 16) -> AsyncIterator[list[int]]:
    """Eight answers at a time, again and again, all as expected; the list has an item for each eight that ended."""
    rounds = list[int]()

    async def go_on() -> None:
        while True:
            assert await eight_answers(daemon, n) == expected
            rounds.append(len(rounds))

    going = asyncio.create_task(go_on())
    try:
        yield rounds
        if going.done():
            going.result()
        n = len(rounds)
        async with asyncio.timeout(PATIENCE_S):
            while len(rounds) == n and not going.done():  # those under way end as expected as well
                await asyncio.sleep(0.05)
    finally:
        going.cancel()
        with suppress(asyncio.CancelledError):
            await going


async def fleet_of(daemon: DaemonProcess) -> dict[str, Any]:
    async with daemon.controls.get(f"{daemon.root}/disco/v1/fleet") as response:
        found: dict[str, Any] = await response.json()
        return found


def taken(attic: LendingMachine) -> int:
    """Return the most memory that one of a machine's hosts has, bytes."""
    found = [0]
    for process in attic.hosts():
        with suppress(psutil.Error):
            found.append(int(process.memory_info().rss))
    return max(found)


async def allow(attic: Path, *words: str) -> str:
    code, out, err = await disco("machines", "join", *words, home=attic, env=folders(attic))
    assert code == 0, err
    return out


@pytest.mark.timeout(600)
async def test_a_machine_that_may_have_less_memory_has_no_more_within_30_s_and_no_word_changes(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "fleet": {"enabled": True, "hosts": 0, "cuts": [5, 22]},
        "device": {"n_ctx": 512, "n_cells": 32768},  # 28 MB a layer, with its cells
    }
    async with fleet_home(tmp_path / "home", settings) as home:
        daemon = home.daemon
        async with lending(tmp_path / "attic", await home.code()) as attic:
            await home.until_member(lambda one: one["connected"])
            await daemon.device_ready()
            async with asyncio.timeout(2 * PATIENCE_S):
                while not any(one["lent"] for one in await home.members()):
                    await ask(daemon, PROMPTS[0], max_tokens=8)
            expected = await eight_answers(daemon)
            assert taken(attic) > 0.5 * GIB
            async with readers(daemon, expected) as rounds:
                out = await allow(tmp_path / "attic", "--memory", "0.5")
                allowed_at, n_before = time.monotonic(), len(rounds)
                assert "1 thread, 0.5 GiB of memory" in out, "what is not said stays as it was"
                seen = list[int]()
                async with asyncio.timeout(RELIEVED_S):
                    while taken(attic) > 0.5 * GIB or not seen or seen[-1]:
                        [_, host] = (await fleet_of(daemon))["hosts"]
                        if host["excess_bytes"] or seen:
                            seen.append(host["excess_bytes"])
                        assert taken(attic) < 0.8 * GIB, "nothing is loaded beside what has to leave"
                        await asyncio.sleep(0.2)  # nothing tells that a host has less
                assert max(seen) > 100e6
                assert time.monotonic() - allowed_at < RELIEVED_S

                async with asyncio.timeout(3 * PATIENCE_S):  # a part of them comes back, which is the same step
                    while not (found := await fleet_of(daemon))["last_steps"] or len(rounds) < n_before + 2:
                        assert taken(attic) < 0.5 * GIB
                        await asyncio.sleep(0.2)
                assert {step["kind"] for step in found["last_steps"]} == {"move"}
                assert "more than its owner allows" in found["last_steps"][0]["why"]
                layers = [last - first for host in found["hosts"] for first, last in ranges(host)]
                assert sum(layers) == 30
                assert 0 < sum(last - first for first, last in ranges(found["hosts"][1])) < 17

                await allow(tmp_path / "attic", "--memory", "0", "--cpus", "2")
                async with asyncio.timeout(PATIENCE_S):
                    while (one := (await home.members())[0])["n_threads"] != 2 or one["memory_bytes"]:
                        await asyncio.sleep(0.1)
                assert all(host["excess_bytes"] == 0 for host in (await fleet_of(daemon))["hosts"])
            code, _, err = await disco("machines", "join", home=tmp_path / "attic", env=folders(tmp_path / "attic"))
            assert code == 1
            assert "lends hosts already" in err


def ranges(host: dict[str, Any]) -> list[tuple[int, int]]:
    return [(one["first"], one["last"]) for one in host["segments"]]


LONG = 96  # tokens: the engine tells once a second what it does, and such answers take longer
# A step has its effect soon here, and may be undone soon: all else is as it is.
SOON = """
from disco_daemon.fleet import control
control.COOLDOWN_S = 1.0
control.NO_REVERSAL_S = 10.0
"""


@pytest.mark.timeout(600)
async def test_where_nothing_can_be_moved_fewer_answers_run_until_it_is_calm_also_while_paused(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "device": {"n_ctx": 512, "n_cells": 4096},
        "fleet": {"enabled": True, "hosts": 1, "cuts": [5, 22], "mode": "auto"},
        "delivery": {"expected_ttft_s": 0.001},  # so every answer is late
    }
    async with running(tmp_path, policy="all-device", settings=settings, before=SOON) as daemon:
        await daemon.device_ready()
        expected = await eight_answers(daemon, LONG)
        code, _, err = await disco("fleet", "drain", "local-1", "--url", daemon.root, home=tmp_path)
        assert code == 0, err
        async with readers(daemon, expected, LONG):

            async def until_done(*kinds: str) -> list[dict[str, Any]]:
                async with asyncio.timeout(3 * PATIENCE_S):
                    while True:
                        found = await fleet_of(daemon)
                        done = [step for step in found["last_steps"] if step["kind"] in kinds]
                        if {step["kind"] for step in done} == set(kinds):
                            return done
                        await asyncio.sleep(0.1)

            steps = await until_done("lower_batch", "offload")
            assert all("phase 3" in step["why"] for step in steps)
            await until_swapped(daemon)
            code, _, err = await disco("fleet", "pause", "--url", daemon.root, home=tmp_path)
            assert code == 0, err
            body = {"delivery.expected_ttft_s": 600.0, "fleet.slo_qoe": 0.0}
            async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
                assert response.status == 200, await response.text()
            [*_, last] = await until_done("raise_batch")
            assert "calm" in last["why"]
            assert (await fleet_of(daemon))["paused"]
            await daemon.until(lambda s: stats_of(s)["running"] == len(ASKED), timeout_s=3 * PATIENCE_S)


def stats_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["endpoints"]["device"]["engine"] or {"swapped": 0, "running": 0}
    return found


async def until_swapped(daemon: DaemonProcess) -> None:
    """Wait until answers that wait have left the KV cache."""
    await daemon.until(lambda s: stats_of(s)["swapped"] > 0, timeout_s=PATIENCE_S)
