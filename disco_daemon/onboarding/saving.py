"""Writes down a choice: a server with its key, a local model. All of it, or nothing.

The key goes into a file of its own, `keys/HOST` beside config.toml: mode 0600 from the first moment, its folder 0700.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.layers import changing, get_value, load, require_complete, with_values, write_private, write_values
from ..config.schema import LAYER_COUNTS, SAID_OF, Config
from ..errors import ConfigError
from ..models.default import default_model_path, installed_models
from ..system.net import is_plain, without_credentials
from ..system.smallfile import open_regular
from .providers import ServerKey, key_path

_MAGIC = b"GGUF"
DEFAULT = "default"  # the name of the model that ships
_THEIRS = "DISCO_DEVICE_BASE_URL"  # goes before what is saved
_MODEL, _PARTS = "device.model", ("changes", "before")
_BEFORE = "model-before.json"  # beside config.toml: what the choice of another model has changed, to go back
_MOST_BYTES = 1 << 16  # of that file


@dataclass(frozen=True, slots=True)
class Choice:
    """The changes that the user chose; None changes nothing. An empty `base_url` removes the server.

    `local` is `device.model`.
    """

    base_url: str | None = None
    model: str = ""
    key: ServerKey = field(default_factory=ServerKey)
    local: str | None = None


@dataclass(frozen=True, slots=True)
class SavedChoice:
    """The settings that a choice changes, and what those of `changes` were `before`."""

    changes: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Return a sentence on each setting that the user has not chosen, and that goes with what was chosen before."""
        notes = []
        if url := self.before.get("device.base_url"):
            notes.append(
                f"device.base_url = {without_credentials(url)} is taken out: this machine's own model answers."
            )
        if "device.enabled" in self.changes:
            notes.append("The device takes part again.")
        for key in sorted(self.changes.keys() & frozenset[str]().union(*SAID_OF.values())):
            of = "server" if "server.base_url" in self.before and key.startswith("server.") else "model"
            notes.append(f"{key} = {json.dumps(self.before[key])} was for the {of} before, and is taken out.")
        return notes


def plan(path: Path, choice: Choice, env: Mapping[str, str]) -> SavedChoice:
    """Return what `save` would change; write nothing. Raises ConfigError where it would, but for a disk that fails.

    Before anything is fetched it is asked whether a local model could be used at all.
    """
    if choice.local is not None and env.get(_THEIRS):
        raise ConfigError(f"the variable {_THEIRS} is set, so that server's model answers: unset it first")
    config = load(path, env={})
    changes = _changes(config, choice)
    require_complete(with_values(config, changes))
    before = {key: get_value(config, key) for key in changes}
    return SavedChoice(changes, {key: value for key, value in before.items() if value != changes[key]})


def save(path: Path, choice: Choice, env: Mapping[str, str]) -> SavedChoice:
    """Write a choice into config.toml at `path` and its key beside it; return the settings that were written.

    Comments stay. Raises ConfigError, and then nothing has changed. Blocks on disk. What other programs set meanwhile
    comes before it or behind it: changes are worked out from the settings that they are written to.
    """
    with _writing(path):
        saved = plan(path, choice, env)
        file = saved.changes.get("server.api_key_file")
        # Only a new key has to be written: others have their place.
        fresh = bool(choice.key.value) and choice.base_url and file == str(key_path(path.parent, choice.base_url))
        with _write_key(Path(file or ""), choice.key.value) if fresh else nullcontext():
            write_values(path, saved.changes)
            _keep(path, saved)
        return saved


def use_previous(path: Path) -> SavedChoice:
    """Go back to the local model before this one, with all that was said of it; once more, and this one is back.

    Raises ConfigError where none is known, it is gone, or another one was chosen by hand since. Blocks on disk.
    """
    try:
        with open_regular(path.with_name(_BEFORE)) as f:
            kept = json.loads(f.read(_MOST_BYTES))
        saved = SavedChoice(dict(kept["changes"]), dict(kept["before"]))
        model = str(saved.before[_MODEL])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError("no model before this one is known: `disco models list` shows what there is") from e
    if model and not _file(model).exists():
        raise ConfigError(f"the model before, {model}, is no longer there: `disco models list` shows what there is")
    back = take_back(path, saved)
    if _MODEL not in back.changes:
        raise ConfigError("device.model was set by hand since: `disco models use MODEL` says which one to take")
    _keep(path, back)
    return back


def _keep(path: Path, saved: SavedChoice) -> None:
    """Write down what was said of the local model before, if another one was chosen. Raises OSError."""
    if _MODEL in saved.before:
        of_it = {name: {k: v for k, v in getattr(saved, name).items() if k.startswith("device.")} for name in _PARTS}
        write_private(path.with_name(_BEFORE), json.dumps(of_it))


def take_back(path: Path, saved: SavedChoice) -> SavedChoice:
    """Write what was there before, but for what somebody has set otherwise since then. Raises ConfigError. Blocks.

    Where they have chosen another server or model since, nothing is written: what was before is not that one's either.
    """
    with _writing(path):
        now = load(path, env={})
        ours = {key for key, value in saved.changes.items() if get_value(now, key) == value}
        if not SAID_OF.keys() & saved.changes.keys() <= ours:
            return SavedChoice()
        back = {key: value for key, value in saved.before.items() if key in ours}
        write_values(path, back)
        return SavedChoice(back, {key: saved.changes[key] for key in back})


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Keep others from writing meanwhile. Raises ConfigError for a disk that fails."""
    try:
        with changing(path):
            yield
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror or e}"
        raise ConfigError(msg) from e


def _changes(config: Config, choice: Choice) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if choice.base_url is not None:
        changes = {"server.base_url": choice.base_url, "server.model": choice.model, **choice.key.settings}
        if not choice.base_url:
            changes |= {"server.model": "", "server.key_origin": ""}
            changes |= {"server.api_key_file": "", "server.api_key_env": "OPENAI_API_KEY"}
    if choice.local is not None:
        changes["device.model"] = choice.local
        if config.device.base_url:  # else that server would be asked for a file of this machine
            changes["device.base_url"] = ""
        if not config.device.enabled:
            changes["device.enabled"] = True
    return changes | _outdated(config, changes)


def _outdated(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of settings that were said of the server or the model before, and are wrong for this one."""
    changed = {key for key, value in changes.items() if not _is_same(key, value, get_value(config, key))}
    if not config.server.base_url:  # no server was before: what there is was said of this one
        changed = {key for key in changed if not key.startswith("server.")}
    found = said_of(config, changed)
    if is_plain(changes.get("server.base_url", "")):  # the user agrees to that before the new one is checked
        found.discard("server.insecure")
    defaults = Config()
    return {key: get_value(defaults, key) for key in found}


def _is_same(key: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting name the same thing, however they are spelled."""
    if key == "server.base_url":
        return bool(one.rstrip("/") == other.rstrip("/"))
    if key == "device.model":
        return _file(one) == _file(other)
    return bool(one == other)


def _file(model: str) -> Path:
    return (Path(model).expanduser() if model else default_model_path()).absolute()


def said_of(config: Config, named: Collection[str]) -> set[str]:
    """Return the settings with values of the user's that are said of what these ones name: a server, a model."""
    of = {*named, *(key.replace("base_url", "model") for key in named)}
    keys = frozenset[str]().union(*(SAID_OF[key] for key in SAID_OF.keys() & of))
    defaults = Config()
    set_by_user = {key for key in keys if get_value(config, key) != get_value(defaults, key)}
    return {key for key in set_by_user if not (key in LAYER_COUNTS and get_value(config, key) in (0, -1))}


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
