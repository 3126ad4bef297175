"""Writes down a choice: a server with its key, a local model. All of it, or nothing.

The key goes into a file of its own, `keys/HOST` beside config.toml: mode 0600 from the first moment, its folder 0700.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.layers import changing, get_value, load, require_complete, with_values, write_private, write_values
from ..config.schema import Config
from ..errors import ConfigError
from ..models.default import installed_models
from ..system.net import is_plain
from ..system.smallfile import open_regular
from .providers import ServerKey, key_path

_MAGIC = b"GGUF"
DEFAULT = "default"  # the name of the model that ships


@dataclass(frozen=True, slots=True)
class Choice:
    """The changes that the user chose; None changes nothing. An empty `base_url` removes the server.

    `local` is `device.model`.
    """

    base_url: str | None = None
    model: str = ""
    key: ServerKey = field(default_factory=ServerKey)
    local: str | None = None


def save(path: Path, choice: Choice) -> dict[str, Any]:
    """Write a choice into config.toml at `path` and its key beside it; return the settings that were written.

    Comments stay. Raises ConfigError, and then nothing has changed. Blocks on disk. What other programs set meanwhile
    comes before it or behind it: changes are worked out from the settings that they are written to.
    """
    try:
        with changing(path):
            return _save(path, choice)
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror or e}"
        raise ConfigError(msg) from e


def _save(path: Path, choice: Choice) -> dict[str, Any]:
    config = load(path, env={})
    changes = _changes(config, choice)
    require_complete(with_values(config, changes))
    file = changes.get("server.api_key_file")
    # Only a new key has to be written: others have their place.
    fresh = bool(choice.key.value) and choice.base_url and file == str(key_path(path.parent, choice.base_url))
    with _write_key(Path(file or ""), choice.key.value) if fresh else nullcontext():
        write_values(path, changes)
    return changes


def _changes(config: Config, choice: Choice) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if choice.base_url is not None:
        changes = {"server.base_url": choice.base_url, "server.model": choice.model, **choice.key.settings}
        if not choice.base_url:
            changes |= {"server.model": "", "server.key_origin": ""}
            changes |= {"server.api_key_file": "", "server.api_key_env": "OPENAI_API_KEY"}
        changes |= _outdated(config, choice)
    if choice.local is not None:
        changes["device.model"] = choice.local
        if not config.device.enabled:
            changes["device.enabled"] = True
    return changes


def _outdated(config: Config, choice: Choice) -> dict[str, Any]:
    """Return settings of the server before that are wrong for this one: prices, the way to continue an answer."""
    before = config.server
    changes: dict[str, Any] = {}
    if (before.base_url, before.model) != (choice.base_url, choice.model):
        changes = {f"server.{name}": None for name in ("input_usd_per_mtok", "output_usd_per_mtok")}
    if before.base_url != choice.base_url:
        changes["server.continuation"] = "auto"
        if not is_plain(choice.base_url or ""):  # the user agreed to it for another server
            changes["server.insecure"] = False
    return {key: value for key, value in changes.items() if get_value(config, key) != value}


@contextmanager
def _write_key(file: Path, key: str) -> Iterator[None]:
    """Put the key into its file; restore the file if the context fails."""
    try:
        before = file.read_text("utf-8") if file.exists() else None
        for folder in (file.parent.parent, file.parent):  # mkdir gives its mode to the last one only
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.parent.chmod(0o700)
        write_private(file, f"{key}\n")
    except (OSError, UnicodeDecodeError) as e:
        msg = f"the key cannot be written to {file}: {getattr(e, 'strerror', None) or e}"
        raise ConfigError(msg) from e
    try:
        yield
    except BaseException:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            write_private(file, before)
        raise


def overriding_variables(changes: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Return the variables that override the settings just written."""
    return [name for key in changes if (name := f"DISCO_{key.replace('.', '_').upper()}") in env]


# --- the local model --------------------------------------------------------------------------------------------------


def local_model(name: str) -> str:
    """Return `device.model` for a model on this machine: by name, by path, or `default`.

    Raises ConfigError if there is none.
    """
    if name == DEFAULT:
        return ""
    here = installed_models()
    for model in here:
        if name in (model["name"], model["path"], model["name"].removesuffix(".gguf")):
            return "" if model["default"] else model["path"]
    path = Path(name).expanduser().absolute()
    try:
        with open_regular(path) as f:
            if f.read(len(_MAGIC)) == _MAGIC:
                return str(path)
        problem = "is no GGUF file"
    except OSError as e:
        problem = f"cannot be read: {e.strerror}"
    names = ", ".join([DEFAULT, *(model["name"] for model in here if not model["default"])])
    msg = f"{path} {problem}; give the path of a GGUF file, or one of {names}"
    raise ConfigError(msg)
