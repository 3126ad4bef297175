"""Layers that move to another machine and back while answers are written. The home's daemon is this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disco_daemon.clock import SystemClock
from disco_daemon.config.schema import Config, DeviceSettings, FleetSettings, PeerSettings
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.fleet import control
from disco_daemon.fleet.control import FleetController, FleetSeen
from disco_daemon.fleet.steps import FleetStep, StepKind
from disco_daemon.link.relay.handshake import TellLoad
from disco_daemon.machines.fleet import offered_hosts
from disco_daemon.machines.fleet.fleet_device import FleetDevice
from disco_daemon.machines.fleet.local_fleet import make_fleet
from disco_daemon.machines.fleet.members import FleetMembers
from disco_daemon.machines.fleet.monitor import FleetMonitor, MachineLoad
from disco_daemon.machines.fleet.offered_hosts import HostOffers
from disco_daemon.models.default import default_model_path
from tests.e2e.engine.test_engine import question, told
from tests.e2e.machines.test_fleet import PROMPTS
from tests.fixtures.machines import lending
from tests.fixtures.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

MODEL = default_model_path()
HERE, ATTIC = 1, 2  # numbers of the hosts
FIRST, LAST = 5, 22  # of the inner layers, the first of which is module 1 of a step


async def answers(engine: Engine, n: int = 2) -> list[str]:
    found = await asyncio.gather(*(told(engine.open(question(prompt, max_tokens=20))) for prompt in PROMPTS[:n]))
    return [text for text, _ in found]


async def answers_of_one_process() -> list[str]:
    engine = Engine(wire.Load(model_path=str(MODEL), n_ctx=512, n_threads=1, n_cells=1024, exact=True), SystemClock())
    engine.start()
    try:
        await engine.ready(120.0)
        return await answers(engine)
    finally:
        await engine.close()


def move(first: int, last: int, source: int, target: int) -> FleetStep:
    return FleetStep(StepKind.MOVE, first - FIRST + 1, last - FIRST + 1, source, target, why="tried out")


@dataclass
class Wanted:
    """Steps that a controller decides on in place of its own, which are those that owners call for if not all."""

    steps: list[FleetStep] = field(default_factory=list)
    may_scale: bool = False


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Wanted:
    """The controller decides by itself as soon as it may, and what it waits for is not long."""
    found, decide = Wanted(), FleetController.decide

    def scripted(self: FleetController, now: float, seen: FleetSeen, **_: Any) -> list[FleetStep]:
        return [found.steps.pop(0)] if found.steps else decide(self, now, seen, may_scale=found.may_scale)

    monkeypatch.setattr(FleetController, "decide", scripted)
    for name in ("PEAK_S", "VACANT_S", "COOLDOWN_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(control, name, 0.5)
    return found


def let_other_machines_be_the_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take most of this machine and nothing of other ones, whatever is so; all else is real."""
    hear = HostOffers.hear

    def idle(self: HostOffers, name: str, load: TellLoad) -> None:
        free = load.memory_bytes - load.rss_bytes
        said = replace(load, others_share=0.05, cpu_got=0.1, cpu_wanted=0.1, memory_free_bytes=free)
        hear(self, name, said)

    monkeypatch.setattr(HostOffers, "hear", idle)
    busy = MachineLoad(8, 0.75, 16 << 30, 12 << 30)
    monkeypatch.setattr(FleetMonitor, "look", lambda *_: busy)


@asynccontextmanager
async def fleet_of(config: Config, members: FleetMembers) -> AsyncIterator[FleetDevice]:
    fleet = make_fleet(
        config, wire.Load(model_path=str(MODEL), n_ctx=512, n_threads=1, n_cells=1024), "", SystemClock(), members
    )
    fleet.engine.start()
    caring = asyncio.create_task(fleet.fleet.run())
    try:
        await fleet.engine.ready(120.0)
        yield fleet
    finally:
        caring.cancel()
        await asyncio.gather(caring, return_exceptions=True)
        await fleet.engine.close()


def host(fleet: FleetDevice, number: int) -> tuple[str, str, list[tuple[int, int]]]:
    found = fleet.fleet.document()["hosts"][number]
    return found["name"], found["state"], [(one["first"], one["last"]) for one in found["segments"]]


