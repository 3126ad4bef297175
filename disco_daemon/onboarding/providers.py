"""The known servers, and the keys to them that exist already. A key is in no `repr`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ..config.layers import key_for, read_key_file
from ..config.schema import Config, ServerSettings
from ..config.servers import SERVER, alone, servers_of
from ..errors import ConfigError
from ..money.catalog import Catalog
from ..system.net import is_plain, origin
from .asking import goes_nowhere_public

_PORTS = {"http": 80, "https": 443}
_NO_KEY = {"server.api_key_env": "", "server.api_key_file": "", "server.key_origin": ""}


@dataclass(frozen=True, slots=True)
class Provider:
    """A known server: its short name, its title, its address, and where its keys are made and kept."""

    name: str
    title: str
    base_url: str
    key_url: str = ""
    key_env: str = ""


def providers(catalog: Catalog) -> list[Provider]:
    """Return all servers with an address, by title; of two of a name the later one, which is the user's own."""
    found = {
        p.name: Provider(p.name, p.title or p.name, p.urls[0], p.key_url, p.key_env)
        for p in catalog.profiles
        if p.urls and not p.reference
    }
    return sorted(found.values(), key=lambda p: p.title.casefold())


def find_provider(catalog: Catalog, name: str) -> Provider | None:
    """Return a provider by its name or its title, in any case."""
    wanted = name.casefold().strip()
    return next((p for p in providers(catalog) if wanted in (p.name.casefold(), p.title.casefold())), None)


def at(catalog: Catalog, base_url: str) -> Provider | None:
    """Return the provider at an address."""
    profile = catalog.server(base_url)
    return None if profile is None else next((p for p in providers(catalog) if p.name == profile.name), None)


# --- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerKey:
    """A key, its source ("" if there is none), and the settings with which the daemon finds it there."""

    value: str = field(default="", repr=False)
    source: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def key_path(folder: Path, base_url: str, name: str = "") -> Path:
    """Return the file for a server's key, below the folder of config.toml; `name` is that of one of `[[servers]]`.

    Two servers of one address may have keys of their own.
    """
    parts = urlsplit(base_url)
    host = re.sub(r"[^a-z0-9.-]", "_", (parts.hostname or "").casefold()).lstrip(".") or "server"
    usual = parts.port in (None, _PORTS.get(parts.scheme))
    at = host if usual else f"{host}_{parts.port}"
    return folder.absolute() / "keys" / (f"{name}@{at}" if name else at)


def known_key(
    path: Path, config: Config, base_url: str, catalog: Catalog, env: Mapping[str, str], name: str = ""
) -> ServerKey:
    """Return the existing key for a server: as configured, as kept by an earlier setup, or in a variable.

    `path` is config.toml, and `name` that of one of `[[servers]]`, for which another one's key for its address does.
    A key goes only to its origin (`config.layers.key_for`), and never in the clear. Raises ConfigError for a file that
    others can read.
    """
    own = servers_of(config).get(name or SERVER, config.server if not name else ServerSettings())
    if is_plain(base_url) and not own.insecure and not goes_nowhere_public(base_url):
        return ServerKey(settings=_NO_KEY)
    if name:
        for one in (own, *servers_of(config).values()):
            if one.base_url and (value := _key_of(alone(config, one), base_url, env)):
                named_so = env.get(one.api_key_env)
                places = {
                    "server.api_key_env": one.api_key_env if named_so else "",
                    "server.api_key_file": one.api_key_file,
                }
                return ServerKey(
                    value,
                    f"${one.api_key_env}" if named_so else one.api_key_file,
                    {**places, "server.key_origin": origin(base_url)},
                )
        given = key_path(path.parent, base_url, name)
        if given.exists() and (value := read_key_file(given)):
            return ServerKey(value, str(given), _in_file(given, base_url))
    elif config.server.base_url and (value := key_for(config, base_url, env)):
        named_so = env.get(config.server.api_key_env)
        source = f"${config.server.api_key_env}" if named_so else config.server.api_key_file
        return ServerKey(value, source, {"server.key_origin": origin(base_url)})
    kept = key_path(path.parent, base_url)
    # Of two origins at one host the one with https has the file: its key is not for the other one.
    shared = is_plain(base_url) and urlsplit(base_url).port in (None, _PORTS["http"])
    if not shared and kept.exists() and (value := read_key_file(kept)):
        return ServerKey(value, str(kept), _in_file(kept, base_url))
    provider = at(catalog, base_url)
    variable = provider.key_env if provider is not None else ""
    value = env.get(variable, "") if variable else ""
    settings = _NO_KEY | {"server.api_key_env": variable, "server.key_origin": origin(base_url) if variable else ""}
    return ServerKey(value, f"${variable}" if value else "", settings)


def _key_of(config: Config, base_url: str, env: Mapping[str, str]) -> str:
    """Return the key of the one server of these settings if it may go there; "" also where its file is ill."""
    try:
        return key_for(config, base_url, env)
    except ConfigError:
        return ""


def new_key(path: Path, base_url: str, value: str, name: str = "") -> ServerKey:
    """Return a newly given key; `saving` writes it where its settings say. No variable goes before it."""
    kept = key_path(path.parent, base_url, name)
    return ServerKey(value, str(kept), _in_file(kept, base_url))


def has_key(path: Path, config: Config, base_url: str, catalog: Catalog, env: Mapping[str, str], name: str = "") -> str:
    """Return the source of the key for a server, "" if there is none that can be used."""
    try:
        return known_key(path, config, base_url, catalog, env, name).source
    except ConfigError:
        return ""


def _in_file(kept: Path, base_url: str) -> dict[str, str]:
    return _NO_KEY | {"server.api_key_file": str(kept), "server.key_origin": origin(base_url)}
