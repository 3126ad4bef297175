"""Layered settings: config.toml < DISCO_* variables < flags. `schema` has the settings."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from ..continuations import CONTINUATIONS
from ..errors import ConfigError
from ..plain import did_you_mean, in_words, pointed_to, which
from ..system import smallfile
from ..system.net import (
    hostname,
    in_the_clear,
    is_address,
    is_http_url,
    is_loopback,
    is_plain,
    is_private_address,
    origin,
    without_credentials,
)
from .document_edits import put
from .one_device import check_device
from .schema import LISTS, MODELS, RULES, SECRET_KEYS, SECTIONS, SERVERS, TABLES, Config, NamedServer, keys
from .servers import check_servers, foreign_key, place_of

LOCK_S = 10.0  # for another program that writes settings, which takes milliseconds
MAX_FILE = 1024 * 1024  # bytes of config.toml; one with all settings and comments has 10 kB
DEFAULT_SET = "balanced"  # of `policy.set`: sets nothing, so nothing is read for it
SCHEMA, NEWEST = "schema", 1  # the number's name in the file, above all tables, and the number that this version writes

# With `policy.private` and no device; also where a flag of the daemon says so.
NOBODY_HERE = (
    "policy.private keeps every request on this machine, and its model is not in use: set device.enabled = true, or "
    "policy.private = false"
)


def config_path() -> Path:
    """Return the path of config.toml: $DISCO_CONFIG, or in the platform's config folder."""
    override = os.environ.get("DISCO_CONFIG")
    return Path(override) if override else platformdirs.user_config_path("disco") / "config.toml"


def data_path() -> Path:
    """Return the folder of history and models."""
    return platformdirs.user_data_path("disco")


def cache_path() -> Path:
    """Return the folder of files that can be computed again."""
    return platformdirs.user_cache_path("disco")


