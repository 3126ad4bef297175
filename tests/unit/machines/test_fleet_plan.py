"""What a fleet of this machine's processes should do, and which models it cannot serve."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.cli.fleet import lines_of
from disco_daemon.cli.main import main
from disco_daemon.config.schema import Config, DeviceSettings, FleetSettings
from disco_daemon.engine import wire
from disco_daemon.engine.door import EngineDoor
from disco_daemon.engine.measure.tune_messages import Knobs
from disco_daemon.errors import ConfigError
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.placement import ModelModules
from disco_daemon.machines.fleet.host_processes import HostProcesses
from disco_daemon.machines.fleet.layer_plan import FleetPlanInput, best_layout, modules_of, plan_fleet, require_layers
from disco_daemon.machines.fleet.local_fleet import first_layout, make_fleet, shared_knobs
from disco_daemon.machines.managed_device import whole_device
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import read_head
from tests.fixtures.clock import StoppedClock
from tests.fixtures.gguf import model_file

MODEL = ModelModules((28_000_000, *(2_000_000,) * 30, 28_000_000), 1536, 2304)
GIVEN = FleetPlanInput(MODEL, 0.015, n_threads=1, n_threads_each=1, n_cells=8192, machine_bytes=8e9)
needs_model = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


def test_a_host_with_a_core_of_its_own_gets_a_run_of_inner_layers() -> None:
    plan = plan_fleet(GIVEN, None)
    [step] = plan.steps
    assert (step.kind, step.source, step.target) == ("move", "home", "local-1")
    assert 1 <= step.first < step.last <= 29
    assert plan.speedup_predicted == step.predicted > 1.3
    n = step.last - step.first
    assert plan.memory_bytes == n * (2_000_000 + 8192 * 1536)
    assert "8 answers at a time" in step.why


def test_several_hosts_share_a_run_and_a_machine_with_fewer_processors_makes_each_slower() -> None:
    several = replace(GIVEN, n_hosts=3)
    best = best_layout(several)
    assert [one.hosts for one in best.inner] == [(1,), (2,), (3,)]
    sizes = [one.last - one.first for one in best.inner]
    assert max(sizes) - min(sizes) <= 1
    assert GIVEN.speedup(best_layout(GIVEN)) < several.speedup(best) <= 2, (
        "two flights keep two processes busy, no more; they meet more seldom"
    )
    assert replace(several, n_cores=2).rate(best) == pytest.approx(several.rate(best) / 2, rel=0.1)
    plan = plan_fleet(several, None)
    assert {(step.kind, step.source, step.target) for step in plan.steps} == {
        ("move", "home", f"local-{number}") for number in (1, 2, 3)
    }
    assert plan.memory_bytes == sum(sizes) * (2_000_000 + 8192 * 1536)


def test_what_is_replicated_now_and_should_not_be_is_evicted() -> None:
    now = FleetLayout(30, (PlacedRange(4, 20, (1, 2)), PlacedRange(20, 26, (1,))))
    given = replace(GIVEN, n_hosts=2, n_cores=1)
    kinds = {step.kind for step in plan_fleet(given, now).steps}
    assert kinds <= {"evict", "move"}
    layers = [
        layer for step in plan_fleet(given, now).steps if step.kind == "evict" for layer in range(step.first, step.last)
    ]
    assert len(layers) == len(set(layers)), "no layer is evicted twice"


def test_where_the_processes_share_what_one_would_have_nothing_is_moved() -> None:
    shared = replace(GIVEN, n_threads=8, n_threads_each=4)
    assert shared.speedup(best_layout(shared)) < 1
    plan = plan_fleet(shared, None)
    assert (plan.steps, plan.speedup_predicted, plan.memory_bytes) == ([], 1.0, 0)


@given(
    n=st.integers(3, 40), head=st.integers(0, 50_000_000), threads=st.integers(1, 16), token_s=st.floats(1e-3, 1),
    cuts=st.tuples(st.integers(1, 38), st.integers(2, 39)),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_the_steps_lead_from_what_is_to_the_best_and_then_there_are_none(
    n: int, head: int, threads: int, token_s: float, cuts: tuple[int, int]
) -> None:
    model = ModelModules((1, *(1_000_000,) * n, head), 1024, 2048)
    given = FleetPlanInput(model, token_s, threads, max(1, threads // 2), 4096, 16e9)
    best, before = best_layout(given), None
    assert 0 < best.first < best.last < n
    if cuts[0] < cuts[1] < n:
        before = FleetLayout.of_cuts(cuts, n)
    there = set() if before is None else set(range(before.first, before.last))
    plan = plan_fleet(given, before)
    for step in plan.steps:
        moved = set(range(step.first, step.last))
        there = there | moved if step.target == "local-1" else there - moved
        assert moved
        assert step.predicted >= 1.02
    if plan.steps:
        assert there == set(range(best.first, best.last))
    assert plan_fleet(given, best).steps == []
    assert given.rate(best) >= given.rate(FleetLayout.of_cuts((1, n - 1), n))


def test_processes_of_one_machine_share_its_threads() -> None:
    knobs = Knobs(n_threads=7, n_threads_batch=8, n_ubatch=512, flash_attn=None)
    shared = shared_knobs(knobs, 1)
    assert (shared.n_threads, shared.n_threads_batch) == (3, 4)
    assert shared_knobs(shared_knobs(shared, 1), 3).n_threads == 1


def test_a_model_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    _, header = read_head(model_file(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=r"tiny\.gguf has 2 layers, and a fleet needs 3"):
        require_layers("tiny.gguf", header)


def test_a_recurrent_model_and_one_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    path = model_file(tmp_path / "state.gguf", llama__block_count=8)
    head, header = read_head(path)
    recurrent = replace(header.tensors[0], name="blk.0.ssm_in.weight")
    with pytest.raises(ConfigError, match="recurrent model"):
        require_layers("state.gguf", replace(header, tensors=(*header.tensors, recurrent)))
    with pytest.raises(ConfigError, match="cannot be cut into ranges"):
        require_layers("x", read_head(model_file(tmp_path / "x.gguf", llama__block_count=None))[1])
    assert head


def test_a_model_whose_ranges_differ_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = model_file(tmp_path / "mtp.gguf", llama__block_count=8, llama__nextn_predict_layers=1)
    config = Config(device=DeviceSettings(model=str(path)), fleet=FleetSettings(enabled=True))
    with pytest.raises(ConfigError, match=r"mtp\.gguf cannot be cut into ranges"):
        make_fleet(config, wire.Load(model_path=str(path), n_ctx=512, n_threads=1), "", StoppedClock())


@needs_model
def test_cuts_beyond_the_model_are_refused_with_its_layers() -> None:
    model = default_model_path()
    _, header = read_head(model)
    given = replace(GIVEN, model=modules_of(header, 30))
    config = Config(fleet=FleetSettings(enabled=True, cuts=(5, 30)))
    with pytest.raises(ConfigError, match=r"has 30 layers.*cut below 30"):
        first_layout(config, model, given)
    within = first_layout(Config(fleet=FleetSettings(enabled=True, cuts=(5, 22))), model, given)
    assert within == FleetLayout.of_cuts((5, 22), 30)


@needs_model
def test_home_is_loaded_as_the_whole_model_but_for_what_a_fleet_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    model, adapter = default_model_path(), wire.AdapterFile(name="law", path="law.gguf")
    device = DeviceSettings(model=str(model), adapters={"law": "law.gguf"}, n_threads=4)
    config = Config(device=device, fleet=FleetSettings(enabled=True, cuts=(5, 22), keep_home=True))
    whole = wire.Load(
        model_path=str(model),
        n_ctx=512,
        n_threads=4,
        n_gpu_layers=None,
        adapters=(adapter,),
        exact=False,
        chat_template="x",
    )
    fleet = make_fleet(config, whole, "a name", StoppedClock())
    home = fleet.engine.config
    assert (home.model_path, home.n_ctx, home.chat_template, home.keep_home) == (str(model), 512, "x", True)
    assert (home.n_threads, home.n_gpu_layers, home.adapters, home.speculate, home.exact) == (2, 0, (), False, True)
    assert [(part.first, part.last, *part.hosts) for part in home.ranges] == [(0, 5, 0), (5, 22, 1), (22, 30, 0)]
    assert "an adapter is for a whole model" in fleet.adapters["law"]
    assert fleet.status()["fleet"] == {
        "hosts": 0, "layers_away": 0, "replicas": 0, "state": "stopped", "confined": None,
    }  # fmt: skip
    assert not (tmp_path / "disco" / "segments").exists(), "files are written when the engine starts"
    assert lines_of(fleet.fleet.document())[1].startswith("local-1  stopped: layers 5-22")


async def test_ranges_that_cannot_be_written_are_an_error_of_the_start() -> None:
    def write() -> None:
        raise ConfigError("there is no room")

    with pytest.raises(OSError, match="there is no room"):
        await HostProcesses(1, write).prepare()


@needs_model
def test_the_forecast_of_the_page_is_what_the_plan_says() -> None:
    """docs/lab/fleet.md has it beside what was measured: 1.44 and 1.46 with these cuts, 8 answers, a core each."""
    _, header = read_head(default_model_path())
    given = replace(GIVEN, model=modules_of(header, 30))
    assert given.speedup(FleetLayout.of_cuts((5, 22), 30)) == pytest.approx(1.32, abs=0.01)
    assert best_layout(given) == FleetLayout.of_cuts((4, 26), 30)
    assert given.speedup(best_layout(given)) == pytest.approx(1.34, abs=0.01)


@needs_model
def test_the_plan_document_has_the_keys_that_programs_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("DISCO_DEVICE_N_THREADS", "1")
    assert main(["fleet", "plan", "--model", str(default_model_path()), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) == {"steps", "speedup_predicted", "memory_bytes"}
    keys = "kind", "first", "last", "source", "target", "why", "predicted", "measured", "seconds", "pause_s"
    assert [set(step) for step in plan["steps"]] == [set(keys)]
    assert "not measured" in plan["steps"][0]["why"]
    assert main(["fleet", "plan", "--model", str(default_model_path())]) == 0
    assert "move layers" in capsys.readouterr().out


def test_a_device_without_hosts_says_how_it_gets_some_also_where_it_is_a_fleet_already() -> None:
    """A home that waits for its first machine was told to set what was set, and a reload is enough for it."""
    [line] = lines_of(whole_device())
    assert "no hosts" in line
    assert "no fleet" not in line
    assert "next start" not in line
    assert {"disco config reload", "disco machines pair --as fleet"} <= {*line.split("`")}


async def test_an_engine_is_told_why_there_is_no_host_and_gets_its_socket_where_there_is() -> None:
    hosts = HostProcesses(1, lambda: None)
    ours, theirs = socket.socketpair()
    with theirs:
        hosts.attach(ours)
        door = EngineDoor(theirs)
        with pytest.raises(OSError, match="the fleet has no host 2"):
            await asyncio.to_thread(door.open, 2)
        sock = await asyncio.to_thread(door.open, 1)
        pids = {hosts.hosts[0].pid}
        sock.close()
        with await asyncio.to_thread(door.open, 1):
            assert hosts.hosts[0].epoch == 2
            pids.add(hosts.hosts[0].pid)
            await hosts.detach()  # kills a host whose home has not gone
    assert len(pids - {None}) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)
    await hosts.detach()
