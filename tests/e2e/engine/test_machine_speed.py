"""The machine is measured once, by its kernels, in a process of its own; another build or processor is another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from disco_daemon.config.schema import Config, DeviceSettings
from disco_daemon.engine.measure.machine_speed import EXPERTS, KEPT_HEADS, LEAST_BYTES, NAMES, MachineBench, least_s
from disco_daemon.errors import ConfigError
from disco_daemon.machines import model_offers
from disco_daemon.models.roofline import BITS, MachineSpeed
from disco_daemon.profiling import measured_machine
from disco_daemon.profiling.measured_machine import MachineKey, keep_speed, kept_speed, measure_machine
from disco_daemon.profiling.tuned_profile import TunedProfiles
from docs.recommended import MEASURED

KEY = MachineKey("a processor", 4, 3, "a build")


@pytest.mark.slow
async def test_kernels_are_measured_without_a_model() -> None:
    found = await measure_machine(1, lambda _: None)
    assert set(found.packings) == set(NAMES.values()) <= set(BITS)
    assert found.n_threads == 1
    assert {NAMES[number] for number in EXPERTS} == set(found.experts)
    assert all(1e8 < found.kept_speed(head) < 1e12 for head in KEPT_HEADS)
    assert 1e6 < found.scaled_per_s < 1e12
    for speed in (*found.packings.values(), *found.experts.values()):
        assert 1e8 < speed.bytes_per_s < 1e12
        assert 1e8 < speed.multiply_adds_per_s < 1e13
    assert found.bytes_per_s == max(speed.bytes_per_s for speed in found.packings.values())
    assert min(found.attention_one_per_s, found.attention_many_per_s, found.elements_per_s) > 1e7
    assert 0 < found.operation_s < 1e-3


@pytest.mark.slow
def test_a_machine_without_free_memory_is_measured_with_little_of_it() -> None:
    bench = MachineBench(1, cache_bytes=1 << 40, free_bytes=0)
    assert bench.n_bytes == LEAST_BYTES
    assert min(of.bytes_per_s for of in bench.speed().experts.values()) > 1e8


def test_it_is_kept_for_this_machine_and_this_build(tmp_path: Path) -> None:
    assert kept_speed(tmp_path, KEY) is None
    path = keep_speed(tmp_path, KEY, MEASURED)
    assert kept_speed(tmp_path, KEY) == MEASURED
    for other in ({"cpu": "another"}, {"n_cores": 8}, {"n_threads": 2}, {"build": "a newer one"}):
        assert kept_speed(tmp_path, replace(KEY, **other)) is None
    of_before = path.read_text().split("[speed.experts")[0]  # measured by an older disco, which read less of memory
    path.write_text(of_before)
    assert "[speed.packings" in of_before
    assert kept_speed(tmp_path, KEY) is None
    path.write_text("nonsense = ")
    assert kept_speed(tmp_path, KEY) is None


async def test_it_is_measured_once_and_not_while_there_is_something_else_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def measure(n_threads: int, _: object) -> MachineSpeed:
        asked.append(n_threads)
        return MEASURED

    monkeypatch.setattr(model_offers, "measure_machine", measure)
    monkeypatch.setattr(model_offers, "profiles", lambda: TunedProfiles(tmp_path))
    config = Config()
    assert await model_offers.this_machine(config, "a build", lambda: False) is None
    assert asked == []
    for build, times in (("a build", 1), ("a build", 1), ("a newer one", 2)):
        assert await model_offers.this_machine(config, build, lambda: True) == MEASURED
        assert len(asked) == times
    assert await model_offers.this_machine(config, "a newer one", lambda: False) == MEASURED, "it is kept"


async def test_a_machine_that_cannot_be_measured_has_models_without_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*_: object) -> MachineSpeed:
        raise measured_machine.MachineError("no kernels")

    monkeypatch.setattr(model_offers, "measure_machine", measure)
    monkeypatch.setattr(model_offers, "profiles", lambda: TunedProfiles(tmp_path))
    assert await model_offers.this_machine(Config(), "a build", lambda: True) is None


def test_the_power_of_computing_is_what_was_measured_else_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(device=DeviceSettings(watts=30.0))

    def nothing(_: Config) -> None:
        raise ConfigError("there is no model")

    monkeypatch.setattr(model_offers, "load_measured", nothing)
    assert model_offers.watts_of(config) == 30.0
    seen = SimpleNamespace(
        known_energy=SimpleNamespace(decode_j_per_token=0.5), device=SimpleNamespace(decode_tps=40.0)
    )
    monkeypatch.setattr(model_offers, "load_measured", lambda _: seen)
    assert model_offers.watts_of(config) == 20.0


def test_the_least_of_some_rounds_counts_and_slow_ones_are_few() -> None:
    for each_s, most in ((0.001, 7), (0.05, 4), (1.0, 1)):
        at, ran = [0.0], [0]

        def run(at: list[float] = at, ran: list[int] = ran, each_s: float = each_s) -> None:
            ran[0] += 1
            at[0] += each_s * (3 if ran[0] == 1 else 1)  # the first is slow

        took = least_s(run, lambda at=at: at[0])  # type: ignore[misc]
        assert took == pytest.approx(each_s if ran[0] > 1 else 3 * each_s)
        assert ran[0] <= most