def load(
    path: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Read all layers. `flags` maps `section.name` to a value. Raises ConfigError that names key and mend."""
    path = path or config_path()
    values = _read_file(path)
    for key, text in _from_env(os.environ if env is None else env).items():
        _put(values, key, text)
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value)
    return _convert(values, path)


def set_values(path: Path, changes: Mapping[str, Any], check: Callable[[Config], None] = lambda config: None) -> Config:
    """Write settings into config.toml, keeping comments: values, or texts as you type them.

    None goes back to the default where that is "none". All are written, or none if one is wrong or if `check` of the
    new settings raises: ConfigError.
    """
    with changing(path):
        return write_values(path, changes, check)


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other programs from writing this file meanwhile: what they have set would be lost. Raises ConfigError.

    It is the folder that is locked, for the file is another one behind each write. Where the file system knows no
    locks there is none, as where the folder cannot be read.
    """
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        yield
        return
    try:
        until = time.monotonic() + LOCK_S
        while not _is_locked(handle):
            if time.monotonic() > until:
                raise ConfigError(f"{path} is being changed by another program: nothing was written, try again")
            time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


def write_values(path: Path, changes: Mapping[str, Any], check: Callable[[Config], None] = lambda _: None) -> Config:
    """Do what `set_values` does, within `changing`: what the changes were worked out from is as it was."""
    import tomlkit  # for whom writes settings

    values = _read_file(path)
    for key, value in changes.items():
        _require_known(key)
        _put(values, key, value)
    config = _convert(values, path)
    if "policy.private" in changes and config.policy.set != DEFAULT_SET:
        from .policy_sets import require_not_held

        require_not_held(changes, config.policy.set)
    check(config)
    document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
    if not path.exists():  # a file without a number, as one written by hand, is of schema 1
        document[SCHEMA] = NEWEST
    for key in changes:
        section, name = key.split(".")
        if section not in document:
            document[section] = tomlkit.table()
        value = get_value(config, key)
        if value is None:  # TOML has no null
            document[section].pop(name, None)
        else:
            put(document[section], name, value)
    write_private(path, tomlkit.dumps(document))
    return config


def with_values(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return settings with some changes, which are valid already."""
    values = msgspec.to_builtins(config)
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    return msgspec.convert(values, Config)


def get_value(config: Config, key: str) -> Any:
    """Return one setting. Raises ConfigError for an unknown key."""
    _require_known(key)
    section, name = key.split(".")
    value = msgspec.to_builtins(getattr(getattr(config, section), name))
    return list(value) if isinstance(value, tuple) else value


def as_dict(config: Config) -> dict[str, Any]:
    """Return all settings for showing, by section, and the lists where they have any.

    Secrets are masked.
    """
    shown: dict[str, Any] = msgspec.to_builtins(config)
    for several in (MODELS, SERVERS, RULES):
        if not shown[several]:
            del shown[several]
    for key in SECRET_KEYS:
        section, name = key.split(".")
        if shown[section][name]:
            shown[section][name] = "********"
    for one in (shown["server"], shown["device"], *shown.get(SERVERS, ())):
        one["base_url"] = without_credentials(one["base_url"])
    return shown


class KeyRefusedError(ConfigError):
    """The key may not go to the configured server, which is off therefore. The message has the mends."""


def server_api_key(config: Config, env: Mapping[str, str] | None = None) -> str:
    """Return the server's API key, "" if there is none. This is the one place where a key is taken for use.

    Raises KeyRefusedError where the key is another origin's, or would travel in the clear; ConfigError for its file.
    """
    key = find_key(config, env)
    if key and config.server.base_url and (why := _not_for(config, config.server.base_url)):
        raise KeyRefusedError(why)
    return key


def key_for(config: Config, base_url: str, env: Mapping[str, str] | None = None) -> str:
    """Return the configured key if it may go to that address, which need not be the configured one; else "".

    Raises ConfigError for its file.
    """
    key = find_key(config, env)
    return "" if not key or _not_for(config, base_url) else key


def find_key(config: Config, env: Mapping[str, str] | None = None) -> str:
    """Return the key in the variable, else in the file, of any origin; not to be sent anywhere. Raises ConfigError."""
    env = os.environ if env is None else env
    if key := env.get(config.server.api_key_env, ""):
        return key
    if not config.server.api_key_file:
        return ""
    return read_key_file(Path(config.server.api_key_file).expanduser(), f"{place_of(config.server)}api_key_file ")


def _not_for(config: Config, base_url: str) -> str:
    """Return why the configured key may not go to an address, with the mend; "" if it may."""
    server, asked = config.server, origin(base_url)
    if (owner := origin(server.key_origin or server.base_url)) != asked:
        return foreign_key(server, owner, asked)
    host = hostname(base_url)
    if is_plain(base_url) and is_address(host) and not is_private_address(host) and not server.insecure:
        return in_the_clear(asked, server.name if isinstance(server, NamedServer) else "")
    return ""


def read_key_file(path: Path, name: str = "") -> str:
    """Return the key in a file that only its owner can read; errors call the file `name`. Raises ConfigError."""
    return smallfile.read_text(path, name, hidden=0o077).strip()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with smallfile.open_regular(path) as f:
            data = f.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"{path} is longer than {MAX_FILE} bytes: no settings are")
        values = tomllib.loads(data.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    _require_known_schema(values.pop(SCHEMA, 1), path)
    return values


def _require_known_schema(number: object, path: Path) -> None:
    """Raise ConfigError for a file whose schema this version does not know."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        msg = f"{path}: {SCHEMA} = {number!r} is no number that a version of disco has written: remove that line"
        raise ConfigError(msg)
    if number > NEWEST:
        msg = (
            f"{path} was written by a newer version of disco (its schema is number {number}, this version knows up to "
            f"{NEWEST}): upgrade disco, or let $DISCO_CONFIG name another file"
        )
        raise ConfigError(msg)


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    """DISCO_SERVER_BASE_URL -> server.base_url. Names that fit no section (DISCO_CONFIG …) are not settings."""
    known = {f"DISCO_{key.replace('.', '_').upper()}": key for key in keys()}
    sections = tuple(f"DISCO_{section.upper()}_" for section in SECTIONS)
    wrong = sorted(name for name in env if name.startswith(sections) and name not in known)
    if wrong:
        raise ConfigError(f"unknown variable {wrong[0]}: {did_you_mean(wrong[0], known)}`disco config get` lists all")
    return {key: env[name] for name, key in known.items() if name in env}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    target = values.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"[{section}] must be a table")
    if isinstance(value, str):
        kind = next(f.type for f in msgspec.structs.fields(SECTIONS[section]) if f.name == name)
        try:
            if key in TABLES:
                value = tomllib.loads(f"value = {value}")["value"]
            elif key in LISTS:
                value = [part for part in re.split(r"[\s,]+", value.strip("[] \t")) if part]
            value = msgspec.convert(value, kind, strict=False)
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"{key} must be a TOML table such as {{name = 'value'}}: {e} (got {value!r})") from e
        except msgspec.ValidationError as e:
            msg = f"{key} {in_words(str(e), kind, repr(value))}"
            raise ConfigError(msg) from e
    target[name] = value


