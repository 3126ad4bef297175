"""The settings of a device become what its engine is told, and another device is one whose engine is told else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_daemon.config.schema import Config, DeviceSettings, ServerSettings
from disco_daemon.daemon.endpoints import make_endpoints
from disco_daemon.endpoints.base import Endpoint
from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.machines import device_settings, model_memory, whole_device
from disco_daemon.machines.device_settings import longest_answer
from disco_daemon.machines.managed_device import Making
from disco_daemon.machines.whole_device import WholeDevice
from disco_daemon.models.default import default_model_path
from disco_daemon.system.control_groups import memory
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


SHAPE: dict[str, Any] = {
    "general__architecture": "llama", "llama__block_count": 30, "llama__embedding_length": 576,
    "llama__attention__head_count": 9, "llama__attention__head_count_kv": 3, "llama__context_length": 131_072,
    "llama__vocab_size": 49_152,
}  # fmt: skip
GIB = 2**30


def test_a_context_is_known_before_the_model_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(model, **SHAPE)
    known = dict[int, int | None]()
    for free in (GIB, 4 * GIB, 64 * GIB):
        monkeypatch.setattr(whole_device, "memory", lambda free=free: (64 * GIB, free))
        made = device(model)
        asked = model_memory.checkup_request(DeviceSettings(model=str(model)), model, 0)
        assert made.capabilities.context_length == made.readiness().n_ctx == fit(asked, free, 0).n_ctx
        known[free] = made.n_ctx
        assert device(model, n_ctx=1024).n_ctx == 1024
    assert 512 < (known[GIB] or 0) < (known[4 * GIB] or 0) < (known[64 * GIB] or 0) == 131_072
    monkeypatch.setattr(whole_device, "memory", lambda: (GIB, GIB // 2))
    assert 512 <= (device(model, n_ctx=100_000).n_ctx or 0) < 100_000, "as the engine will cut it"


@pytest.mark.parametrize("layers", [5000, 10**9, 2**31])
def test_a_header_that_tells_of_more_layers_than_any_model_has_is_no_more_than_unknown(
    model: Path, layers: int
) -> None:
    gguf(model, **SHAPE | {"llama__block_count": layers})
    with pytest.raises(ValueError, match=r"layers|shape|block_count"):
        model_memory.checkup_request(DeviceSettings(model=str(model)), model, 0)
    assert device(model).n_ctx is None


def test_a_context_that_only_the_engine_can_know_is_not_guessed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device(model).n_ctx is None, "the file tells nothing of its shape"
    gguf(model, **SHAPE)
    monkeypatch.setattr(whole_device, "memory", lambda: (64 * GIB, 64 * GIB))
    lib = model.parent / "llama_cpp" / "lib"
    lib.mkdir(parents=True)
    found = SimpleNamespace(submodule_search_locations=[str(lib.parent)])
    monkeypatch.setattr(device_settings, "find_spec", lambda _: found)
    assert device(model).n_ctx is None, "no library that says what it is built for"
    for name in ("libggml.so", "libggml-base.so.0", "libggml-cpu-haswell.so", "libllama.so"):
        (lib / name).touch()
    assert device(model).n_ctx == 131_072
    (lib / "libggml-cuda.so").touch()
    assert device(model).n_ctx is None, "the memory of a GPU counts, too"
    assert device(model, n_ctx=4096).n_ctx == 4096
    assert device(model, n_gpu_layers=0).n_ctx == 131_072


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
@pytest.mark.parametrize("n_ctx", [0, 700])
def test_what_is_predicted_is_what_is_loaded(n_ctx: int) -> None:
    path = default_model_path()
    load = wire.Load(model_path=str(path), n_ctx=n_ctx, n_threads=1, kv_type="auto")
    llama = Llama(load, AbortFlag(), warm=False)
    assert (
        model_memory.predicted_n_ctx(DeviceSettings(n_ctx=n_ctx), path, memory()[1]) == llama.n_ctx == (n_ctx or 8192)
    )
    llama.close()
