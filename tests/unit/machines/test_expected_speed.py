"""A model that was never loaded: its speed by what the machine was measured to do, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from disco_daemon.config.schema import Config, DeviceSettings
from disco_daemon.estimation.knowledge import DEVICE_TPS, FEW, Knowledge
from disco_daemon.machines import expected_speed
from disco_daemon.machines.device_settings import profiles
from disco_daemon.machines.expected_speed import predicted_speed
from disco_daemon.models.default import default_model_path
from disco_daemon.models.files import whole_header
from disco_daemon.models.listed import listed
from disco_daemon.models.roofline import ERROR
from disco_daemon.profiling.measured_machine import keep_speed, machine_key
from disco_daemon.profiling.saved import TYPICAL
from disco_daemon.profiling.tuned_profile import MACHINE
from docs.recommended import MEASURED

THREADS = 1


@pytest.fixture(autouse=True)
def of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(expected_speed, "is_for_gpu", lambda: False)


def config(model: Path, **device: object) -> Config:
    settings = DeviceSettings(model=str(model), n_threads=THREADS)
    return Config(device=replace(settings, **device))


def keep(n_threads: int = THREADS) -> None:
    keep_speed(profiles().folder, machine_key(n_threads, "of some build"), MEASURED)


def test_a_new_model_is_expected_to_be_as_fast_as_predicted() -> None:
    keep()
    path = default_model_path()
    found = predicted_speed(config(path))
    work = listed(path, whole_header(path)).work
    assert found is not None
    for n, off in ((100, ERROR["prompt"]), (300, 0.1), (TYPICAL, 1e-9)):
        assert n * found.k_s_per_token + found.c_s == pytest.approx(work.prompt_s(MEASURED, n), rel=off)
    assert found.decode_tps == pytest.approx(1 / work.decode_s(MEASURED, 100))


@pytest.mark.parametrize(
    "other", [{"base_url": "http://127.0.0.1:9/v1"}, {"enabled": False}, {"n_threads": THREADS + 1}]
)  # fmt: skip
def test_what_the_measurement_does_not_hold_for_is_not_predicted(other: dict[str, object]) -> None:
    keep()
    assert predicted_speed(config(default_model_path(), **other)) is None


def test_a_machine_with_a_gpu_is_not_predicted_by_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    monkeypatch.setattr(expected_speed, "is_for_gpu", lambda: True)
    assert predicted_speed(config(default_model_path(), n_gpu_layers="auto")) is None
    assert predicted_speed(config(default_model_path(), n_gpu_layers=0)) is not None


def test_without_a_measurement_or_with_strange_files_nothing_is_said(tmp_path: Path) -> None:
    assert predicted_speed(config(default_model_path())) is None
    keep()
    strange = tmp_path / "model.gguf"
    strange.write_bytes(b"GGUF, and nothing behind it")
    assert predicted_speed(config(strange)) is None
    assert predicted_speed(config(tmp_path / "missing.gguf")) is None
    kept = profiles().folder / MACHINE
    for damaged in (
        kept.read_text().replace("elements_per_s", "elements"),
        kept.read_text().replace("1620000000.0", "0.0"),
    ):
        kept.write_text(damaged)
        assert predicted_speed(config(default_model_path())) is None


def test_a_prediction_gives_way_to_what_is_measured_and_never_takes_its_place() -> None:
    knowledge = Knowledge()
    assert knowledge.is_new_device
    knowledge.use_prediction(0.004, 0.05)
    assert (knowledge.device.k, knowledge.device.c) == pytest.approx((0.004, 0.05))
    kept = Knowledge.from_json(knowledge.to_json())
    assert not kept.is_new_device, "another start need not predict it again"
    assert knowledge.use_measured_speed(125.0)
    assert knowledge.device.k == pytest.approx(1 / 125)
    knowledge.use_prediction(0.004, 0.05)
    assert knowledge.device.k == pytest.approx(1 / 125)
    for _ in range(FEW):
        kept.device.add(100, 2.0)
    assert kept.device.predict(100) == pytest.approx(2.0, rel=0.1), "what was seen goes before both"


def test_a_profile_is_not_replaced_by_a_prediction() -> None:
    knowledge = Knowledge()
    knowledge.use_profile(1 / DEVICE_TPS, 0.3)
    assert not knowledge.is_new_device
    knowledge.use_prediction(0.004, 0.05)
    assert knowledge.device.c == pytest.approx(0.3)
