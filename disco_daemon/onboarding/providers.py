"""The servers that are known, and the keys to them that are there already. A key is in no `repr`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config import read_key_file, server_api_key
from ..errors import ConfigError
from ..money.catalog import Catalog, is_private
from ..net import hostname
from ..settings import Config

_PORTS = {"http": 80, "https": 443}
_NO_KEY = {"server.api_key_env": "", "server.api_key_file": ""}


@dataclass(frozen=True, slots=True)
class Provider:
    """A server that is known: its short name, what people call it, its address, and where keys are made and kept."""

    name: str
    title: str
    base_url: str
    key_url: str = ""
    key_env: str = ""


def providers(catalog: Catalog) -> list[Provider]:
    """All that have an address, by title; of two of a name the later one, which is the user's own."""
    found = {
        p.name: Provider(p.name, p.title or p.name, p.urls[0], p.key_url, p.key_env)
        for p in catalog.profiles
        if p.urls and not p.reference
    }
    return sorted(found.values(), key=lambda p: p.title.casefold())


def named(catalog: Catalog, name: str) -> Provider | None:
    """A provider by its name or its title, however written."""
    wanted = name.casefold().strip()
    return next((p for p in providers(catalog) if wanted in (p.name.casefold(), p.title.casefold())), None)


def at(catalog: Catalog, base_url: str) -> Provider | None:
    """The provider at an address."""
    profile = catalog.server(base_url)
    return None if profile is None else next((p for p in providers(catalog) if p.name == profile.name), None)


# --- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """A key, where it comes from ("" if there is none), and which settings have the daemon find it there."""

    value: str = field(default="", repr=False)
    source: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def key_path(folder: Path, base_url: str) -> Path:
    """Where the key of a server is kept, below the folder of config.toml."""
    parts = urlsplit(base_url)
    host = re.sub(r"[^a-z0-9.-]", "_", (parts.hostname or "").casefold()).lstrip(".") or "server"
    usual = parts.port in (None, _PORTS.get(parts.scheme))
    return folder.absolute() / "keys" / (host if usual else f"{host}_{parts.port}")


def known_key(path: Path, config: Config, base_url: str, catalog: Catalog, env: Mapping[str, str]) -> Key:
    """The key for a server that is there already: as configured, as kept by an earlier setup, or in a variable.

    `path` is config.toml. A key goes only to the origin that it is for, and to nobody in the clear.
    Raises ConfigError for a file that others can read.
    """
    if urlsplit(base_url).scheme != "https" and not is_private(hostname(base_url)):
        return Key(settings=_NO_KEY)
    if _origin(base_url) == _origin(config.server.base_url) and (value := server_api_key(config, env)):
        named_so = env.get(config.server.api_key_env)
        return Key(value, f"${config.server.api_key_env}" if named_so else config.server.api_key_file)
    kept = key_path(path.parent, base_url)
    if kept.exists() and (value := read_key_file(kept)):
        return Key(value, str(kept), _in_file(kept))
    provider = at(catalog, base_url)
    variable = provider.key_env if provider is not None else ""
    settings = _NO_KEY | {"server.api_key_env": variable}
    value = env.get(variable, "") if variable else ""
    return Key(value, f"${variable}" if value else "", settings)


def new_key(path: Path, base_url: str, value: str) -> Key:
    """A key that somebody has just given; `saving` writes it where its settings say. No variable goes before it."""
    kept = key_path(path.parent, base_url)
    return Key(value, str(kept), _in_file(kept))


def has_key(path: Path, config: Config, base_url: str, catalog: Catalog, env: Mapping[str, str]) -> str:
    """Where a key for a server is, "" if there is none that can be used."""
    try:
        return known_key(path, config, base_url, catalog, env).source
    except ConfigError:
        return ""


def _in_file(kept: Path) -> dict[str, str]:
    return _NO_KEY | {"server.api_key_file": str(kept)}


def _origin(url: str) -> tuple[Any, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
