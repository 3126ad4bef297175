"""Writes an entry of `[[servers]]` into config.toml, and keeps all else in it, comments too, also of a list by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from .document_edits import put, without_entry
from .layers import NEWEST, SCHEMA, load, write_private
from .schema import Config, NamedServer
from .servers import check_servers


def entry_of(config: Config, name: str) -> NamedServer | None:
    """Return a server of the list by its name."""
    return next((one for one in config.servers if one.name == name), None)


def with_entry(config: Config, name: str, values: Mapping[str, Any] | None) -> Config:
    """Return the settings with these values of a server of the list, which is added where there is none of that name.

    None takes it away. Raises ConfigError for what is no server.
    """
    before = entry_of(config, name)
    others = [one for one in config.servers if one is not before]
    if values is None:
        return msgspec.structs.replace(config, servers=tuple(others))
    was = {} if before is None else msgspec.to_builtins(before)
    try:
        entry = msgspec.convert({**was, **values, "name": name}, NamedServer)
    except msgspec.ValidationError as e:
        if "$.name" in str(e):
            msg = f"{name!r} is no name for a further server: take letters, digits, '.', '_' and '-', such as 'box'"
            raise ConfigError(f"{msg}; 'server', 'device' and 'disco' have a meaning already") from e
        raise ConfigError(f"[[servers]] {name}: {e}") from e
    place = len(others) if before is None else config.servers.index(before)
    found = msgspec.structs.replace(config, servers=(*others[:place], entry, *others[place:]))
    check_servers(found)
    return found


def write_entry(path: Path, name: str, values: Mapping[str, Any] | None) -> None:
    """Write these values of a server of the list; None takes it away. To be called within `layers.changing`.

    Nothing is written, and ConfigError raised, unless the file then says that and all that it said before.
    """
    import tomlkit  # for whom writes settings
    from tomlkit.items import Array

    wanted = with_entry(load(path, env={}), name, values)
    document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
    if not path.exists():
        document[SCHEMA] = NEWEST
    if values is None:
        _write_if(path, tomlkit.dumps(without_entry(document, "servers", name)), wanted)
        return
    if "servers" not in document:
        document["servers"] = tomlkit.aot()
    entries: Any = document["servers"]
    at = next((i for i, one in enumerate(entries) if one.get("name") == name), None)
    if at is None:
        is_inline = isinstance(entries, Array)
        new = tomlkit.inline_table() if is_inline else tomlkit.table()
        new.update({"name": name, **{key: value for key, value in values.items() if not _is_default(key, value)}})
        entries.append(new)
    else:
        for key, value in values.items():
            if _is_default(key, value):
                entries[at].pop(key, None)
            else:
                put(entries[at], key, value)
    _write_if(path, tomlkit.dumps(document), wanted)


def _is_default(key: str, value: Any) -> bool:
    field = next(one for one in msgspec.structs.fields(NamedServer) if one.name == key)
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return bool(value == default)


def _write_if(path: Path, text: str, wanted: Config) -> None:
    """Write a text that says these settings. Raises ConfigError where it does not, and then nothing is written."""
    with tempfile.TemporaryDirectory(prefix="disco-config-") as folder:
        tried = Path(folder) / path.name
        tried.write_text(text, "utf-8")
        try:
            found = load(tried, env={})
        except ConfigError as e:
            raise ConfigError(str(e).replace(str(tried), str(path))) from e
    if found != wanted:
        raise ConfigError(f"[[servers]] of {path} is written in a way that cannot be changed here: edit it by hand")
    write_private(path, text)
