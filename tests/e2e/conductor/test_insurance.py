"""A real daemon whose server turns slow or silent while the device's budget is used up: the device answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.upstream import Upstream

LIMITED: Mapping[str, Mapping[str, Any]] = {"policy": {"scarcer": "device", "budget": 0.02}}
N_QUICK = 24  # answers of the server, so that it is known what it is like
SLOW_S = 6.0


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        yield upstream


async def use_up(daemon: DaemonProcess, upstream: Upstream) -> None:
    """Quick answers of the server, and so many of the device that its budget has nothing left."""
    n = 0
    with upstream.delay(0.05):
        while (await daemon.state())["learned"]["server_ttft"]["silence_s"] is None or n < N_QUICK:
            await ask(daemon, "Say yes.", max_tokens=2)
            n += 1
    for i in range(8):  # each of its own: what is in the KV cache is not computed again
        await ask(daemon, f"{i}. " + "Say yes. " * 40, model="disco/device", max_tokens=2)
    told = (await daemon.until(lambda s: s["learned"]["realised"]["requests"] >= n + 8))["learned"]
    assert told["realised"]["last_200"] > 0.1, "or the budget is not used up"
    assert told["server_ttft"]["silence_s"] < 3.0


def waited(heard: Heard) -> float:
    """How long the reader waited beyond what the device itself took, s."""
    ttft: float = heard.disco["ttft_s"] - heard.disco["endpoints"]["device"]["ttft_s"]
    return ttft


@pytest.mark.parametrize(
    "turns", [lambda upstream: upstream.delay(SLOW_S), lambda upstream: upstream.hang()], ids=["slow", "silent"]
)
async def test_when_the_server_turns_slow_or_silent_the_device_answers_within_a_second_and_its_own_time(
    tmp_path: Path, upstream: Upstream, turns: Callable[[Upstream], AbstractContextManager[None]]
) -> None:
    async with running(tmp_path, server=upstream.url, policy="optimal", settings=LIMITED) as daemon:
        await daemon.device_ready()
        await use_up(daemon, upstream)
        patience_s = (await daemon.state())["learned"]["server_ttft"]["silence_s"]
        before = (await daemon.state())["learned"]["realised"]["ratio"]
        with turns(upstream):
            late_s, waited_s, n_left_alone = [], [], 0
            for _ in range(4):
                server = (await daemon.state())["endpoints"]["server"]
                heard = await ask(daemon, "Say yes.", max_tokens=4)
                assert heard.disco["winner"] == "device"
                due_s = patience_s
                if "server" not in heard.disco["endpoints"]:
                    assert server["breaker"]["state"] == "open", "or it would be asked"
                    due_s, n_left_alone = 0.0, n_left_alone + 1
                late_s.append(heard.disco["endpoints"]["device"]["started_s"] - due_s)
                waited_s.append(waited(heard))
            assert min(late_s) >= -0.4
            assert sorted(late_s)[2] <= 0.4, "a busy machine may hold up one of four"
            assert sorted(waited_s)[2] <= patience_s + 0.5
            assert n_left_alone <= 2, "one silence is not enough to leave it alone"
        after = await daemon.until(lambda s: s["learned"]["server_ttft"]["availability"] < 0.99)
        assert after["learned"]["realised"]["ratio"] != before, "what it cost is booked"
        assert after["learned"]["server_ttft"]["silence_s"] == patience_s, "and what was not heard is not usual now"