def _convert(values: dict[str, Any], path: Path) -> Config:
    chosen = _table(values, "policy").get("set", DEFAULT_SET)
    if chosen != DEFAULT_SET:
        from .policy_sets import above_set

        values = above_set(values, chosen)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as e:
        from .lines import line_of

        if isinstance(rules := values.get(RULES), list) and f"$.{RULES}[" in str(e):
            from .rule_settings import refuse_unreadable

            refuse_unreadable(rules, path)
        said = f"{pointed_to(str(e)) or 'disco'} {in_words(str(e), Config)}".replace("an object", "a table")
        msg = f"{path}{line_of(path, str(e))}: {said}; `disco config get` lists all settings"
        raise ConfigError(msg) from e
    _check(config)
    if config.rules:
        from .rule_settings import check_rules

        check_rules(config, path)
    return config


def _table(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section as it is told; an empty one where it is missing, or no table."""
    found = values.get(section)
    return found if isinstance(found, Mapping) else {}


def _check(config: Config) -> None:
    """Check rules across settings. Raises ConfigError."""
    from ..dispatch.policies import POLICIES

    choices = {
        "policy.name": (config.policy.name, POLICIES),
        "policy.scarcer": (config.policy.scarcer, ("auto", "device", "server")),
        "server.continuation": (config.server.continuation, CONTINUATIONS),
        "delivery.mode": (config.delivery.mode, ("reserve", "paced", "off")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            msg = f"{key} = {value!r}: {which(value, allowed)}"
            raise ConfigError(msg)
    if config.device.flash_attn == "off" and (config.device.rounding == "exact" or config.device.kv_type == "q8_0"):
        msg = "device.flash_attn = 'off' does not go with device.rounding = 'exact', nor with device.kv_type = 'q8_0'"
        raise ConfigError(msg)
    if config.policy.private and not config.device.enabled:
        raise ConfigError(NOBODY_HERE)
    check_device(config)
    names = [model.name for model in config.models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"[[models]] has two models called {twice}: give each a name of its own")
    for key, url in (("server.base_url", config.server.base_url), ("device.base_url", config.device.base_url)):
        if url and not is_http_url(url):
            raise ConfigError(f"{key} = {url!r} is not a URL such as https://api.openai.com/v1")
    check_servers(config)
    if config.server.key_origin and not origin(config.server.key_origin):
        msg = f"server.key_origin = {config.server.key_origin!r} is no origin such as https://api.openai.com"
        raise ConfigError(msg)


def require_complete(config: Config) -> None:
    """Require the settings that a daemon needs together. Raises ConfigError."""
    if config.device.base_url and not is_loopback(hostname(config.device.base_url)):
        raise ConfigError("device.base_url must be on this machine (127.0.0.1 or localhost): private requests go there")
    if config.device.base_url and config.device.adapters:
        msg = "device.adapters are for this machine's own engine: with device.base_url that server has its own"
        raise ConfigError(msg)
    if config.server.base_url and not config.server.model:
        raise ConfigError("server.base_url is set but server.model is not: `disco config set server.model NAME`")
    if config.device.base_url and not config.device.model:
        raise ConfigError("device.base_url is set but device.model is not: `disco config set device.model NAME`")


def _require_known(key: str) -> None:
    if key not in keys():
        raise ConfigError(f"unknown setting {key!r}: {did_you_mean(key, keys())}`disco config get` lists all")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = path.resolve()  # a config.toml that is a link into the user's dotfiles stays one
    # A name of its own: a file beside it, such as a user's copy called config.toml.new, is not ours to remove.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C too; it is raised again
        temporary.unlink(missing_ok=True)
        raise
