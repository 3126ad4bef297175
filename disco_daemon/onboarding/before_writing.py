"""What can be known of a setting before it is written, beyond its type: files, keys, addresses. Blocks on disk."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config.layers import read_key_file
from ..config.schema import AdapterSettings, Config
from ..errors import ConfigError
from ..models.files import examine
from ..plain import reason_of
from ..system.net import is_loopback, is_private_address, with_scheme
from .asking import within
from .checking import address_problem
from .saving import said_of

LOOK_S = 1.0  # for a look whether a server listens; offline it is not waited for longer
ADDRESSES = ("server.base_url", "device.base_url")
MODELS = ("device.model", "device.draft_model", "split.draft_model")
_PORTS = {"http": 80, "https": 443}


def mended(key: str, value: str) -> str:
    """Return a value as it was meant: an address with its scheme, a file that is here by its whole path."""
    if key in ADDRESSES:
        return with_scheme(value) or value
    if key in (*MODELS, "device.chat_template", "server.api_key_file") and value:
        path = Path(value).expanduser()
        return str(path.absolute()) if path.is_file() else value
    return value


def check_settings(config: Config, changed: Iterable[str]) -> None:
    """Raise ConfigError if what one of the `changed` settings names cannot be used; nobody is asked for anything."""
    for key in changed:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if key in MODELS and value and not (key == "device.model" and config.device.base_url):
            _check_model(key, value)
        elif key == "device.adapters":
            for adapter, one in value.items():
                _check_model(f"{key} {adapter}:", one.path if isinstance(one, AdapterSettings) else one)
        elif key == "device.chat_template" and value:
            _require_file(key, Path(value).expanduser())
        elif key == "server.api_key_file" and value and not read_key_file(Path(value).expanduser(), f"{key} "):
            raise ConfigError(f"{key} {value} is empty: put the key into it, or run `disco setup`")
        elif key in ADDRESSES and value and (problem := address_problem(value, _own_port(config))):
            raise ConfigError(f"{key} = {value!r}: {problem.text}: {problem.mend}")


def _own_port(config: Config) -> int | None:
    return config.api.port or None


def _require_file(key: str, path: Path) -> None:
    if path.is_dir():
        msg = f"{key} {path} is a folder: name a file in it"
        raise ConfigError(msg)
    if not path.is_file():
        msg = f"{key} {path} does not exist: `disco models list` shows the models here, `disco models use` takes names"
        raise ConfigError(msg if "template" not in key else msg.partition(":")[0])


def _check_model(key: str, value: str) -> None:
    path = Path(value).expanduser()
    _require_file(key, path)
    if problem := examine(path).problem:
        msg = f"{key} {path} {problem}"
        raise ConfigError(msg)


def remarks(config: Config, key: str, value: Any) -> Iterator[str]:
    """Yield what is still missing for a setting to be of use; with an address, whether something listens there now."""
    server = config.server
    if (value or key.startswith("device.")) and (stay := sorted(said_of(config, [key]))):
        yield f"{', '.join(stay)}: kept as you set it; `disco config get` shows whether it is right for this one, too"
    if key == "server.base_url" and value and not server.model:
        yield "the server takes part once server.model is set, too; `disco setup` asks it for its models"
    if key == "server.model" and value and not server.base_url:
        yield "there is no server yet: `disco setup` adds one"
    if key in ("api.host", "api.key") and not (is_loopback(config.api.host) or config.api.key):
        yield f"{config.api.host} is open to others: the daemon will not start before api.key is set"
    if key in ("device.enabled", "server.base_url") and not (config.device.enabled or server.base_url):
        yield "nobody is left to answer: `disco setup` adds a server"
    if key in ADDRESSES and value and (why := _unreachable(str(value), private=config.policy.private)):
        yield f"nothing answers at {value} now ({why})"


def _unreachable(url: str, *, private: bool) -> str:
    """Return why nobody listens at an address; "" if somebody does, or where that must not, or cannot, be looked at."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    at_home = is_loopback(host) or is_private_address(host)
    if (private and not is_loopback(host)) or (urllib.request.getproxies() and not at_home):
        return ""
    try:
        within(LOOK_S, lambda: socket.create_connection((host, port), LOOK_S).close())
    except (OSError, UnicodeError) as e:
        return reason_of(e)
    return ""
