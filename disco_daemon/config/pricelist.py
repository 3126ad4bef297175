"""Reads the price lists that ship with the program, and the user's own, into a `Catalog`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ..errors import ConfigError
from ..money.catalog import Catalog, ServerProfile, parse
from ..system.smallfile import open_regular

MAX_BYTES = 1_000_000  # of one file; the largest shipped one has 5 kB


def load(own: Path | None = None) -> Catalog:
    """Return all price lists: those shipped, then every `*.toml` in the folder `own`, which go before them.

    The folder need not exist. Blocks on disk. Raises ConfigError that names file, key and mend.
    """
    return Catalog((*shipped_lists(), *_own(own)))


def shipped_lists() -> tuple[ServerProfile, ...]:
    """Return the lists in profiles/servers, by name."""
    folder = files("disco_daemon.profiles") / "servers"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda entry: entry.name)
    return tuple(_read(entry, entry.name) for entry in found)


def _own(folder: Path | None) -> Iterator[ServerProfile]:
    if folder is None or not folder.exists():
        return
    try:
        found = sorted(folder.glob("*.toml"))
    except OSError as e:
        raise ConfigError(f"{folder} cannot be read: {e.strerror}") from e
    for path in found:
        yield _read(path, str(path), own=True)


def _read(entry: Traversable, file: str, *, own: bool = False) -> ServerProfile:
    try:
        with open_regular(entry) if isinstance(entry, Path) else entry.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            msg = f"{file} is longer than {MAX_BYTES} bytes: a price list is not; move it out of this folder"
            raise ConfigError(msg)
        table = tomllib.loads(raw.decode("utf-8"))
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {e.strerror or e}") from e
    except ValueError as e:  # of TOML, and of UTF-8
        raise ConfigError(f"{file} is not valid TOML: {e}") from e
    return parse(entry.name.removesuffix(".toml"), table, file, own=own)
