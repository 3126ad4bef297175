"""What `disco models` knows of the models of `[[models]]`: which files they are, how they are now, and naming one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..config.schema import ModelSettings


def names_by_file() -> dict[Path, list[str]]:
    """Return the names of `[[models]]` by their files; one whose file is not to be found has none here."""
    from ..config.layers import load
    from ..errors import ConfigError

    found: dict[Path, list[str]] = {}
    if not (models := load().models):
        return found
    from ..machines.resident_models import path_of

    for settings in models:
        try:
            found.setdefault(path_of(settings).resolve(), []).append(settings.name)
        except ConfigError:
            continue
    return found


def states() -> Mapping[str, str]:
    """Return how each named model is in the running daemon; nothing where none runs."""
    from ..client import once
    from ..config.layers import load

    root, key = once.daemon_at(None, load())
    try:
        state: dict[str, Any] = once.get(root, "/disco/v1/state", key, timeout_s=2.0)
        return {model["name"]: model["state"] for model in state.get("models") or ()}
    except (once.DaemonError, ValueError):  # none runs, or it is another program
        return {}


def named(wanted: str) -> ModelSettings | None:
    """Return the model of `[[models]]` that is meant by `NAME` or `disco/NAME`; None where that is none."""
    from ..config.layers import load

    name = wanted.removeprefix("disco/")
    return next((model for model in load().models if model.name == name), None)


def unname(name: str) -> str:
    """Take a model out of the settings, and have a running daemon go by it; return what to say. Raises ConfigError."""
    from ..config.layers import config_path, load
    from ..config.model_entry import remove_model
    from .setup import reload_running

    remove_model(config_path(), name)
    return f"disco/{name} is taken out of [[models]] in {config_path()}. {reload_running(load())}".rstrip()


def words(names: Sequence[str], now: Mapping[str, str]) -> str:
    """Return what a list says of a file with these names."""
    return ", ".join(f"disco/{name}" + (f" ({now[name]})" if name in now else "") for name in names)


def require_unnamed(path: Path) -> None:
    """Raise ConfigError for the file of a named model, with what to do."""
    from ..config.layers import config_path
    from ..errors import ConfigError
    from ..models.gguf import with_shards

    by_file = names_by_file()
    if names := [name for part in with_shards([path.resolve()]) for name in by_file.get(part.resolve(), ())]:
        which = " and ".join(f"disco/{name}" for name in names)
        msg = f"{path} is the file of {which} in {config_path()}: `disco models rm {names[0]}` removes that model"
        raise ConfigError(msg)


def require_free(name: str) -> None:
    """Raise ConfigError for a name that no further model can have: before its file is fetched."""
    import msgspec

    from ..config.layers import config_path, load
    from ..config.schema import ModelSettings
    from ..errors import ConfigError

    if name in {model.name for model in load().models}:
        msg = f"[[models]] of {config_path()} has a model called {name} already: give --name another one"
        raise ConfigError(msg)
    try:
        msgspec.convert({"name": name, "model": "x"}, ModelSettings)
    except msgspec.ValidationError as e:
        msg = f"--name {name!r} is no name of a model: letters, digits, '-', '.' and '_', such as coder"
        raise ConfigError(msg) from e


def name_it(path: Path, name: str) -> str:
    """Name a file in the settings, and have a running daemon go by it; return what to say. Raises ConfigError."""
    from ..config.layers import config_path, load
    from ..config.model_entry import add_model
    from .setup import reload_running

    add_model(config_path(), name, str(path))
    return f"disco/{name} is {path} ([[models]] in {config_path()}). {reload_running(load())}".rstrip()
