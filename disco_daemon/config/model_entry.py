"""Writes an entry of `[[models]]` into config.toml, and takes one out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .document_edits import without_entry
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
