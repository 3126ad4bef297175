"""A fleet over two machines, each with a home of its own on this one, by TLS on loopback."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import openai
import pytest

from disco_daemon.cli.doctor import fleet_machines
from disco_daemon.cli.doctor.machines import way_to
from disco_daemon.models.default import default_model_path
from disco_daemon.peer.pairing import Membership
from tests.e2e.test_fleet import PROMPTS, answers, parts_of
from tests.fixtures.daemon import PATIENCE_S, Heard
from tests.fixtures.machines import CountingProxy, FleetHome, fleet_home, lead_by, lending

ROW_BYTES = 4 * 576  # of the default model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]


@pytest.mark.timeout(300)
async def test_a_machine_that_joins_computes_layers_and_no_word_is_lost_with_it(tmp_path: Path) -> None:
    async with fleet_home(tmp_path / "home") as home:
        daemon = home.daemon
        pid = (await daemon.state())["pid"]
        expected = await answers(daemon)
        async with lending(tmp_path / "attic", await home.code()) as attic:
            assert attic.joined["name"] == "attic"
            await home.until_member(lambda one: one["lent"])
            await daemon.device_ready()
            assert await answers(daemon) == expected

            [_, host] = (await home.json("fleet", "status"))["hosts"]
            assert (host["name"], host["state"]) == ("attic", "up")
            assert not parts_of(pid, "hosts.process"), "no process of this machine computes"
            await the_doctors_of_both_agree(home, tmp_path / "attic")

            busy = max(attic.hosts(), key=lambda one: one.cpu_times().user)

            def kill(heard: Heard) -> None:
                if len(heard.pieces) == 6 and busy.is_running():
                    busy.kill()

            assert await answers(daemon, on_piece=kill) == expected
            assert not busy.is_running()
            await home.until_member(lambda one: one["lent"])
            asking = asyncio.create_task(answers(daemon, PROMPTS))
        assert await asking == expected, "the machine leaves in mid-answer, and a process of this one stands in"
        [stand_in] = parts_of(pid, "hosts.process")
        async with CountingProxy(home.port) as proxy:
            lead_by(proxy.port, tmp_path / "attic")
            async with lending(tmp_path / "attic"):
                await home.until_member(lambda one: one["connected"])
                assert await answers(daemon) == expected
                await home.until_member(lambda one: one["lent"])
                assert not stand_in.is_running()
                await nothing_private_is_sent(home, proxy, expected)


async def the_doctors_of_both_agree(home: FleetHome, attic: Path) -> None:
    """Each machine reaches the other's port, and has the same versions and the same time."""
    document = await home.until_members(lambda _: True, PATIENCE_S)
    assert [(one.name, one.level) for one in fleet_machines.home(document, home.port)] == [
        ("peer port", "ok"), ("builds", "ok"), ("clocks", "ok"), ("Ray", "ok"),
    ]  # fmt: skip
    [one] = document["members"]
    assert (one["python"], one["ray"]) == (platform.python_version(), "")
    paired = Membership(attic / "disco" / "fleet" / "home").partner()
    assert paired is not None
    found = await asyncio.to_thread(lambda: [*way_to(paired, "home", 60, ""), fleet_machines.ray_of_home(paired)])
    assert [(one.name, one.level) for one in found] == [
        ("home", "ok"), ("bandwidth", "ok"), ("two clocks", "ok"), ("Ray of home", "ok"),
    ]  # fmt: skip


async def nothing_private_is_sent(home: FleetHome, proxy: CountingProxy, expected: list[str]) -> None:
    daemon, sent = home.daemon, proxy.n_bytes
    assert sent > 100 * ROW_BYTES
    with pytest.raises(openai.APIStatusError, match="a private request is not sent to the machines"):
        await daemon.client.chat.completions.create(
            model="disco", messages=[{"role": "user", "content": "a secret"}], extra_body={"disco": {"private": True}}
        )
    assert proxy.n_bytes < sent + ROW_BYTES, "not one row on the wire"
    body = {"policy.private": True}
    async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
        assert response.status == 200
    sent = proxy.n_bytes
    assert await answers(daemon) == expected, "processes here compute, and no word is lost"
    assert proxy.n_bytes < sent + ROW_BYTES
    assert not proxy.n_open
