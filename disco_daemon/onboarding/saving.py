"""Writes down a choice: a server with its key, a local model. All of it, or nothing.

The key goes into a file of its own, `keys/HOST` beside config.toml: mode 0600 from the first moment, its folder 0700.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ..config.layers import changing, get_value, load, require_complete, with_values, write_private, write_values
from ..config.schema import LAYER_COUNTS, SAID_OF, Config, NamedServer
from ..config.server_entry import entry_of, with_entry, write_entry
from ..errors import ConfigError
from ..models.default import default_model_path, installed_models
from ..system.net import is_plain, without_credentials
from ..system.smallfile import open_regular
from .providers import ServerKey, key_path

_MAGIC = b"GGUF"
ENTRY = "servers."  # before the name of one of `[[servers]]`, among changes
OF_ENTRY = frozenset(
    key.partition(".")[2] for of in ("server.base_url", "server.model") for key in SAID_OF[of]
)  # what is said of one address or one model, and is wrong for another one
DEFAULT = "default"  # the name of the model that ships
_THEIRS = "DISCO_DEVICE_BASE_URL"  # goes before what is saved
_MODEL, _URL = "device.model", "device.base_url"
_BEFORE = "model-before.json"  # beside config.toml: the local model before this one, and what was said of it
_MOST_BYTES = 1 << 16  # of that file
_OF_LOCAL = sorted({_MODEL, _URL, *SAID_OF[_MODEL]})  # what is in it: no more, such as whether the device is enabled


@dataclass(frozen=True, slots=True)
class Choice:
    """The changes that the user chose; None changes nothing. An empty `base_url` removes the server.

    `local` is `device.model`. With a `name` it is one of `[[servers]]` that is added, changed or removed.
    """

    base_url: str | None = None
    model: str = ""
    key: ServerKey = field(default_factory=ServerKey)
    local: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class SavedChoice:
    """The settings that a choice changes, and what those of `changes` were `before`.

    `earlier` is what was written down of the model before the one before. `entry` is what one of `[[servers]]` gets,
    which stands as `servers.NAME` among the changes.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    earlier: str | None = field(default=None, compare=False, repr=False)
    entry: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def notes(self) -> list[str]:
        """Return a sentence on each setting that the user has not chosen, and that goes with what was chosen before."""
        notes = []
        if url := self.before.get(_URL):
            notes.append(
                f"device.base_url = {without_credentials(url)} is taken out: this machine's own model answers."
            )
        if url := self.changes.get(_URL):
            notes.append(f"device.base_url = {without_credentials(url)} answers again.")
        if self.changes.get("device.enabled"):
            notes.append("The device takes part again.")
        for key in (key for key in self.changes if key.startswith(ENTRY)):
            was, now = self.before.get(key) or {}, self.entry or {}
            gone = [name for name, value in now.items() if name in OF_ENTRY and value != was.get(name, value)]
            notes += [
                f"{name} = {json.dumps(was[name])} of [[servers]] {key[len(ENTRY) :]} is taken out." for name in gone
            ]
        defaults = Config()
        for key in sorted(self.changes.keys() & frozenset[str]().union(*SAID_OF.values())):
            of = "server" if "server.base_url" in self.before and key.startswith("server.") else "model"
            if (value := self.changes[key]) == get_value(defaults, key):
                notes.append(f"{key} = {json.dumps(self.before[key])} was for the {of} before, and is taken out.")
            else:
                notes.append(f"{key} = {json.dumps(value)} was said of this {of}, and is back.")
        return notes


