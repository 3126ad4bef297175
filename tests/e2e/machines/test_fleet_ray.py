"""A machine that has joined by Ray lends again when what lends there has ended, by what its owner allowed last."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import psutil
import pytest

from disco_daemon.models.default import default_model_path
from tests.e2e.cli.test_cli import disco
from tests.e2e.machines.test_fleet import PROMPTS, answers
from tests.fixtures.machines import FleetHome, fleet_home, folders, lending

GIB = 1 << 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the extra disco-daemon[fleet] is not installed"
    ),
]


async def until_lent(home: FleetHome, expected: list[str], but: int = 0) -> tuple[int, int]:
    """The process that lends, another one than `but`, and its memory, once it computes; one here stands in."""
    async with asyncio.timeout(240):
        while True:
            document = await home.until_members(lambda found: found["members"], 240)
            [machine], pids = document["members"], [one["pid"] for one in document["ray"]["hosts"]]
            if machine["lent"] and pids and pids[0] not in (None, but):
                return pids[0], machine["memory_bytes"]
            assert await answers(home.daemon, PROMPTS[:1]) == expected[:1]


@pytest.mark.timeout(600)
async def test_what_ray_starts_again_lends_what_its_owner_allowed_last(tmp_path: Path) -> None:
    attic = tmp_path / "attic"
    async with fleet_home(tmp_path / "home", {"fleet": {"ray": "auto"}}) as home:
        expected = await answers(home.daemon)
        async with lending(attic, await home.code(), by_ray=True):
            pid, memory = await until_lent(home, expected)
            assert memory != GIB // 2

            own = folders(attic) | {"DISCO_CONFIG": str(attic / "config.toml")}
            code, _, err = await disco("machines", "join", "--memory", "0.5", "--yes", home=attic, env=own)
            assert code == 0, err
            psutil.Process(pid).kill()
            _, memory = await until_lent(home, expected, but=pid)
            assert memory == GIB // 2
            assert await answers(home.daemon) == expected
