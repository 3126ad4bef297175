"""Reads the price lists that ship with the program, the one that was fetched, and the user's own, into a `Catalog`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..money.catalog import Catalog, Price, ServerProfile, parse
from ..system.smallfile import open_regular

MAX_BYTES = 1_000_000  # of one file; the largest shipped one has 5 kB
FETCHED = "genai-prices.json"  # in the folder of the user's own lists: what `disco prices refresh` has written
MAX_FETCHED = 8 * 2**20  # bytes of that; it has some 300 kB


def load(own: Path | None = None) -> Catalog:
    """Return all price lists: those shipped, what was fetched since, then every `*.toml` in `own`, which go first.

    The folder need not exist. Blocks on disk. Raises ConfigError that names file, key and mend.
    """
    return Catalog((*_newest(shipped_lists(), fetched_lists(own)), *_own(own)))


def fetched_lists(folder: Path | None) -> tuple[ServerProfile, ...]:
    """Return the lists that `disco prices refresh` has written into a folder; none where it has not."""
    path = None if folder is None else folder / FETCHED
    if path is None or not path.exists():
        return ()
    mend = f"fetch it anew (`disco prices refresh`), or remove {path}"
    try:
        with open_regular(path) as f:
            raw = f.read(MAX_FETCHED + 1)
        if len(raw) > MAX_FETCHED:
            raise ConfigError(f"{path} is longer than {MAX_FETCHED} bytes: {mend}")
        return fetched(json.loads(raw), str(path))
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}; {mend}") from e
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is no fetched list of prices: {mend}") from e


def fetched(kept: Mapping[str, Any], file: str) -> tuple[ServerProfile, ...]:
    """Return the lists of a fetched document as it is kept. Raises ConfigError, as `load`."""
    said = {"source": kept["source"], "as_of": kept["as_of"]}
    return tuple(parse(name, said | table, f"{file}: {name}") for name, table in kept["servers"].items())


def _newest(shipped: tuple[ServerProfile, ...], found: tuple[ServerProfile, ...]) -> Iterator[ServerProfile]:
    """Yield the shipped lists with the prices that were found later, and the lists of servers that only those have."""
    of_name = {one.name: one for one in found}
    for listed in shipped:
        newer = of_name.pop(listed.name, None)
        yield listed if newer is None else replace(listed, models={**listed.models, **dict(_newer(listed, newer))})
    for one in of_name.values():
        yield replace(one, models={name: replace(price, is_extra=True) for name, price in one.models.items()})


def _newer(listed: ServerProfile, found: ServerProfile) -> Iterator[tuple[str, Price]]:
    """Yield the prices of a fetched list that are newer than the shipped one's; what a model can do stays known."""
    for name, price in found.models.items():
        old = listed.models.get(name)
        if old is None:
            yield name, replace(price, is_extra=True)
        elif price.as_of is not None and (old.as_of is None or old.as_of < price.as_of):
            yield name, replace(price, capabilities=old.capabilities.over(price.capabilities))


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
