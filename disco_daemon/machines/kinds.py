"""The kinds of devices. The settings are shown to each in this order; the first that they ask for makes the device."""

from __future__ import annotations

from ..config.schema import Config
from ..endpoints.base import Endpoint
from ..types import Side
from .fleet.fleet_kind import FleetKind
from .managed_device import DeviceKind, Making
from .split.split_kind import SplitKind
from .whole_device import WholeKind


class LocalServerKind(DeviceKind):
    """Another program of this machine with OpenAI's API: `device.base_url`. There is nothing of it to manage."""

    def is_wanted(self, config: Config) -> bool:
        """Whether such a program is named."""
        return bool(config.device.base_url)

    def identity(self, config: Config) -> str:
        """Return its address."""
        return config.device.base_url

    def make(self, config: Config, making: Making) -> Endpoint:
        """Return a client of it. Raises ConfigError."""
        making.require_unshaped("device.base_url")
        from ..endpoints.server import Server, ServerConfig  # with OpenAI's library, which few devices need

        return Server(ServerConfig(config.device.base_url, config.device.model, api_key=""), Side.DEVICE)


KINDS: list[DeviceKind] = [SplitKind(), LocalServerKind(), FleetKind(), WholeKind()]


def kind_of(config: Config) -> DeviceKind:
    """Return the kind of device that the settings ask for: a whole model, if nothing else."""
    return next(kind for kind in KINDS if kind.is_wanted(config))
