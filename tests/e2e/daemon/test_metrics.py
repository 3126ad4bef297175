"""/metrics of a real daemon while it works: it parses at any moment, never goes back, and adds up at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

N_REQUESTS, AT_A_TIME, N_TOKENS = 24, 6, 8
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5"  # as Prometheus asks

Samples = dict[tuple[str, ...], float]


async def scrape(daemon: DaemonProcess, accept: str = "") -> list[Metric]:
    async with daemon.session.get(f"{daemon.root}/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        asked = "openmetrics" in accept
        assert response.headers["Content-Type"].startswith("application/openmetrics-text" if asked else "text/plain")
        return list((openmetrics if asked else plain)(await response.text()))


def samples(families: list[Metric]) -> Samples:
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def only_grow(families: list[Metric]) -> Iterator[tuple[str, ...]]:
    for family in families:
        if family.type in ("counter", "histogram"):
            yield from (key for key in samples([family]) if not key[0].endswith("_created"))


async def watch(daemon: DaemonProcess, stop: asyncio.Event) -> int:
    """Scrape in both formats until told to stop; how often."""
    before: Samples = {}
    n = 0
    while not stop.is_set():
        families = await scrape(daemon, OPENMETRICS if n % 2 else "")
        now = samples(families)
        shrunk = [key for key in only_grow(families) if now[key] < before.get(key, 0.0)]
        assert shrunk == []
        before |= now
        n += 1
    return n


async def load(daemon: DaemonProcess) -> None:
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(i: int) -> None:
        async with gate:
            model = ("disco", "disco/device", "disco/server")[i % 3]
            # Words that are a token each for the scripted server and by our count, which "10." is not.
            await ask(daemon, f"Count to {i} please", model=model, max_tokens=N_TOKENS)

    async with asyncio.TaskGroup() as group:
        for i in range(N_REQUESTS):
            group.create_task(one(i))


def summed(found: Samples, name: str, *labels: str) -> float:
    return sum(value for key, value in found.items() if key[0] == name and set(labels) <= set(key))


async def test_metrics_parse_under_load_never_go_back_and_add_up(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": {"n_ctx": 512}, "caps": {"usd_per_day": 1.0}}
    async with (
        Upstream(tokens=N_TOKENS, interval_s=0.005) as upstream,
        running(tmp_path, server=upstream.url, settings=settings) as daemon,
    ):
        await daemon.device_ready()
        stop = asyncio.Event()
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            watching = group.create_task(watch(daemon, stop))
            try:
                await load(daemon)
            finally:
                stop.set()
        assert watching.result() > 2
        async with daemon.session.get(f"{daemon.root}/nowhere") as response:
            assert response.status == 404
        chats = ("handler=/v1/chat/completions", "code=200")
        async with asyncio.timeout(60):  # a request is counted behind the last byte of its stream
            while summed(found := samples(await scrape(daemon)), "disco_http_requests_total", *chats) < N_REQUESTS:
                await asyncio.sleep(0.01)
    assert summed(found, "disco_answers_total", "error=none") == N_REQUESTS
    assert summed(found, "disco_answers_total", "endpoint=device") >= N_REQUESTS / 3
    assert summed(found, "disco_answers_total", "endpoint=server") >= N_REQUESTS / 3
    for name in ("ttft_seconds", "qoe_ratio", "largest_gap_seconds"):
        assert summed(found, f"disco_{name}_count") == N_REQUESTS, name
    delivered = summed(found, "disco_tokens_total", "kind=delivered")
    assert summed(found, "disco_tbt_seconds_count") == delivered - N_REQUESTS
    assert summed(found, "disco_http_requests_total", *chats) == N_REQUESTS
    assert summed(found, "disco_http_requests_total", "handler=other", "code=404") == 1
    assert found[("disco_answers_in_flight",)] == 0
    assert found[("disco_engine_up",)] == 1
    assert found[("disco_engine_restarts_total",)] == 0
    assert 0 < found[("disco_cap_spent_ratio", "cap=usd_per_day")] < 1
    assert summed(found, "disco_loop_lag_seconds_count") > 0
