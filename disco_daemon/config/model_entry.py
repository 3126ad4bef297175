"""Writes an entry of `[[models]]` into config.toml, and takes one out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .layers import changing, load, write_private

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def add_model(path: Path, name: str, model: str) -> None:
    """Name one more model of this machine, and keep comments; nothing is written unless all is valid then.

    Raises ConfigError.
    """
    import tomlkit  # for whom writes settings

    def add(document: TOMLDocument) -> None:
        if "models" not in document:
            document["models"] = tomlkit.aot()
        entry = tomlkit.table()
        entry.update({"name": name, "model": model})
        document["models"].append(entry)

    _change(path, add)


def remove_model(path: Path, name: str) -> None:
    """Take a model out of the settings, and keep what stands beside it; nothing is written unless all is valid then.

    Raises ConfigError, also where a rule names it.
    """
    _change(path, lambda document: without_entry(document, "models", name))


def without_entry(document: TOMLDocument, table: str, name: str) -> TOMLDocument:
    """Return settings without the entry of `[[table]]` that is called so; comments before and behind it stay.

    To tomlkit what stands behind an entry is part of it, such as an entry that was commented out by hand.
    """
    import tomlkit

    entries: Any = document.get(table, [])
    at = next((i for i, entry in enumerate(entries) if entry.get("name") == name), None)
    if at is None:
        return document
    lines = tomlkit.dumps(document).splitlines(keepends=True)
    del entries[at]
    if not entries:
        document.pop(table, None)
    heads = [i for i, line in enumerate(lines) if re.match(rf"\s*\[\[\s*{table}\s*\]\]", line)]
    if at >= len(heads):  # it is written as an array
        return document
    inner = re.compile(rf"\s*\[\s*{table}\s*\.|\s*[^\s\[]|\s*$")
    end = next((i for i in range(heads[at] + 1, len(lines)) if not inner.match(lines[i])), len(lines))
    while not lines[end - 1].partition("#")[0].strip():
        end -= 1
    try:
        found = tomlkit.parse("".join([*lines[: heads[at]], *lines[end:]]))
    except tomlkit.exceptions.ParseError:  # a text over several lines looks like a head
        return document
    return found if found.unwrap() == document.unwrap() else document


def _change(path: Path, work: Callable[[TOMLDocument], TOMLDocument | None]) -> None:
    import tomlkit

    with changing(path):
        document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
        text = tomlkit.dumps(work(document) or document)
        with tempfile.TemporaryDirectory(prefix="disco-config-") as folder:
            tried = Path(folder) / path.name
            tried.write_text(text, "utf-8")
            try:
                load(tried)
            except ConfigError as e:
                raise ConfigError(str(e).replace(str(tried), str(path))) from e
        write_private(path, text)
