"""That the daemon's parts are put together: what one of them finds out reaches the others. By its own assembly.

Only the sensors are the test's, as a battery and heat are not to be had; the device's engine is not started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from disco_daemon.api.control.metrics import Metrics
from disco_daemon.conductor import Privacy
from disco_daemon.conductor.traces import Traces
from disco_daemon.config.schema import (
    CapSettings,
    Config,
    DeliverySettings,
    DeviceSettings,
    HandoffSettings,
    HistorySettings,
    ModelSettings,
    PolicySettings,
    ServerSettings,
)
from disco_daemon.daemon import assembly
from disco_daemon.daemon.assembly import Assembly, Parts, Shared, make_planner
from disco_daemon.daemon.daemon import Daemon
from disco_daemon.daemon.named_models import NamedModels
from disco_daemon.daemon.runtime import Runtime
from disco_daemon.daemon.tasks.learner import Learner
from disco_daemon.daemon.tasks.loop_monitor import LoopMonitor
from disco_daemon.dispatch.mover import CostMover, Forced, Stay
from disco_daemon.endpoints.device import Device
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.errors import RequestError
from disco_daemon.machines import resident_memory
from disco_daemon.machines.resident_memory import taken_by
from disco_daemon.machines.split.partner_service import Partner
from disco_daemon.money.spending import Speeds
from disco_daemon.power.measurement import Charge, Thermal
from disco_daemon.power.sensors import PowerState, Sensors, assumed_reading
from disco_daemon.store import History
from disco_daemon.system.control_groups import ProcessMemory
from disco_daemon.types import Delivery, Side
from tests.fixtures.clock import StoppedClock
from tests.unit.store.test_ledger import outcome

WATTS = 15.0
LONG_S = 30.0  # for what takes milliseconds, on a busy machine
SERVER = ServerSettings("http://127.0.0.1:9/v1", "large", input_usd_per_mtok=0.15, output_usd_per_mtok=0.6, probe=False)


class Machine(Sensors):
    """A machine's sensors, of which the test says what they read; each look releases `looked`."""

    def __init__(self) -> None:
        super().__init__([], assumed_reading(WATTS, 1, frugal=True), interval_s=0.001)
        self.battery: Charge | None = None
        self.thermal: Thermal | None = None
        self.n_looks, self.looked = 0, threading.Semaphore(0)

    def look(self, now: float) -> PowerState:
        self.n_looks += 1
        self.looked.release()
        return dataclasses.replace(super().look(now), charge=self.battery, thermal=self.thermal)


class Scene:
    """An assembly, and what its parts are made of."""

    def __init__(self, folder: Path, history: History, machine: Machine) -> None:
        self.folder, self.machine, self.clock = folder, machine, StoppedClock()
        self.metrics, self.monitor = Metrics(), LoopMonitor(self.clock)
        self.shared = Shared(
            self.clock, history, self.metrics, self.monitor, Privacy(), Traces(), folder / "servers"
        )  # fmt: skip
        self.assembly = Assembly(self.shared)

    def config(self, **more: Any) -> Config:
        settings = DeviceSettings(model=str(self.folder / "model.gguf"), watts=WATTS, usd_per_kwh=0.3, autotune=False)
        return replace(Config(device=settings, server=SERVER), **more)

    def parts(self, config: Config | None = None, before: Parts | None = None) -> Parts:
        return self.assembly.make(config or self.config(), lambda: False, before)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "model.gguf").write_bytes(b"GGUF, and nothing behind it")
    machine = Machine()
    monkeypatch.setattr(assembly, "make_sensors", lambda _: machine)
    with History(tmp_path / "history.sqlite") as history:
        yield Scene(tmp_path, history, machine)


def constrained(parts: Parts) -> Side:
    """The side that is limited by the next fit."""
    parts.planner.refit()
    return parts.planner.constrained


# --- power ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["battery", "heat"])
async def test_battery_and_heat_change_which_side_is_scarce(scene: Scene, cause: str) -> None:
    parts = scene.parts()
    await parts.wattmeter.look()
    threshold = parts.spending.regime.threshold_usd_per_kwh
    parts.spending.set_rate(0.7 * threshold)  # on mains the server is the dearer side, if not by much
    await parts.wattmeter.look()
    assert constrained(parts) is Side.SERVER
    if cause == "battery":
        scene.machine.battery = Charge(0.05, on_mains=False)
    else:
        scene.machine.thermal = Thermal(throttled=True)
    await parts.wattmeter.look()
    assert constrained(parts) is Side.DEVICE


