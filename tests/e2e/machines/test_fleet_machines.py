"""A fleet over two machines, each with a home of its own on this one, by TLS on loopback."""

from __future__ import annotations

import asyncio
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil
import pytest

from disco_daemon.cli.doctor import machines
from disco_daemon.engine.hosts.link import SILENT_S
from disco_daemon.link.trust.pairing import Membership
from disco_daemon.models.default import default_model_path
from tests.e2e.machines.test_fleet import PROMPTS, answers, hosts_of
from tests.fixtures.daemon import PATIENCE_S, Heard
from tests.fixtures.machines import CountingProxy, FleetHome, LendingMachine, fleet_home, lead_by, lending

ROW_BYTES = 4 * 576  # of the default model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]


async def test_a_machine_that_joins_computes_layers_and_no_word_is_lost_with_it(tmp_path: Path) -> None:
    async with fleet_home(tmp_path / "home") as home:
        daemon = home.daemon
        pid = (await daemon.state())["pid"]
        expected = await answers(daemon)
        async with lending(tmp_path / "attic", await home.code()) as attic:
            assert attic.joined["name"] == "attic"
            await home.until_member(lambda one: one["connected"])
            await daemon.device_ready()
            async with asyncio.timeout(PATIENCE_S):  # a process here stands in until it has its layers
                while not any(one["lent"] for one in await home.members()):
                    assert await answers(daemon, PROMPTS[:1]) == expected[:1]
            assert await answers(daemon) == expected

            [_, host] = (await home.json("fleet", "status"))["hosts"]
            assert (host["name"], host["state"]) == ("attic", "up")
            assert not hosts_of(pid), "no process of this machine computes"
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
        [stand_in] = hosts_of(pid)
        async with CountingProxy(home.port) as proxy:
            lead_by(proxy.port, tmp_path / "attic")
            async with lending(tmp_path / "attic") as attic:
                await home.until_member(lambda one: one["connected"])
                await what_falls_silent_or_is_cut_costs_no_word(home, attic, proxy, expected)
                assert not stand_in.is_running()
                await nothing_private_is_sent(home, proxy, expected)


async def the_doctors_of_both_agree(home: FleetHome, attic: Path) -> None:
    """Each machine reaches the other's port, and has the same versions and the same time."""
    document = await home.until_members(lambda _: True, PATIENCE_S)
    assert [(one.name, one.level) for one in (machines.served(document, home.port), *machines.of_fleet(document))] == [
        ("peer port", "ok"), ("builds", "ok"), ("clocks", "ok"), ("Ray", "ok"),
    ]  # fmt: skip
    [one] = document["members"]
    assert (one["python"], one["ray"]) == (platform.python_version(), "")
    paired = Membership(attic / "disco" / "fleet" / "home").partner()
    assert paired is not None
    found = await asyncio.to_thread(lambda: [*machines.way_to(paired, "home", 60, ""), machines.ray_of_home(paired)])
    assert [(one.name, one.level) for one in found] == [
        ("home", "ok"), ("bandwidth", "ok"), ("two clocks", "ok"), ("Ray of home", "ok"),
    ]  # fmt: skip


@dataclass
class Disturbance:
    """Lets a part of a machine fail when an answer has six pieces; `wait_s` is how long no further one came then."""

    attic: LendingMachine
    proxy: CountingProxy
    fault: str
    stopped: list[psutil.Process] = field(default_factory=list)
    failed_at: float = 0.0
    wait_s: float = 0.0

    def heard(self, heard: Heard) -> None:
        now = time.monotonic()
        if self.failed_at and not self.wait_s and now - self.failed_at > 0.2:  # what was under way has come by then
            self.wait_s = now - self.failed_at
        if self.failed_at or len(heard.pieces) < 6:
            return
        self.failed_at = now
        if self.fault == "link":
            self.proxy.cut()
            return
        self.stopped.append(max(self.attic.hosts(), key=lambda one: one.cpu_times().user))
        if self.fault == "both":
            self.stopped.append(self.attic.relay())
        for process in self.stopped:
            process.suspend()


async def what_falls_silent_or_is_cut_costs_no_word(
    home: FleetHome, attic: LendingMachine, proxy: CountingProxy, expected: list[str]
) -> None:
    """The link is cut, or the machine's engine or both engine and relay stand still, while it computes.

    To home a relay that stands still alone is the last of these: nothing comes, and no new offer does.
    """
    waits: dict[str, list[float]] = {"link": [], "engine": [], "both": []}
    soon = 0.0
    # A machine that does much else may be slow at all of them once: then what falls silent is tried once more.
    for fault in (*waits, "engine", "both"):
        silent = waits["engine"] + waits["both"]
        if len(silent) > 1 and min(silent) < soon:
            break
        disturbance = Disturbance(attic, proxy, fault)
        assert await answers(home.daemon, PROMPTS[:2], on_piece=disturbance.heard) == expected[:2], fault
        waits[fault].append(disturbance.wait_s)
        for process in reversed(disturbance.stopped):
            if process == attic.relay():
                process.resume()
            else:  # nobody lets it go on: the machine ends it
                await asyncio.to_thread(process.wait, PATIENCE_S)
        await home.until_member(lambda one: one["connected"])
        soon = (
            SILENT_S + 5 + waits["link"][0]
        )  # that is what a start here takes, where nothing has to fall silent first
    silent = waits["engine"] + waits["both"]
    assert min(silent) > SILENT_S - 1, f"it did compute, and was waited for: {waits}"
    assert min(silent) < soon, f"a process of home has begun in its place: {waits}"


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