def plan(path: Path, choice: Choice, env: Mapping[str, str]) -> SavedChoice:
    """Return what `save` would change; write nothing. Raises ConfigError where it would, but for a disk that fails.

    Before anything is fetched it is asked whether a local model could be used at all.
    """
    if choice.local is not None:
        _require_choosable(env)
    config, entry = load(path, env={}), None
    changes = _changes(config, replace(choice, base_url=None) if choice.name else choice)
    after = with_values(config, changes)
    if choice.name and choice.base_url is not None:
        entry = _entry(config, choice)
        after = with_entry(after, choice.name, entry)
    require_complete(after)
    before = {key: get_value(config, key) for key in changes}
    changed = {key: value for key, value in before.items() if value != changes[key]}
    if after.servers != config.servers:
        changes[f"{ENTRY}{choice.name}"] = entry and {"base_url": choice.base_url, "model": choice.model}
        was = entry_of(config, choice.name)
        changed[f"{ENTRY}{choice.name}"] = None if was is None else msgspec.to_builtins(was)
    return SavedChoice(changes, changed, entry=entry)


def _entry(config: Config, choice: Choice) -> dict[str, Any] | None:
    """Return the values of one of `[[servers]]`; None takes it away. Raises ConfigError where there is none to take.

    What was said of the address or the model before goes back to its default; a list of its models gets the new one.
    """
    was = entry_of(config, choice.name)
    if not choice.base_url:
        if was is None:
            names = ", ".join(one.name for one in config.servers) or "none"
            raise ConfigError(f"[[servers]] has no server called {choice.name!r}; there: {names}")
        return None
    keys = {key.partition(".")[2]: value for key, value in choice.key.settings.items()}
    values: dict[str, Any] = {"base_url": choice.base_url, "model": choice.model, **keys}
    if was is not None:
        plain = NamedServer(name=was.name, base_url=was.base_url)
        of = [key for key in ("base_url", "model") if not _is_same(f"server.{key}", values[key], getattr(was, key))]
        said = {*of, *(["model"] if of else [])}  # a server's model is one of that server
        outdated = {key.partition(".")[2] for one in said for key in SAID_OF[f"server.{one}"]}
        values |= {key: getattr(plain, key) for key in outdated if getattr(was, key) != getattr(plain, key)}
        if was.models and choice.model not in was.models:
            values["models"] = [*was.models, choice.model]
    return values


def save(path: Path, choice: Choice, env: Mapping[str, str]) -> SavedChoice:
    """Write a choice into config.toml at `path` and its key beside it; return the settings that were written.

    Comments stay. Raises ConfigError, and then nothing has changed. Blocks on disk. What other programs set meanwhile
    comes before it or behind it: changes are worked out from the settings that they are written to.
    """
    with _writing(path):
        saved = plan(path, choice, env)
        file = (saved.entry or {}).get("api_key_file") or saved.changes.get("server.api_key_file")
        # Only a new key has to be written: others have their place.
        fresh = (
            bool(choice.key.value)
            and choice.base_url
            and file == str(key_path(path.parent, choice.base_url, choice.name))
        )
        with (
            _write_key(Path(file or ""), choice.key.value) if fresh else nullcontext(),
            _recording(path, saved) as earlier,
        ):
            values = {key: value for key, value in saved.changes.items() if not key.startswith(ENTRY)}
            if f"{ENTRY}{choice.name}" in saved.changes:
                write_entry(path, choice.name, saved.entry)
            if values:
                write_values(path, values)
        return replace(saved, earlier=earlier)


def use_previous(path: Path, env: Mapping[str, str]) -> SavedChoice:
    """Go back to the local model before this one, with all that was said of it; once more, and this one is back.

    Raises ConfigError where none is known, it is gone, or another one was chosen by hand since; then nothing has
    changed. Blocks on disk.
    """
    with _writing(path):
        config = load(path, env={})
        before = _before(path, config, env)
        wanted = _changes(config, Choice(local=before[_MODEL])) | before
        was = {key: get_value(config, key) for key in wanted}
        changes = {key: value for key, value in wanted.items() if value != was[key]}
        saved = SavedChoice(changes, {key: was[key] for key in changes})
        with _recording(path, saved) as earlier:
            write_values(path, changes, require_complete)
        return replace(saved, earlier=earlier)


def previous_name(path: Path, env: Mapping[str, str]) -> str:
    """Return what `use_previous` would go back to, a file's name or a server's address; "" if it would not. Blocks."""
    try:
        before = _before(path, load(path, env={}), env)
    except ConfigError:
        return ""
    return without_credentials(before.get(_URL, "")) or _file(before[_MODEL]).name


