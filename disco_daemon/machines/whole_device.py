"""The device as one engine of this machine with a whole model, and how its settings become the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ..clock import Clock
from ..config.layers import cache_path
from ..config.schema import AdapterSettings, Config, DeviceSettings
from ..endpoints.base import Endpoint
from ..endpoints.shaper import Shaped
from ..engine import wire
from ..engine.supervisor import Engine
from ..models import places
from ..models.text_models import text_kind
from ..profiling.autotuner import Autotuner
from ..profiling.saved import Measured
from ..system import smallfile
from ..system.control_groups import memory
from ..types import TextKind
from .device_settings import (
    header_of,
    is_exact,
    is_exact_but_for_rounding,
    knobs_for,
    kv_type,
    load_measured,
    make_autotuner,
    model_path,
    n_cpu_moe,
    n_gpu_layers,
    require_regular,
)
from .managed_device import DeviceKind, EngineDevice, Making, ManagedDevice

log = logging.getLogger("disco.daemon")


class WholeDevice(EngineDevice):
    """A whole model in one engine, whose knobs may be tuned."""

    def make_autotuner(self, config: Config, busy: Callable[[], bool], clock: Clock) -> Autotuner | None:
        """Return what measures the knobs once, while nobody asks; of a model that answers nothing there are none."""
        if self.expected_text_kind() is not None:
            return None
        return make_autotuner(config, self.engine, busy, clock)


class ShapedDevice(ManagedDevice, Shaped):
    """A whole model whose tokens come as an experiment says."""

    def is_same(self, other: Endpoint) -> bool:
        """Whether the model behind the other one would be this one's; all of a process have one shape."""
        return isinstance(other, ShapedDevice) and other.engine.is_set_as(self.engine)


class WholeKind(DeviceKind):
    """What the device is if no other kind is asked for."""

    def is_wanted(self, config: Config) -> bool:
        """Always, as the last of the kinds."""
        del config
        return True

    def identity(self, config: Config) -> str:
        """Return that it is this machine's engine; the model is named beside it."""
        del config
        return "engine"

    def measured(self, config: Config) -> Measured | None:
        """Return the figures of `disco profile` for this model and its knobs."""
        return load_measured(config)

    def make(self, config: Config, making: Making) -> Endpoint:
        """Return the device; its model is loaded by the early process, if nobody has taken that. Raises ConfigError."""
        path = model_path(config.device)
        engine = Engine(
            whole_config(config, path), making.clock, early=making.early, keep_alive_s=config.device.keep_alive_s
        )
        device = WholeDevice(engine, name_of(path))
        device.expected_n_ctx = expected_n_ctx(config.device, path)
        device.expected_text_kind = cache(lambda: text_kind_of(path))
        return device if making.shape is None else ShapedDevice(device, making.shape, making.clock)


def expected_n_ctx(settings: DeviceSettings, path: Path) -> Callable[[], int | None]:
    """Return what predicts the context of a model by the memory that is free now, once and when it is first asked.

    A start waits for none of that: mostly the model is in memory before anybody asks.
    """
    available = memory()[1]

    @cache
    def predicted() -> int | None:
        from .model_memory import predicted_n_ctx  # where somebody asks so early

        return predicted_n_ctx(settings, path, available)

    return predicted


def text_kind_of(path: Path) -> TextKind | None:
    """Return what a model makes of texts, by the beginning of its file; None if it answers, or cannot be read."""
    header = header_of(path)
    return None if header is None else text_kind(header, [path.stem])


def whole_config(config: Config, path: Path) -> wire.Load:
    """Return how the whole model in a file is loaded. Raises ConfigError."""
    settings = config.device
    knobs = knobs_for(config, path)
    if is_exact_but_for_rounding(config, path):
        log.warning("%s: rows of its weights do not round alike, so its answers are exact but for that", path)
    return wire.Load(
        model_path=str(path), n_ctx=settings.n_ctx, n_threads=knobs.n_threads, n_gpu_layers=n_gpu_layers(settings),
        n_cpu_moe=n_cpu_moe(settings), n_cells=settings.n_cells, scheduler=settings.scheduler,
        exact=is_exact(config, path),
        adapters=_adapters(settings), speculate=settings.speculation == "auto",
        chat_template=_chat_template(settings), disk=_disk(settings),
        draft_path=_file_of("device.draft_model", settings.draft_model) if settings.draft_model else "",
        n_threads_batch=knobs.n_threads_batch, n_ubatch=knobs.n_ubatch, flash_attn=knobs.flash_attn,
        kv_type=kv_type(settings), repack=knobs.repack,
    )  # fmt: skip


def name_of(path: Path) -> str:
    """Return a name for a model whose file is named by its checksum, as Ollama's are; "" for others."""
    if path.suffix:
        return ""
    return next((found.name for found in places.find() if found.path == path), "")


def _disk(settings: DeviceSettings) -> wire.Disk:
    return wire.Disk(
        folder=str(cache_path() / "kv"), max_bytes=int(settings.spill_gib * 2**30), idle_s=settings.spill_after_s
    )


def _chat_template(settings: DeviceSettings) -> str:
    """Return the text of `device.chat_template`. Raises ConfigError."""
    if not settings.chat_template:
        return ""
    return smallfile.read_text(Path(settings.chat_template).expanduser(), "device.chat_template ", hidden=0o002)


def _adapters(settings: DeviceSettings) -> tuple[wire.AdapterFile, ...]:
    wanted = {name: AdapterSettings(a) if isinstance(a, str) else a for name, a in settings.adapters.items()}
    return tuple(
        wire.AdapterFile(name=name, path=_file_of(f"device.adapters.{name}", adapter.path), scale=adapter.scale)
        for name, adapter in wanted.items()
    )


def _file_of(key: str, text: str) -> str:
    """Return the path that a setting names. Raises ConfigError where that is no file."""
    path = Path(text).expanduser()
    require_regular(key, path)
    return str(path)
