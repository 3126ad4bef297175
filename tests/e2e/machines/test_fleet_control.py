"""A daemon whose fleet's layers move while it answers: a host is drained, may have less, and is used again."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.grow import grow_paper
from disco_daemon.clock import SystemClock
from disco_daemon.config.layers import set_values
from disco_daemon.config.schema import Config, DeviceSettings, FleetSettings
from disco_daemon.engine import wire
from disco_daemon.fleet.control import FleetController
from disco_daemon.machines.fleet import operator
from disco_daemon.machines.fleet.local_fleet import make_fleet
from disco_daemon.machines.fleet.monitor import FleetMonitor, MachineLoad
from disco_daemon.machines.fleet.operator import FleetOperator
from disco_daemon.models.default import default_model_path
from tests.e2e.cli.test_cli import disco
from tests.e2e.machines.test_fleet import PROMPTS, answers, hosts_of, parts_of
from tests.fixtures.daemon import DaemonProcess, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

FLEET = {"enabled": True, "hosts": 2, "cuts": [5, 12, 22]}
RELIEVED_S = 30.0  # in which a host has to be without what its owner takes from it
SOON = "from disco_daemon.fleet import control\ncontrol.NO_REVERSAL_S = 5.0"  # in place of a minute


async def fleet_of(daemon: DaemonProcess) -> dict[str, Any]:
    async with daemon.controls.get(f"{daemon.root}/disco/v1/fleet") as response:
        found: dict[str, Any] = await response.json()
        return found


AS_CUT = [[(0, 5), (22, 30)], [(5, 12)], [(12, 22)]]


async def until(
    daemon: DaemonProcess, *states: str, layers: list[list[tuple[int, int]]] | None = None
) -> dict[str, Any]:
    """Wait until home and hosts are in these states, and have these layers: a host is up before home lets go of its."""
    async with asyncio.timeout(RELIEVED_S):
        while True:
            found = await fleet_of(daemon)
            if [host["state"] for host in found["hosts"]] == list(states) and layers in (None, ranges(found)):
                return found
            await asyncio.sleep(0.1)  # the other process has no event to wait for


def ranges(found: dict[str, Any]) -> list[list[tuple[int, int]]]:
    return [[(one["first"], one["last"]) for one in host["segments"]] for host in found["hosts"]]


async def test_layers_leave_a_host_that_is_drained_or_may_have_less_while_answers_go_on(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {"device": {"n_ctx": 512, "n_cells": 1024}, "fleet": FLEET}
    async with running(tmp_path, policy="all-device", settings=settings, before=SOON) as daemon:
        await daemon.device_ready()
        found = await until(daemon, "up", "up", "up")
        assert ranges(found) == [[(0, 5), (22, 30)], [(5, 12)], [(12, 22)]]
        expected = await answers(daemon)

        moving = asyncio.create_task(answers(daemon))
        code, _, err = await disco("fleet", "drain", "local-1", "--url", daemon.root, home=tmp_path)
        assert code == 0, err
        found = await until(daemon, "up", "drained", "up")
        assert await moving == expected
        assert ranges(found)[1] == []
        assert sum(last - first for host in ranges(found) for first, last in host) == 30
        step = found["last_steps"][-1]
        assert (step["kind"], step["first"], step["last"], step["source"]) == ("move", 5, 12, "local-1")
        assert step["seconds"] > 0 <= step["pause_s"]
        pid = (await daemon.state())["pid"]
        assert len(hosts_of(pid)) == 1, "a host without layers is let go"

        [engine] = parts_of(pid, "worker")
        engine.kill()
        await daemon.until(lambda s: s["endpoints"]["device"]["pid"] not in (engine.pid, None))
        await daemon.device_ready()
        assert ranges(await fleet_of(daemon)) == ranges(found), "the next life begins as the last one ended"
        assert await answers(daemon, PROMPTS[:1]) == expected[:1]

        set_values(tmp_path / "config.toml", {"fleet.memory_gib": 0.01})
        moving = asyncio.create_task(answers(daemon))
        async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
            assert (await response.json()) == {"changed": ["fleet.memory_gib"], "needs_restart": []}
        found = await until(daemon, "up", "drained", "idle")
        assert await moving == expected
        brief = (await daemon.state())["endpoints"]["device"]["fleet"]
        assert [brief[name] for name in ("hosts", "layers_away", "replicas", "state")] == [0, 0, 0, "up"]
        async with daemon.session.get(f"{daemon.root}/metrics") as response:
            assert "\ndisco_fleet_moves_total 2.0\n" in await response.text()

        code, _, err = await disco("fleet", "drain", "local-3", "--url", daemon.root, home=tmp_path)
        assert code == 1
        assert "no host 'local-3'" in err
        assert "It is one of local-1, local-2" in err
        code, out, _ = await disco("fleet", "resume", "--url", daemon.root, home=tmp_path)
        assert (code, "local-1  idle: no layers" in out) == (0, True)

        set_values(tmp_path / "config.toml", {"fleet.memory_gib": 0.0})
        async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
            assert (await response.json())["changed"] == ["fleet.memory_gib"]
        await until(daemon, "up", "up", "up", layers=AS_CUT)
        assert await answers(daemon) == expected


async def test_a_fleet_replicates_by_itself_into_hosts_that_are_vacant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is one with idle processors, whatever else this one does; all else is real."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    idle = MachineLoad(8, 0.05, 16 << 30, 12 << 30)
    monkeypatch.setattr(FleetMonitor, "look", lambda *_: idle)
    has_moved, carry_out = asyncio.Event(), FleetOperator._carry_out

    async def note(self: FleetOperator, *step: Any) -> None:
        await carry_out(self, *step)
        if self.steps.n_moves:
            has_moved.set()

    monkeypatch.setattr(FleetOperator, "_carry_out", note)
    monkeypatch.setattr(operator, "FleetController", partial(FleetController, grow_paper))  # which fills every host
    model = default_model_path()
    device = DeviceSettings(model=str(model), n_ctx=512, n_cells=1024)
    settings = FleetSettings(enabled=True, hosts=2, cuts=(5, 8, 12), mode="auto")
    config = Config(device=device, fleet=settings)
    fleet = make_fleet(
        config, wire.Load(model_path=str(model), n_ctx=512, n_threads=1, n_cells=1024), "", SystemClock()
    )
    fleet.engine.start()
    try:
        await fleet.engine.ready(120.0)
        caring = asyncio.create_task(fleet.fleet.run())
        async with asyncio.timeout(60.0):
            await has_moved.wait()
        caring.cancel()
        step = fleet.fleet.document()["last_steps"][0]
        assert step["kind"] == "replicate"
        assert step["predicted"] > 1.0
        assert "S rises" in step["why"]
        assert fleet.fleet.brief()["replicas"] > 0
    finally:
        await fleet.engine.close()
