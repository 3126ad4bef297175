"""Collections wait until nobody does: each stops every stream for as long as it takes."""

from __future__ import annotations

import asyncio
import gc
import platform
from collections.abc import Iterator

import psutil
import pytest

from disco_daemon.daemon.tasks import collector
from disco_daemon.daemon.tasks.collector import collect_at_leisure, free_memory_returner, longest_wait_s


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The full collections that are made, as they are."""
    seen: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append("full")

    monkeypatch.setattr(collector, "COLLECT_S", 0.001)
    monkeypatch.setattr(collector, "COLLECT_FROM", 100)
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
    monkeypatch.setattr(collector, "COLLECT_AT_LATEST_S", 0.01)
    monkeypatch.setattr(collector, "COLLECT_SHARE", 1.0)
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
    async with asyncio.timeout(30):
        while not full:
            await asyncio.sleep(0.001)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_what_is_free_between_blocks_goes_back_to_the_system() -> None:
    me = psutil.Process()
    blocks = [bytes(3000) for _ in range(20_000)]
    full = me.memory_info().rss
    for i in range(len(blocks)):
        if i % 10:
            blocks[i] = b""  # each tenth one stays, so that no end of the heap is free
    kept = me.memory_info().rss
    free_memory_returner()()
    assert me.memory_info().rss < kept - 20 * 2**20, f"{full} bytes full, {kept} with a tenth of the blocks"
    assert sum(map(len, blocks)) == 3000 * 2000


def test_a_crowd_of_objects_is_looked_at_more_seldom_from_its_first_collection_on() -> None:
    assert longest_wait_s(10_000, 0.0) == pytest.approx(30.0)
    assert longest_wait_s(180_000, 0.0) == pytest.approx(360.0)
    assert longest_wait_s(10_000, 0.2) == pytest.approx(400.0)
