"""Collections wait until nobody does: each stops every stream for as long as it takes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from disco_daemon.daemon import lifecycle
from disco_daemon.daemon.lifecycle import collect_at_leisure


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The full collections that are made, as they are."""
    seen: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append("full")

    monkeypatch.setattr(lifecycle, "COLLECT_S", 0.001)
    monkeypatch.setattr(lifecycle, "COLLECT_FROM", 100)
    gc.callbacks.append(told)
    yield seen
    gc.callbacks.remove(told)


def litter(n: int = 300) -> None:
    """Cycles that nobody reaches, and enough new objects for a look."""
    for _ in range(n):
        cycle: list[object] = []
        cycle.append(cycle)


async def test_a_collection_waits_until_nobody_is_answered(full: list[str]) -> None:
    was_enabled, n_waiting = gc.isenabled(), 1
    task = asyncio.ensure_future(collect_at_leisure(lambda: n_waiting))
    try:
        await asyncio.sleep(0)
        assert not gc.isenabled()  # young objects are walked for next to nothing, too
        full.clear()
        litter()
        await asyncio.sleep(0.02)
        assert full == []
        n_waiting = 0
        await until_one(full)
        assert full == ["full"]
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert gc.isenabled() is was_enabled


async def test_it_does_not_wait_for_ever(full: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "COLLECT_AT_LATEST_S", 0.01)
    monkeypatch.setattr(lifecycle, "COLLECT_SHARE", 1.0)
    task = asyncio.ensure_future(collect_at_leisure(lambda: 500))
    try:
        await asyncio.sleep(0)
        litter()
        await until_one(full)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_one(full: list[str]) -> None:
    """Wait for a collection. Raises TimeoutError."""
    async with asyncio.timeout(5):
        while not full:
            await asyncio.sleep(0.001)
