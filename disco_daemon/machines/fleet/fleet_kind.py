"""When the device is a fleet, and how it is made; what it takes is loaded then, since few are."""

from __future__ import annotations

from ...config.schema import Config
from ...endpoints.base import Endpoint
from ..device_settings import model_path
from ..managed_device import DeviceKind, Making
from ..whole_device import WholeKind, name_of, whole_config


class FleetKind(DeviceKind):
    """Inner layers in hosts of this machine or of others: `fleet.enabled`."""

    def is_wanted(self, config: Config) -> bool:
        """Whether the device is to be a fleet."""
        return config.fleet.enabled

    def identity(self, config: Config) -> str:
        """Return the number of processes and the cuts."""
        fleet = config.fleet
        return f"fleet of {fleet.hosts + 1} at {','.join(map(str, fleet.cuts)) or 'cuts of its own'}"

    def make(self, config: Config, making: Making) -> Endpoint:
        """Return the fleet, or the whole device while there is no host. Raises ConfigError."""
        from .local_fleet import make_fleet, n_hosts

        if not n_hosts(config, making.members):
            return WholeKind().make(config, making)
        making.require_unshaped("fleet.enabled")
        path = model_path(config.device)
        return make_fleet(config, whole_config(config, path), name_of(path), making.clock, making.members)
