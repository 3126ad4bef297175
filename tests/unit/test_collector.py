"""Full collections wait until nobody does: each stops every stream for as long as it takes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from disco_daemon.cli import running
from disco_daemon.cli.running import collect_at_leisure

pytestmark = pytest.mark.skipif(gc.get_threshold()[2] == 0, reason="a collector that walks nothing in full")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The full collections that are made, as they are."""
    seen: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append("full")

    monkeypatch.setattr(running, "COLLECT_S", 0.001)
    gc.callbacks.append(told)
    yield seen
    gc.callbacks.remove(told)


async def test_a_full_collection_waits_until_nobody_is_answered(full: list[str]) -> None:
    before, n_waiting = gc.get_threshold(), 1
    task = asyncio.ensure_future(collect_at_leisure(lambda: n_waiting))
    try:
        await asyncio.sleep(0)
        full.clear()
        for _ in range(30):
            gc.collect(1)
        await asyncio.sleep(0.02)
        assert full == []
        n_waiting = 0
        until = time.monotonic() + 5
        while not full and time.monotonic() < until:
            await asyncio.sleep(0.001)
        assert full == ["full"]
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert gc.get_threshold() == before


async def test_it_does_not_wait_for_ever(full: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "COLLECT_AT_LATEST_S", 0.01)
    task = asyncio.ensure_future(collect_at_leisure(lambda: 500))
    try:
        await asyncio.sleep(0)
        for _ in range(30):
            gc.collect(1)
        until = time.monotonic() + 5
        while not full and time.monotonic() < until:
            await asyncio.sleep(0.001)
        assert full
    finally:
        task.cancel()
        await asyncio.wait([task])
