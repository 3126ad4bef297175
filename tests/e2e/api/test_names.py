"""Aliases, wishes for a side, and what the headers tell, by a real daemon with a device and a server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.models.default import default_model_path
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS = {"api": {"aliases": {"claude-*": "disco", "gpt-4o": "disco/server"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("d")
    async with running(folder, server=upstream.url, policy="all-device", settings=SETTINGS) as started:
        await started.device_ready()
        yield started


async def told(daemon: DaemonProcess, model: str = "disco", **more: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """The headers of an answer in one body, and that body."""
    body = {"model": model, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4} | more
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        found = await response.json()
        assert response.status == 200, found
        return dict(response.headers), found


@pytest.mark.parametrize(
    ("model", "route", "side", "reason"),
    [
        ("disco", None, "device", "plan"),
        ("gpt-4o", None, "server", "route"),
        ("claude-sonnet-4-5", None, "device", "plan"),
        ("claude-sonnet-4-5", "prefer-server", "server", "route"),
        ("disco", "prefer-device", "device", "route"),
    ],
)
async def test_a_name_and_a_wish_lead_to_a_side_and_each_header_is_a_word_of_the_answer(
    model: str, route: str | None, side: str, reason: str, daemon: DaemonProcess
) -> None:
    headers, body = await told(daemon, model, disco={"route": route})
    disco = body["disco"]
    assert body["model"] == model, "as the client called it"
    assert (disco["winner"], disco["reason"]) == (side, reason)
    assert list(disco["endpoints"]) == [side], "nobody else was asked"
    assert headers["X-Disco-Route"] == side
    assert headers["X-Disco-Reason"] == reason
    assert headers["X-Disco-Model"] == disco["endpoints"][side]["model"]
    assert float(headers["X-Disco-Ttft-Ms"]) == pytest.approx(disco["ttft_s"] * 1000, abs=0.06)
    assert float(headers["X-Disco-Cost-Usd"]) == pytest.approx(disco["cost_usd"], abs=1e-12)


async def test_a_stream_has_them_in_its_head_as_far_as_they_are_known(daemon: DaemonProcess) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "one two"}], "stream": True}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        assert (response.headers["X-Disco-Model"], response.headers["X-Disco-Reason"]) == ("loopback", "route")
        assert "X-Disco-Cost-Usd" not in response.headers
        assert b'"reason":"route"' in await response.read()


async def test_the_other_side_takes_over_where_the_preferred_one_fails(
    daemon: DaemonProcess, upstream: Upstream
) -> None:
    with upstream.status(500):
        headers, body = await told(daemon, disco={"route": "prefer-server"})
    assert (headers["X-Disco-Route"], headers["X-Disco-Reason"]) == ("device", "failure")
    assert body["disco"]["endpoints"]["server"]["error"]


async def test_a_limit_of_the_cost_keeps_the_server_out_and_is_an_error_where_nobody_is_left(
    daemon: DaemonProcess, upstream: Upstream
) -> None:
    before = len(upstream.exchanges)
    headers, body = await told(daemon, disco={"route": "prefer-server", "max_cost_usd": 1e-9})
    assert (headers["X-Disco-Route"], body["disco"]["reason"]) == ("device", "only")
    dear = {"model": "gpt-4o", "messages": [{"role": "user", "content": "x"}], "disco": {"max_cost_usd": 1e-9}}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=dear) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "max_cost_reached")
    assert len(upstream.exchanges) == before
    _, body = await told(daemon, "gpt-4o", max_tokens=None, disco={"max_cost_usd": 0.001})
    assert 0 < body["disco"]["server_usd"] <= 0.001
    assert 0 < upstream.exchanges[-1].body["max_tokens"] < 2000


async def test_a_wish_that_is_none_is_refused_with_those_there_are(daemon: DaemonProcess) -> None:
    body = {"model": "disco", "messages": [{"role": "user", "content": "x"}], "disco": {"route": "prefer-cloud"}}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "disco.route")


async def test_the_models_have_dates_and_the_device_its_context(daemon: DaemonProcess) -> None:
    cards = {card.id: card async for card in daemon.client.models.list()}
    assert {"disco", "disco/device", "disco/server", "loopback", "claude-*", "gpt-4o"} <= set(cards)
    assert cards["disco/device"].created == int(default_model_path().stat().st_mtime)
    assert time.time() - 3600 < cards["gpt-4o"].created <= time.time()
    assert (cards["disco/device"].model_extra or {})["context_length"] == 8192
    assert (await daemon.client.models.retrieve("claude-opus-9")).id == "claude-opus-9"