async def test_the_battery_s_floor_is_the_one_that_is_set(scene: Scene) -> None:
    scene.machine.battery = Charge(0.5, on_mains=False)
    rates = []
    for floor in (0.1, 0.6):
        parts = scene.parts(scene.config(caps=CapSettings(battery_floor=floor)))
        await parts.wattmeter.look()
        rates.append(parts.spending.prices.usd_per_kwh)
    assert rates[1] > rates[0]


async def test_the_tasks_of_the_parts_run_and_one_of_them_reads_the_sensors(scene: Scene) -> None:
    scene.machine.battery = Charge(0.9, on_mains=True)  # a machine with a battery is looked at again and again
    parts = scene.parts(scene.config(server=replace(SERVER, probe=True)))
    fitted = asyncio.Event()
    parts.planner.adopt = lambda *_: fitted.set()  # type: ignore[method-assign]
    tasks = parts.start_tasks()
    try:
        assert {task.get_name() for task in tasks} == {"learner", "wattmeter", "prober"}
        async with asyncio.timeout(LONG_S):
            for _ in range(3):
                await asyncio.to_thread(scene.machine.looked.acquire, timeout=LONG_S)
            parts.learner.constrain(Side.DEVICE, 0.123)
            await fitted.wait()
        assert parts.wattmeter.state()["charge"]["fraction"] == 0.9
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_power_and_learned_speeds_are_in_the_prices_and_the_ledger(scene: Scene) -> None:
    parts = scene.parts()
    parts.context.mover.decode_tps[Side.DEVICE] = 77.0  # type: ignore[attr-defined]
    await parts.wattmeter.look()
    assert parts.spending.speeds == parts.device_speeds() == Speeds(parts.planner.knowledge.device.prefill_tps, 77.0)
    assert parts.spending.prices.device_watts == WATTS
    assert parts.context.energy is parts.wattmeter
    parts.context.energy.begin("an answer", 1.0)
    parts.context.energy.end("an answer", 2.0, 10)


# --- what answers share ----------------------------------------------------------------------------------------------


def test_answers_share_what_the_settings_and_the_process_have(scene: Scene) -> None:
    config = scene.config(
        policy=PolicySettings(shadow=False),
        history=HistorySettings(keep_text=True),
        delivery=DeliverySettings(mode="paced", pace_tps=3.5, expected_ttft_s=0.7),
        handoff=HandoffSettings(stall_s=9.0, pause=not HandoffSettings().pause),
    )
    parts, context = scene.parts(config), scene.parts(config).context
    assert parts.context.planner is parts.planner is parts.learner.planner
    assert parts.context.spending is parts.spending
    assert parts.context.endpoints is parts.endpoints
    assert set(parts.endpoints) == {Side.DEVICE, Side.SERVER}
    assert context.clock is scene.clock
    assert context.privacy is scene.shared.privacy
    assert context.traces is scene.shared.traces
    assert context.keep_text
    assert not context.shadow
    assert context.defaults.delivery is Delivery.PACED
    assert (context.defaults.pace_tps, context.defaults.expected_ttft_s) == (3.5, 0.7)
    assert (context.defaults.stall_s, context.defaults.pause) == (9.0, not HandoffSettings().pause)


def test_what_was_measured_across_a_stall_is_disturbed(scene: Scene) -> None:
    context = scene.parts().context
    scene.clock.at += 5.0
    scene.monitor.look()
    assert context.disturbed(scene.clock.now() - 4.0, scene.clock.now() - 3.0)


def test_answers_are_moved_for_cost_only_where_that_is_wanted(scene: Scene) -> None:
    assert isinstance(scene.parts(scene.config(handoff=HandoffSettings(for_cost=True))).context.mover, CostMover)
    assert isinstance(scene.parts(scene.config(handoff=HandoffSettings(for_cost=False))).context.mover, Stay)
    forced = Assembly(scene.shared, force=(3, 4)).make(scene.config(), lambda: False)
    assert isinstance(forced.context.mover, Forced)


def test_the_planner_has_the_policy_the_side_and_the_budget_that_are_set(scene: Scene) -> None:
    policy = PolicySettings(name="paper", scarcer="device", budget=0.21, hedge=0.05)
    planner = scene.parts(scene.config(policy=policy)).planner
    assert (planner.constrained, planner.budget) == (Side.DEVICE, 0.21)
    assert planner.state()["policy"] == "paper-paced"
    dear = scene.config(policy=replace(policy, scarcer="auto"), device=replace(scene.config().device, usd_per_kwh=1e3))
    assert scene.parts(dear).planner.constrained is Side.DEVICE
    assert scene.parts(scene.config(policy=replace(policy, scarcer="auto"))).planner.constrained is Side.SERVER


