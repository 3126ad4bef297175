"""Writes an entry of `[[models]]` into config.toml."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..errors import ConfigError
from .layers import changing, load, write_private


def add_model(path: Path, name: str, model: str) -> None:
    """Name one more model of this machine, and keep comments; nothing is written unless all is valid then.

    Raises ConfigError.
    """
    import tomlkit  # for whom writes settings

    with changing(path):
        document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
        if "models" not in document:
            document["models"] = tomlkit.aot()
        entry = tomlkit.table()
        entry.update({"name": name, "model": model})
        document["models"].append(entry)
        text = tomlkit.dumps(document)
        with tempfile.TemporaryDirectory(prefix="disco-config-") as folder:
            tried = Path(folder) / path.name
            tried.write_text(text, "utf-8")
            try:
                load(tried)
            except ConfigError as e:
                raise ConfigError(str(e).replace(str(tried), str(path))) from e
        write_private(path, text)
