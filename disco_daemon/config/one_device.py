"""The rules of the settings about what the device is: whole, or split over two machines; never two of them. Pure."""

from __future__ import annotations

from ..errors import ConfigError
from .schema import Config


def check_device(config: Config) -> None:
    """Raise ConfigError if the device would be two things at once, or what cannot be done yet."""
    split, device = config.split, config.device
    if split.partner and not _is_address(split.partner):
        msg = f"split.partner = {split.partner!r} is no address such as desktop.local:{config.peer.port}"
        raise ConfigError(msg)
    if not split.enabled:
        return
    others = {"partner.enabled": config.partner.enabled, "device.base_url": bool(device.base_url)}
    if other := next((key for key, is_set in others.items() if is_set), None):
        msg = (
            f"split.enabled and {other} do not go together: a device is whole, or split, or another program's model; "
            "`disco split leave` makes it whole again"
        )
        raise ConfigError(msg)
    if not split.partner or split.cut is None:
        msg = (
            "split.enabled needs a partner and a cut: run `disco partner pair` on the other machine, and here the "
            "`disco split join` that it prints"
        )
        raise ConfigError(msg)


def _is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, or [HOST]:PORT for IPv6."""
    host, _, port = text.rpartition(":")
    return bool(host.strip("[]")) and not host.isspace() and port.isdigit() and 1 <= int(port) <= 65535
