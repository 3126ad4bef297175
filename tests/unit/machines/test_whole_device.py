"""The settings of a device become what its engine is told, and another device is one whose engine is told else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_daemon.config.schema import Config, DeviceSettings, ServerSettings
from disco_daemon.daemon.endpoints import make_endpoints
from disco_daemon.endpoints.base import Endpoint
from disco_daemon.engine import wire
from disco_daemon.machines.device_settings import longest_answer
from disco_daemon.machines.managed_device import Making
from disco_daemon.machines.whole_device import WholeDevice
from disco_daemon.types import Side
from tests.fixtures.clock import StoppedClock
from tests.fixtures.gguf import gguf, header

# Of each setting that the engine is told: another value than the default, and what it is told then.
TOLD: dict[str, tuple[Any, str, Any]] = {
    "n_ctx": (512, "n_ctx", 512),
    "n_cells": (1024, "n_cells", 1024),
    "scheduler": ("fcfs", "scheduler", "fcfs"),
    "n_threads": (3, "n_threads", 3),
    "n_threads_batch": (5, "n_threads_batch", 5),
    "n_ubatch": (64, "n_ubatch", 64),
    "flash_attn": ("off", "flash_attn", False),
    "kv_type": ("q8_0", "kv_type", "q8_0"),
    "rounding": ("exact", "exact", True),
    "n_gpu_layers": (7, "n_gpu_layers", 7),
    "n_cpu_moe": (3, "n_cpu_moe", 3),
    "speculation": ("off", "speculate", False),
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    path = tmp_path / "m.gguf"
    path.write_bytes(header())
    return path


def device(model: Path, **settings: Any) -> WholeDevice:
    config = Config(device=DeviceSettings(model=str(model), **settings), server=ServerSettings(base_url=""))
    found: Endpoint = make_endpoints(config, Making(StoppedClock()))[Side.DEVICE]
    assert isinstance(found, WholeDevice)
    return found


def test_each_setting_of_the_device_reaches_the_engine(model: Path) -> None:
    plain = device(model)
    for name, (value, field, told) in TOLD.items():
        other = device(model, **{name: value})
        assert getattr(other.engine.config, field) == told != getattr(plain.engine.config, field), name
        assert not other.is_same(plain), f"device.{name} takes a new engine"
    file = model.with_name("other")
    file.write_text("{{ x }}")
    file.chmod(0o600)
    files = device(model, chat_template=str(file), draft_model=str(file), adapters={"a": str(file)}).engine.config
    assert (files.model_path, files.chat_template, files.draft_path) == (str(model), "{{ x }}", str(file))
    assert files.adapters == (wire.AdapterFile(name="a", path=str(file)),)
    spilling = device(model, spill_gib=1.0, spill_after_s=9.0).engine.config.disk
    assert spilling is not None
    assert (spilling.max_bytes, spilling.idle_s) == (2**30, 9.0)
    kept = device(model, keep_alive_s=5.0)
    assert (kept.engine.keep_alive_s, kept.engine.config, kept.is_same(plain)) == (5.0, plain.engine.config, False)


def test_a_device_of_the_same_settings_is_the_same_and_what_the_engine_is_not_told_takes_no_new_one(
    model: Path,
) -> None:
    assert device(model).is_same(device(model))
    assert device(model, watts=5.0, usd_per_kwh=1.0, autotune=False).is_same(device(model))


def test_an_answer_is_bounded_as_set_or_as_the_model_was_trained(tmp_path: Path) -> None:
    model = gguf(tmp_path / "m.gguf", general__architecture="llama", llama__context_length=2048)
    assert longest_answer(DeviceSettings(model=str(model))) == 2048
    assert longest_answer(DeviceSettings(model=str(model), n_ctx=512)) == 512
    assert longest_answer(DeviceSettings(model=str(tmp_path / "none"))) is None
    model.write_bytes(b"no model")
    assert longest_answer(DeviceSettings(model=str(model))) is None