def has_stepped(fleet: FleetDevice, n_before: int) -> Callable[[], bool]:
    return lambda: len(fleet.fleet.document()["last_steps"]) > n_before


@pytest.mark.timeout(600)
async def test_layers_move_to_another_machine_and_back_and_no_word_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    expected = await answers_of_one_process()
    config = Config(
        device=DeviceSettings(model=str(MODEL), n_ctx=512, n_cells=1024, n_threads=1),
        peer=PeerSettings(port=free_port()),
        fleet=FleetSettings(enabled=True, hosts=1, cuts=(FIRST, 12, LAST), listen="127.0.0.1", ray="off", mode="auto"),
    )
    members = FleetMembers(tmp_path / "issuer")
    await members.follow(config)
    try:
        code = (await members.make_code("127.0.0.1"))["code"]
        async with lending(tmp_path / "attic", code) as attic, fleet_of(config, members) as fleet:

            async def until(true: Callable[[], bool], n_answers: int = 2) -> None:
                """Let answers be drawn until that is so."""
                async with asyncio.timeout(120.0):
                    while True:
                        assert await answers(fleet.engine, n_answers) == expected[:n_answers]
                        if true():
                            return

            await until(lambda: host(fleet, ATTIC) == ("attic", "up", [(12, 22)]))
            await until(lambda: fleet.fleet.document()["hosts"][ATTIC]["cpu_share"] is not None)  # by its own word
            for step, here, there in (
                (move(8, 12, HERE, ATTIC), [(5, 8)], [(8, 22)]),
                (move(8, 22, ATTIC, HERE), [(5, 22)], []),
            ):
                await until(lambda: members.machine_at(0) is not None)
                n_steps = len(fleet.fleet.document()["last_steps"])
                wanted.steps.append(step)
                await until(has_stepped(fleet, n_steps))
                [*_, last] = fleet.fleet.document()["last_steps"]
                assert fleet.fleet.n_moves == n_steps + 1, last
                assert (host(fleet, HERE)[-1], host(fleet, ATTIC)[-1]) == (here, there)
                assert "attic" in (last["source"], last["target"])

            # One answer at a time goes by home, this machine's host and back, and most of this machine is taken. What
            # was measured of both decides whether copies on this one come before layers on the other one.
            let_other_machines_be_the_idle_ones(monkeypatch)
            wanted.may_scale, n_steps = True, len(fleet.fleet.document()["last_steps"])

            def steps_to_attic() -> list[dict[str, Any]]:
                return [step for step in fleet.fleet.document()["last_steps"][n_steps:] if step["target"] == "attic"]

            await until(lambda: bool(steps_to_attic()), n_answers=1)
            wanted.may_scale = False
            [last, *_] = steps_to_attic()
            assert last["kind"] in ("move", "replicate"), last
            assert "token/s expected" in last["why"]
            assert last["predicted"] > 1.0
            assert host(fleet, ATTIC)[1] == "up"
            assert host(fleet, ATTIC)[2] != []
            assert await answers(fleet.engine) == expected

            fleet.fleet.drain("attic")
            await until(lambda: host(fleet, ATTIC) == ("attic", "drained", []))
            fleet.fleet.resume()

            monkeypatch.setattr(offered_hosts, "GONE_S", 1.0)
            n_steps = len(fleet.fleet.document()["last_steps"])
            layers = [host(fleet, number)[-1] for number in (0, HERE)]
            source, first, last_one = next(
                (number, first, last)
                for number in (HERE, 0)
                for first, last in layers[number]
                if first >= FIRST and last <= LAST
            )
            wanted.steps.append(move(first, min(first + 3, last_one), source, ATTIC))
            while wanted.steps:
                await asyncio.sleep(0.05)
            attic.process.kill()  # in the middle of a move
            await until(has_stepped(fleet, n_steps))
            [*_, last] = fleet.fleet.document()["last_steps"]
            assert "it came to nothing: attic" in last["why"]
            assert [host(fleet, number)[-1] for number in (0, HERE)] == layers
            assert await answers(fleet.engine) == expected
    finally:
        await members.close()