def _before(path: Path, config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the local model before this one. Raises ConfigError where there is no way back to it."""
    _require_choosable(env)
    if env.get("DISCO_DEVICE_MODEL"):
        raise ConfigError("the variable DISCO_DEVICE_MODEL is set, so its model answers: unset it first")
    try:
        with open_regular(path.with_name(_BEFORE)) as f:
            kept = json.loads(f.read(_MOST_BYTES))
        chosen = str(kept["changes"][_MODEL])
        before = {key: kept["before"][key] for key in kept["before"] if key in _OF_LOCAL}
        model = before[_MODEL] = str(before[_MODEL])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError("no model before this one is known: `disco models list` shows what there is") from e
    if not _is_same(_MODEL, chosen, config.device.model):
        raise ConfigError("device.model was set by hand since: `disco models use MODEL` says which one to take")
    if model and not before.get(_URL) and not _file(model).exists():
        raise ConfigError(f"the model before, {model}, is no longer there: `disco models list` shows what there is")
    return before


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
        if _has_other_model(saved):
            with suppress(OSError):  # the settings matter more
                _put(path.with_name(_BEFORE), saved.earlier)
        return SavedChoice(back, {key: saved.changes[key] for key in back})


def _require_choosable(env: Mapping[str, str]) -> None:
    """Raise ConfigError where a variable names a server, which would be asked for any local model."""
    if env.get(_THEIRS):
        raise ConfigError(f"the variable {_THEIRS} is set, so that server's model answers: unset it first")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Keep others from writing meanwhile. Raises ConfigError for a disk that fails."""
    try:
        with changing(path):
            yield
    except OSError as e:
        raise _not_written(path, e) from e


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
    """Put the key into its file; restore the file if the context fails. Raises ConfigError."""
    try:
        for folder in (file.parent.parent, file.parent):  # mkdir gives its mode to the last one only
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.parent.chmod(0o700)
    except OSError as e:
        raise _not_written(file, e) from e
    with _replacing(file, f"{key}\n"):
        yield


@contextmanager
def _recording(path: Path, saved: SavedChoice) -> Iterator[str | None]:
    """Write down the local model of now with all that is said of it, if another one is chosen; yield what was there.

    Before the settings are: nothing is in use then whose way back is not known. Raises ConfigError.
    """
    if not _has_other_model(saved):
        yield None
        return
    config, defaults = load(path, env={}), Config()
    values = {key: get_value(config, key) for key in _OF_LOCAL}
    of_it = {key: value for key, value in values.items() if key == _MODEL or value != get_value(defaults, key)}
    text = json.dumps({"changes": {_MODEL: saved.changes.get(_MODEL, config.device.model)}, "before": of_it})
    with _replacing(path.with_name(_BEFORE), text) as earlier:
        yield earlier


def _has_other_model(saved: SavedChoice) -> bool:
    """Whether another local model answers by it."""
    is_other = _MODEL in saved.before and not _is_same(_MODEL, saved.before[_MODEL], saved.changes[_MODEL])
    return is_other or _URL in saved.before


@contextmanager
def _replacing(file: Path, text: str) -> Iterator[str | None]:
    """Write a private file; yield what was in it, and restore that if the context fails. Raises ConfigError."""
    try:
        before = _text_of(file)
        write_private(file, text)
    except OSError as e:
        raise _not_written(file, e) from e
    try:
        yield before
    except BaseException:  # Ctrl-C too: a choice is all or nothing
        _put(file, before)
        raise


def _text_of(file: Path) -> str | None:
    """Return what is in a file, None where there is none. Raises OSError."""
    try:
        with open_regular(file) as f:
            return f.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _put(file: Path, text: str | None) -> None:
    """Write a private file, or remove it. Raises OSError."""
    if text is None:
        file.unlink(missing_ok=True)
    else:
        write_private(file, text)


def _not_written(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{file} cannot be written: {error.strerror or error}")


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
