"""A real daemon with the embedded model beside a paid server, as somebody has it who has set nothing else.

The server is scripted, and its answers can be told from the device's. It has the name and the price of a real service.
The prompts are 175 instructions that people wrote, the seed tasks of Self-Instruct (Apache-2.0), 25 of them again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.config.pricelist import load
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.upstream import Upstream

INSTRUCTIONS = Path(__file__).parents[2] / "fixtures" / "instructions.jsonl"
N_PROMPTS = 200
SERVICES = (
    ("https://api.openai.com/v1", "gpt-4o-mini"),
    ("https://api.anthropic.com/v1", "claude-haiku-4-5"),
    ("https://api.mistral.ai/v1", "mistral-small-2603"),
)
GRADED = "This is the server's answer."
N_TOKENS = 8


def prompts() -> list[str]:
    read = [json.loads(line)["prompt"] for line in INSTRUCTIONS.read_text("utf-8").splitlines()]
    return list(islice(cycle(read), N_PROMPTS))


def priced(base_url: str, model: str) -> dict[str, Any]:
    """The settings of a server that costs what a real service does."""
    price = load().price(base_url, model)
    assert price.known, (base_url, model)
    return {"model": model, "input_usd_per_mtok": price.input, "output_usd_per_mtok": price.output}


@asynccontextmanager
async def default_daemon(
    folder: Path, upstream: Upstream, server: Mapping[str, Any], **more: Mapping[str, Any]
) -> AsyncIterator[DaemonProcess]:
    """A daemon whose ways to race, to move and to choose are as they come."""
    settings = {"server": server, "handoff": {"for_cost": True}, **more}
    async with running(folder, server=upstream.url, policy="optimal", settings=settings, unequal="stand-in") as daemon:
        await daemon.device_ready()
        yield daemon


def by_device(heard: Heard) -> int:
    count: int = heard.disco["tokens"]["device"]
    return count


@pytest.mark.parametrize(("base_url", "model"), SERVICES, ids=[model for _, model in SERVICES])
async def test_nearly_all_that_is_read_is_the_servers_whatever_it_costs(
    tmp_path: Path, base_url: str, model: str
) -> None:
    which = [name for _, name in SERVICES].index(model)
    mine = prompts()[which :: len(SERVICES)]
    async with Upstream() as upstream, default_daemon(tmp_path, upstream, priced(base_url, model)) as daemon:
        n_all = n_own = 0
        with upstream.answering(GRADED):
            for prompt in mine:
                heard = await ask(daemon, prompt, max_tokens=N_TOKENS)
                n_all += len(heard.text)
                n_own += len(GRADED) if heard.text == GRADED and not by_device(heard) else 0
        assert n_own >= 0.99 * n_all > 0
        state = await daemon.state()
    assert state["grades"]["stand_in"] == "device"
    assert state["grades"]["device"]["reason"] == "from its file: 135M parameters, Q4_1"
    assert heard.disco["reason"] == "grade"
    assert heard.disco["stand_in"]["why"].startswith("This machine's model is a stand-in")


async def test_offline_capped_pinned_or_cut_off_in_mid_answer_the_device_answers_and_that_is_said(
    tmp_path: Path,
) -> None:
    async with Upstream() as upstream, default_daemon(tmp_path, upstream, priced(*SERVICES[0])) as daemon:
        async with upstream.refuse():
            heard = await ask(daemon, "Say yes.", max_tokens=N_TOKENS)
            assert (heard.disco["winner"], heard.disco["reason"]) == ("device", "failure")
            assert heard.disco["stand_in"]["side"] == "device"
        pinned = await ask(daemon, "Say yes.", model="disco/device", max_tokens=N_TOKENS)
        assert (pinned.disco["winner"], pinned.disco["reason"]) == ("device", "route")
        with upstream.cut_after(3):
            heard = await ask(daemon, "Say yes and no and then something else.", max_tokens=N_TOKENS)
        assert heard.disco["winner"] == "server"
        assert [(move["target"], move["reason"]) for move in heard.disco["moves"]] == [("device", "failure")]
        assert by_device(heard) > 0
        body = {"caps.usd_per_day": 0.0}
        async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
            assert response.status == 200, await response.text()
        n_asked = len(upstream.exchanges)
        heard = await ask(daemon, "Say yes.", max_tokens=N_TOKENS)
        assert (heard.disco["winner"], heard.disco["reason"]) == ("device", "only")
        assert len(upstream.exchanges) == n_asked


async def test_what_the_user_says_of_the_grades_counts_from_the_next_answer_on(tmp_path: Path) -> None:
    async with Upstream() as upstream, default_daemon(tmp_path, upstream, priced(*SERVICES[0])) as daemon:
        with upstream.answering(GRADED):
            assert (await ask(daemon, "Say yes.", max_tokens=N_TOKENS)).text == GRADED
            body = {"device.grade": 80, "server.grade": 20}
            async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
                assert response.status == 200, await response.text()
            heard = await ask(daemon, "Say yes.", max_tokens=N_TOKENS)
        assert (heard.disco["winner"], heard.disco["reason"]) == ("device", "grade")
        assert heard.disco["stand_in"]["side"] == "server"
        async with daemon.controls.get(f"{daemon.root}/disco/v1/plan?tokens=50") as response:
            planned = await response.json()
        assert planned["plan"]["device_s"] == 0
        assert planned["plan"]["server_s"] != 0
        assert "set by you" in planned["grades"]["why"]
