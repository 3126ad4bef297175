"""A process in store for the next host that is lost: real processes, which know no model yet."""

from __future__ import annotations

import asyncio

import pytest

from disco_daemon.machines.fleet import spare_host
from disco_daemon.machines.fleet.spare_host import SpareHost
from disco_daemon.system import supervised

PATIENCE_S = 30.0


async def prepared(spare: SpareHost) -> None:
    spare.prepare()
    assert spare._starting is not None
    async with asyncio.timeout(PATIENCE_S):
        await spare._starting


async def test_it_is_taken_once_and_has_said_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_host, "AFTER_S", 0.0)
    spare = SpareHost()
    assert await spare.take() is None, "none was wanted"
    await prepared(spare)
    spare.prepare()
    assert spare._starting is not None
    assert spare._starting.done(), "there is one"
    taken = await spare.take()
    assert taken is not None
    with taken.sockets[0] as ours:
        ours.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.get_running_loop().sock_recv(ours, 1), "a first sign of life"
        assert await spare.take() is None
    await spare.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await taken.process.wait() == 0, "it ends with its home"


async def test_one_that_has_ended_is_not_taken_and_one_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_host, "AFTER_S", 0.0)
    spare = SpareHost()
    await prepared(spare)
    assert spare._started is not None
    child = spare._started
    await child.end()
    assert await spare.take() is None
    assert child.sockets[0].fileno() == -1
    await prepared(spare)
    assert spare._started is not None
    child = spare._started
    await spare.close()
    assert not child.is_alive
    await spare.close()


async def test_one_that_cannot_be_started_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> object:
        raise OSError("no more processes")

    monkeypatch.setattr(spare_host, "AFTER_S", 0.0)
    monkeypatch.setattr(supervised, "spawn", refuse)
    spare = SpareHost()
    await prepared(spare)
    assert await spare.take() is None
    await spare.close()


async def test_it_is_not_started_any_more_once_its_fleet_has_ended() -> None:
    spare = SpareHost()
    spare.prepare()
    await spare.close()
    assert await spare.take() is None
