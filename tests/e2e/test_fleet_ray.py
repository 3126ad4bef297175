"""A machine that has joined by Ray lends again when what lends there has ended, by what its owner allowed last."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from disco_daemon.models.default import default_model_path
from tests.e2e.test_cli import disco
from tests.e2e.test_fleet import PROMPTS, answers
from tests.fixtures.machines import FleetHome, fleet_home, folders, lending

GIB = 1 << 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the extra disco-daemon[fleet] is not installed"
    ),
]


async def until_lent(home: FleetHome, true: Callable[[int], bool], expected: list[str]) -> dict[str, object]:
    """What is known of the machine, as soon as it computes in a process `true` of its pid; a process here stands in."""
    async with asyncio.timeout(240):
        while True:
            document = await home.until_members(lambda found: found["members"], 240)
            [machine], lenders = document["members"], document["ray"]["hosts"]
            if machine["lent"] and any(true(one["pid"]) for one in lenders if one["pid"]):
                return {"memory": machine["memory_bytes"], "pid": next(one["pid"] for one in lenders)}
            assert await answers(home.daemon, PROMPTS[:1]) == expected[:1]


@pytest.mark.timeout(600)
async def test_what_ray_starts_again_lends_what_its_owner_allowed_last(tmp_path: Path) -> None:
    attic = tmp_path / "attic"
    async with fleet_home(tmp_path / "home", {"fleet": {"ray": "auto"}}) as home:
        expected = await answers(home.daemon)
        async with lending(attic, await home.code(), by_ray=True):
            lent = await until_lent(home, lambda _: True, expected)
            lender = psutil.Process(int(str(lent["pid"])))
            assert lent["memory"] != GIB // 2

            own = folders(attic) | {"DISCO_CONFIG": str(attic / "config.toml")}
            code, _, err = await disco("fleet", "join", "--memory", "0.5", "--yes", home=attic, env=own)
            assert code == 0, err
            lender.kill()
            again = await until_lent(home, lambda pid: pid != lender.pid, expected)
            assert again["memory"] == GIB // 2
            assert await answers(home.daemon) == expected
