"""The rules of the settings about what the device is: whole, or split over two machines, or a fleet. Pure."""

from __future__ import annotations

import itertools

from ..errors import ConfigError
from .schema import Config

# What a person types to have the device whole again, by what else it is.
_ENDS = {
    "split.enabled": "`disco machines leave`",
    "fleet.enabled": "`disco config set fleet.enabled false`",
    "partner.enabled": "`disco config set partner.enabled false`",
    "device.base_url": "`disco config set device.base_url ''`",
}


def check_device(config: Config) -> None:
    """Raise ConfigError if the device would be two things at once, or what cannot be done yet."""
    split, fleet = config.split, config.fleet
    if split.partner and not _is_address(split.partner):
        raise ConfigError(f"split.partner = {split.partner!r} is no address such as desktop.local:{config.peer.port}")
    _check_cuts(config)
    if split.enabled:
        _refuse_other(config, "split.enabled")
    if fleet.enabled:
        _refuse_other(config, "fleet.enabled")
        _check_fleet(config)
    if split.enabled and (not split.partner or split.cut is None):
        msg = (
            "split.enabled needs a partner and a cut: run `disco machines pair` on the other machine, and here the "
            "`disco machines join` that it prints"
        )
        raise ConfigError(msg)


def _refuse_other(config: Config, own: str) -> None:
    """Raise ConfigError if the device is something else beside what `own` says.

    It says how to end either: one who has just set one of them may want to keep that, and cannot be told from the file.
    """
    kinds = {
        "split.enabled": config.split.enabled,
        "fleet.enabled": config.fleet.enabled,
        "partner.enabled": config.partner.enabled,
        "device.base_url": bool(config.device.base_url),
    }
    if other := next((key for key, is_set in kinds.items() if is_set and key != own), None):
        msg = (
            f"{own} and {other} do not go together: a device is whole, or split, or a fleet, or another program's "
            f"model; {_ENDS[own]} ends the one, {_ENDS[other]} the other"
        )
        raise ConfigError(msg)


def _check_cuts(config: Config) -> None:
    """Raise ConfigError for cuts that are none, whether the fleet is enabled or not: no value is taken for nothing."""
    fleet = config.fleet
    if fleet.cuts and (
        len(fleet.cuts) < max(2, fleet.hosts + 1)
        or any(first >= last for first, last in itertools.pairwise(fleet.cuts))
    ):
        msg = (
            f"fleet.cuts = {list(fleet.cuts)}: a host takes the layers between two cuts, so give "
            f"{max(2, fleet.hosts + 1)} numbers, each above the one before, and one more for each other machine"
        )
        raise ConfigError(msg)


def _check_fleet(config: Config) -> None:
    """Raise ConfigError for settings of the device that do nothing in a fleet, with the reason."""
    device = config.device
    if device.draft_model:
        raise ConfigError(
            "device.draft_model and fleet.enabled do not go together: guessed tokens are not computed along with rows "
            "that travel to hosts yet; unset one of them"
        )
    if device.n_gpu_layers not in ("auto", 0):
        msg = (
            f"device.n_gpu_layers = {device.n_gpu_layers} and fleet.enabled do not go together: a fleet's layers are "
            "computed by processors so far; set it to auto or 0"
        )
        raise ConfigError(msg)


def _is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, or [HOST]:PORT for IPv6."""
    host, _, port = text.rpartition(":")
    return bool(host.strip("[]")) and not host.isspace() and port.isdigit() and 1 <= int(port) <= 65535
