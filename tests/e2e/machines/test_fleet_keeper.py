"""Keepers with a real Ray: a head and a node on this machine; what lends a host is placed, started again, and ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from disco_daemon.fleet_keeper.keeper_messages import KeeperJob, KeeperState
from disco_daemon.link.trust.addresses import own_addresses
from disco_daemon.machines.fleet.ray_keeper import RayKeeper, RayToken
from tests.fixtures.ports import free_port

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra disco-daemon[fleet] is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
LEND = (sys.executable, "-c", "import sys; sys.stdin.read()")  # ends with its stdin, as what lends a host does


class Watched:
    """A keeper, and what it says."""

    def __init__(self, job: KeeperJob) -> None:
        self._said: asyncio.Queue[KeeperState] = asyncio.Queue()
        self.keeper = RayKeeper(job, self._said.put_nowait)

    async def until(self, true: Callable[[KeeperState], object]) -> KeeperState:
        async with asyncio.timeout(240):
            while not true(state := await self._said.get()):
                print(state)
        return state


def jobs(folder: Path) -> tuple[KeeperJob, KeeperJob]:
    host = own_addresses("0.0.0.0")[0]
    address, token = f"{host}:{free_port()}", str(RayToken(folder).file())
    return (
        KeeperJob(role="head", address=address, own=host, token_path=token),
        KeeperJob(role="node", address=address, own=host, token_path=token, lend=LEND),
    )


async def test_what_lends_a_host_is_placed_started_again_and_ends_with_its_node(tmp_path: Path) -> None:
    head_job, node_job = jobs(tmp_path)
    head = Watched(head_job)
    try:
        assert not (await head.until(lambda s: s.state == "up")).hosts
        node = Watched(node_job)
        try:
            [placed] = (await head.until(lambda s: [h for h in s.hosts if h.pid])).hosts
            assert placed.pid is not None
            lending = psutil.Process(placed.pid)
            assert lending.cmdline() == list(LEND)
            lending.kill()
            [again] = (await head.until(lambda s: [h for h in s.hosts if h.restarts])).hosts
            assert again.pid not in (None, placed.pid)
            assert node.keeper.pid is not None
            services = psutil.Process(node.keeper.pid).children(recursive=True)
        finally:
            await node.keeper.close()
        _, alive = psutil.wait_procs([*services, psutil.Process(again.pid)], timeout=60)
        assert not alive, "a machine that leaves takes all with it"
        await head.until(lambda s: not s.hosts)

        assert head.keeper.pid is not None
        keeper = psutil.Process(head.keeper.pid)
        services = keeper.children(recursive=True)
        assert services
        keeper.kill()
        await head.until(lambda s: s.state == "lost")
        _, alive = psutil.wait_procs(services, timeout=60)
        assert not alive, "Ray ends with its keeper"
    finally:
        await head.keeper.close()
