"""When the device is split over two machines, and how it is made; what it takes is loaded then, since few are."""

from __future__ import annotations

from ...clock import Clock
from ...config.schema import Config
from ...endpoints.base import Endpoint
from ...endpoints.device import Device
from ...engine.supervisor import Engine
from ...errors import ConfigError
from ..device_settings import model_path
from ..managed_device import DeviceKind, Making
from ..whole_device import name_of, whole_config
from .check import checksum
from .joined_model import JoinedFolder

KEEP_WHOLE_S = 300.0  # that the whole model stays in memory behind the last private request, beside layers in use


class SplitKind(DeviceKind):
    """The lower layers in this machine's engine, the rest at a partner: `split.enabled`."""

    def is_wanted(self, config: Config) -> bool:
        """Whether this machine has joined a partner."""
        return config.split.enabled

    def identity(self, config: Config) -> str:
        """Return the partner and the cut."""
        return f"split with {config.split.partner} at {config.split.cut}"

    def make(self, config: Config, making: Making) -> Endpoint:
        """Return the device. Raises ConfigError."""
        making.require_unshaped("split.enabled")
        from .edge_device import make_edge

        device = make_edge(config, making.clock)
        device.whole = _whole_here(config, making.clock)
        return device


def _whole_here(config: Config, clock: Clock) -> Device | None:
    """Return the model that the partner computes, as a whole, if the configured file is just that; it is not loaded."""
    try:
        path = model_path(config.device)
        if checksum(path) != JoinedFolder().load().fingerprint:
            return None
    except ConfigError:
        return None
    keep_s = config.device.keep_alive_s or KEEP_WHOLE_S
    return Device(Engine(whole_config(config, path), clock, keep_alive_s=keep_s), name_of(path))