def test_nothing_is_sent_twice_at_an_unknown_price(scene: Scene) -> None:
    policy = PolicySettings(hedge=0.05)
    known = scene.parts(scene.config(policy=policy))
    assert assembly.hedge_share(known.config, known.spending) == 0.05
    unknown = scene.config(policy=policy, server=ServerSettings("https://llm.example.com/v1", "any", probe=False))
    assert assembly.hedge_share(unknown, scene.parts(unknown).spending) == 0.0


# --- other settings --------------------------------------------------------------------------------------------------


async def test_live_settings_are_in_force_at_once(scene: Scene) -> None:
    parts = scene.parts()
    config = scene.config(
        device=replace(scene.config().device, usd_per_kwh=5.0),
        caps=CapSettings(usd_per_day=0.5),
        delivery=DeliverySettings(pace_tps=2.5),
        policy=PolicySettings(name="paper", scarcer="device", budget=0.11, hedge=0.07),
    )
    after = parts.under(config)
    after.commit()
    assert after.config is config
    assert parts.spending.usd_per_kwh == 5.0
    assert parts.spending.caps.limits.usd_per_day == 0.5
    assert parts.context.defaults.pace_tps == 2.5
    await after.pursue()
    planner = after.planner
    assert (planner.state()["policy"], planner.constrained, planner.budget) == ("paper-paced", Side.DEVICE, 0.11)
    assert planner.hedges.share == 0.07


async def test_a_reload_keeps_the_caps_the_device_and_what_was_learned(scene: Scene) -> None:
    first = scene.parts()
    first.learner.record(outcome(1, 0.25, 7.0))
    first.scarce_side.changed_at = 123.0
    device = first.endpoints[Side.DEVICE]
    device.expect(lambda: 0.0)  # type: ignore[attr-defined]  # it is well, though it does not run here
    second = scene.parts(before=first)
    assert second.spending.caps is first.spending.caps
    assert second.endpoints[Side.DEVICE] is device
    assert second.scarce_side.changed_at == 123.0
    looks = scene.machine.n_looks
    await second.prepare(first)
    assert scene.machine.n_looks == looks + 1, "the prices go by the battery from the first answer on"
    assert second.planner.knowledge.to_json() == first.planner.knowledge.to_json()


def test_what_was_learned_is_of_one_pair_of_endpoints(scene: Scene) -> None:
    keys = {
        assembly.estimator_key(config)
        for config in (
            scene.config(),
            scene.config(server=replace(SERVER, model="small")),
            scene.config(server=replace(SERVER, base_url="http://127.0.0.1:8/v1")),
            scene.config(device=replace(scene.config().device, model="other.gguf")),
        )
    }
    assert len(keys) == 4


# --- the process -----------------------------------------------------------------------------------------------------


