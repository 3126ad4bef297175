"""Binds the server's API key to the server's origin, at the daemon's first start with it."""

from __future__ import annotations

import logging
from pathlib import Path

from ..config.layers import find_key, set_values, with_values
from ..config.schema import Config
from ..errors import ConfigError
from ..system.net import origin

log = logging.getLogger("disco.daemon")

SETTING = "server.key_origin"


def bind_key(config: Config, path: Path, before: str = "") -> Config:
    """Return the settings with the key's origin: as set, as it was `before` a reload, or else as configured now.

    An origin that was not set is written into config.toml at `path`, and logged. If that fails, the binding holds for
    the life of this process. Blocks on disk.
    """
    server = config.server
    if server.key_origin or not server.base_url or not _has_key(config):
        return config
    owner = before or origin(server.base_url)
    if not before:
        try:
            set_values(path, {SETTING: owner})
            log.info("the server's API key is for %s from now on (%s, written to %s)", owner, SETTING, path)
        except (OSError, ConfigError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            log.warning("the server's API key is for %s; that cannot be kept in %s: %s", owner, path, why)
    return with_values(config, {SETTING: owner})


def _has_key(config: Config) -> bool:
    try:
        return bool(find_key(config))
    except ConfigError:  # reported where the key is taken
        return False
