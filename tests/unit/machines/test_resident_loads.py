"""How one of several models is loaded, and that a lone one is loaded as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.config.schema import Config, DeviceSettings, ModelSettings
from disco_daemon.machines.resident_models import make_models
from disco_daemon.machines.whole_device import whole_config
from tests.fixtures.tiny_models import tiny_model


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = str(tiny_model(tmp_path / "tiny.gguf", "moe"))
    return Config(device=DeviceSettings(model=path), models=(ModelSettings("tiny", path),))


def test_a_named_model_is_on_one_gpu_and_the_devices_own_on_all(config: Config) -> None:
    def nothing(name: str) -> Any:
        del name

    named = make_models(config, SystemClock(), {}, nothing)["tiny"]
    assert named.device.engine.config.one_gpu
    assert not whole_config(config, Path(config.device.model)).one_gpu