def counted(metrics: Metrics) -> dict[str, float]:
    """What the metrics have counted so far, of all labels together."""
    body, _ = metrics.render()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.value and sample.name.startswith("disco_") and sample.name.endswith("_total"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_an_outcome_is_in_the_history_the_metrics_and_what_is_learned(scene: Scene, tmp_path: Path) -> None:
    partner = Partner(scene.clock, tmp_path / "peer")
    runtime = Runtime(scene.assembly, scene.config(), tmp_path / "config.toml", partner)
    assert not counted(scene.metrics)
    runtime._record(runtime.parts.context, outcome(1, 0.25, 7.0, created=scene.clock.wall()))
    scene.shared.history.flush(10.0)
    assert len(scene.shared.history.recent(5)) == 1
    assert counted(scene.metrics)


async def test_a_daemon_runs_its_watchers_and_counts_what_was_spent_before(scene: Scene, tmp_path: Path) -> None:
    config = scene.config(
        caps=CapSettings(usd_per_day=1.0),
        device=replace(scene.config().device, enabled=False),
        history=HistorySettings(path=str(tmp_path / "spent.sqlite")),
        api=replace(Config().api, port=0),
    )
    daemon = Daemon(config, tmp_path / "config.toml")
    now = daemon.shared.clock.wall()
    with History(tmp_path / "spent.sqlite") as history:
        history.record(outcome(1, 0.25, 7200.0, created=now))
        history.flush(10.0)
    async with daemon.serving():
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert {"loop-monitor", "watchdog", "learner", "wattmeter"} <= names
        assert daemon.runtime.parts.spending.caps.spent(now).usd_today == 0.25
        assert daemon.partner._power() == daemon.runtime.parts.wattmeter.computing()


# --- several models -----------------------------------------------------------------------------------------------


def several(scene: Scene, *names: str, **more: Any) -> Config:
    file = str(scene.folder / "model.gguf")
    return replace(scene.config(), models=tuple(ModelSettings(name, file, **more) for name in names))


async def test_a_reload_has_the_old_models_until_it_has_all_of_the_new_ones(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, restore = scene.parts(), Learner.restore
    local = NamedModels(scene.shared, lambda: parts, lambda: False, list)
    begun, go_on = threading.Event(), threading.Event()

    def slow(learner: Learner) -> None:
        restore(learner)
        begun.set()
        assert go_on.wait(LONG_S)

    try:
        config = several(scene, "alpha", "omega")
        await local.follow(config, await local.made(config))
        before = {name: local.context(name).endpoints for name in local.names}
        monkeypatch.setattr(Learner, "restore", slow)
        config = several(scene, "gamma", "alpha", "delta", use="for tests")
        made = await local.made(config)
        for cancelled in (True, False):
            change = asyncio.create_task(local.follow(config, made))
            assert await asyncio.to_thread(begun.wait, LONG_S)
            assert set(local.names) == {"alpha", "omega"}
            assert {name: local.context(name).endpoints for name in local.names} == before
            with pytest.raises(RequestError, match="no longer"):
                local.context("gamma")
            if cancelled:
                change.cancel()
            go_on.set()
            await asyncio.wait([change])
            learners = sorted(t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("learner of"))
            assert learners == [f"learner of {name}" for name in sorted(local.names)], "each has an owner"
            begun.clear()
            go_on.clear()
        assert list(local.names) == ["gamma", "alpha", "delta"]
        assert local.context("alpha").endpoints == before["alpha"], "it loads the same, and stays"
        assert local.about("alpha")["use"] == "for tests"
    finally:
        go_on.set()
        await local.close()


async def test_in_a_reload_the_device_that_leaves_counts_as_well_as_the_one_that_waits_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(name: str, pid: int | None, state: EngineState) -> Device:
        engine = Engine(wire.Load(model_path=name, n_ctx=1, n_threads=1), scene.shared.clock)
        engine.pid, engine.state = pid, state
        return Device(engine)

    sizes = {"small": 10, "large": 30}
    monkeypatch.setattr(resident_memory, "_predicted", lambda load: sizes[load.model_path])
    monkeypatch.setattr(
        resident_memory, "memory_of", lambda pid: ProcessMemory(0, 0) if pid is None else ProcessMemory(3, 1)
    )
    leaving, waiting = loaded("large", 7, EngineState.READY), loaded("small", None, EngineState.STOPPED)
    assert taken_by([(leaving, False), (waiting, True)]) == (30, ProcessMemory(3, 1))
    leaving, waiting = loaded("small", 7, EngineState.READY), loaded("large", None, EngineState.STOPPED)
    assert taken_by([(leaving, False), (waiting, True)]) == (30, ProcessMemory(3, 1))
    assert taken_by([(waiting, False)]) == (0, ProcessMemory()), "it has ended"
    assert taken_by([]) == (0, ProcessMemory())


async def test_what_a_model_has_learned_is_found_under_its_older_name_and_with_another_context(scene: Scene) -> None:
    parts, file = scene.parts(), str(scene.folder / "model.gguf")
    planner = make_planner(parts.live, parts.spending)
    for n in range(3):
        planner.knowledge.learn(outcome(n, 0.25, 7200.0, created=scene.shared.clock.wall()))
    scene.shared.history.save_learned(
        f"alone | chat | engine {file} | n_ctx 512", scene.shared.clock.wall(), planner.knowledge.to_json()
    )
    scene.shared.history.flush(10.0)
    for n_ctx in (512, 1024):
        local = NamedModels(scene.shared, lambda: parts, lambda: False, list)
        config = several(scene, "chat", n_ctx=n_ctx)
        await local.follow(config, await local.made(config))
        assert local.context("chat").planner.knowledge.to_json() == planner.knowledge.to_json()
        await local.close()
        scene.shared.history.flush(10.0)


async def test_two_models_of_one_file_have_times_of_their_own_and_a_new_one_goes_on_from_the_old(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, said = scene.parts(), list[tuple[str, str]]()
    local = NamedModels(scene.shared, lambda: parts, lambda: False, list)
    monkeypatch.setattr(Learner, "restore", lambda learner: said.append(("restore", learner._endpoints)))
    monkeypatch.setattr(Learner, "save", lambda learner: said.append(("save", learner._endpoints)))
    try:
        config = several(scene, "chat", "code")
        await local.follow(config, await local.made(config))
        assert len({key for what, key in said if what == "restore"}) == 2
        key = next(key for _, key in said if "chat" in key)
        said.clear()
        config = replace(several(scene, "chat"), device=replace(config.device, flash_attn="off"))
        await local.follow(config, await local.made(config))
        assert said.index(("save", key)) < said.index(("restore", key))
    finally:
        await local.close()
