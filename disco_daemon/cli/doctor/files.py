"""Checks of the settings and of the files and folders that they name: one small function a check."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...client.key_words import reached_words
from ...config.layers import require_complete
from ...config.schema import Config, DeviceSettings
from ...errors import ConfigError
from ...models.default import SIZE, default_model_path
from ...models.files import examine
from ...models.text_models import text_kind
from ...plain import count_of
from ...store.checkup import NEWEST, HistoryFacts
from ...system.net import is_loopback
from ...system.smallfile import open_regular
from .finding import Finding, ok, warn, wrong

GIB = 2**30
SPARE_BYTES, LEAST_BYTES = GIB, 64 * 2**20  # free on a disk: a warning below the first, wrong below the second


def configuration(path: Path, config: Config, error: str, *, has_keys: bool = False) -> Finding:
    """Check whether the settings can be read and go together; `error` is the error of reading them.

    `has_keys`: there are keys with names, one of which everybody has to show where others can reach the daemon.
    """
    name = "configuration"
    if error:
        return wrong(name, error, "mend or unset it; what follows was looked at with the defaults")
    try:
        require_complete(config)
    except ConfigError as e:
        return wrong(name, str(e), "`disco up` does not start before")
    if not config.device.enabled and not config.server.base_url and not config.servers:
        mend = "`disco setup` adds a server, `disco config set device.enabled true` takes this machine's model"
        return wrong(name, "neither device nor server may answer", mend)
    if not is_loopback(config.api.host) and not config.api.key and not has_keys:
        mend = "`disco config set api.key SECRET`, or `disco config set api.host 127.0.0.1`"
        return wrong(name, f"api.host = {config.api.host} is open to others, and there is no api.key", mend)
    if not there(path):
        return ok(name, f"defaults and variables; there is no {path}")
    if (config.api.key or config.api.control_key) and (mode := _others(path)):
        return warn(name, f"{path} holds api.key, and others may read it (mode {mode:o})", f"`chmod 600 {path}`")
    return ok(name, str(path))


def named_keys(found: Sequence[str] | ConfigError, spent: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Check the keys with names, and which have reached a cap, as the daemon has `spent`; None where there is none."""
    name = "keys"
    if isinstance(found, ConfigError):
        return wrong(name, str(found), "until then nobody is let in by one")
    if not found:
        return None
    reached = [f"{key['name']}: {words}" for key in spent if (words := reached_words(key))]
    text = f"{count_of(len(found), 'key')} with names: {', '.join(found)}"
    mend = "`disco keys change NAME --usd-per-day X` allows more; `disco usage --by key` says what for"
    return warn(name, f"{text}; {'; '.join(reached)}", mend) if reached else ok(name, text)


def model(settings: DeviceSettings) -> Finding:
    """Check the device's model file."""
    name = "model"
    if not settings.enabled:
        return ok(name, "not used: device.enabled is false")
    if settings.base_url:
        return ok(name, f"{settings.model} of the local server in device.base_url")
    path = model_path(settings)
    try:
        size, magic = path.stat().st_size, head(path, 4)
    except FileNotFoundError:
        if settings.model:
            return wrong(name, f"{path} does not exist", '`disco config set device.model PATH`, "" for the default one')
        return warn(name, "the default model is not here yet", f"`disco models fetch` gets it, {SIZE / 1e6:.0f} MB")
    except OSError as e:
        return wrong(name, f"{path} cannot be read: {e.strerror}", "mend its permissions, or set device.model")
    if magic != b"GGUF":
        return wrong(name, f"{path} is no GGUF file", "`disco config set device.model PATH`, of a GGUF file")
    if path == default_model_path() and size != SIZE:
        return wrong(name, f"{path} has {size} bytes, and {SIZE} are expected", "`disco models fetch` gets it again")
    kind = text_kind(examine(path, quick=True).header)
    if kind is not None:
        what = "rates texts (/v1/rerank)" if kind.rates else "makes vectors of texts (/v1/embeddings)"
        return ok(name, f"{path}, {size / 1e6:.0f} MB: it {what}, and answers nothing, so that chats need a server")
    return ok(name, f"{path}, {size / 1e6:.0f} MB")


def model_path(settings: DeviceSettings) -> Path:
    """Return the path of the device's model, whether it exists or not."""
    return Path(settings.model).expanduser() if settings.model else default_model_path()


def device_files(settings: DeviceSettings) -> Finding | None:
    """Check the other files that the settings name; None if they name none."""
    named = {"device.chat_template": settings.chat_template, "device.draft_model": settings.draft_model}
    for adapter, where in settings.adapters.items():
        named[f"device.adapters.{adapter}"] = where if isinstance(where, str) else where.path
    paths = {key: Path(path).expanduser() for key, path in named.items() if path}
    missing = [f"{key} {path}" for key, path in paths.items() if not (path.is_file() and os.access(path, os.R_OK))]
    if missing:
        level = wrong if any(not line.startswith("device.adapters") for line in missing) else warn
        return level("device files", f"cannot be read: {'; '.join(missing)}", "mend the paths, or leave them out")
    return ok("device files", ", ".join(paths)) if paths else None


def folder(name: str, path: Path, needed: int = LEAST_BYTES, wished: int = SPARE_BYTES) -> Finding:
    """Check whether files can be made in a folder that is or will be at `path`, and its free bytes."""
    nearest = next(parent for parent in (path, *path.parents) if there(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return wrong(name, f"{nearest} cannot be written to", f"mend the owner or the permissions of {nearest}")
    free = shutil.disk_usage(nearest).free
    found = f"{path}, {free / GIB:.1f} GiB free"
    if free < needed:
        return wrong(name, f"{found}, {needed / GIB:.2f} are needed", "free some room there")
    if free < wished:
        return warn(name, f"{found}, {wished / GIB:.1f} would do", "free some room there")
    return ok(name, found)


def history(path: Path, seen: HistoryFacts | str | None) -> Finding:
    """Check the history file; `seen` are its facts, why it cannot be read, or None if there is none."""
    name = "history"
    if seen is None:
        return ok(name, f"none yet; the first request begins it in {path}")
    if isinstance(seen, str):
        return wrong(name, seen, f"mend its permissions, or move {path} away: the next start makes a new one")
    if seen.schema > NEWEST:
        found = f"{path} was written by a newer disco (schema {seen.schema}; this one knows {NEWEST})"
        return wrong(name, found, "update disco, or move the file away")
    open_to = {p for p in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))) if _others(p)}
    if open_to:
        files = " ".join(sorted(map(str, open_to)))
        return warn(name, f"others may read {files}", f"`chmod 600 {files}`")
    later = f", the next start brings it to {NEWEST}" if seen.schema < NEWEST else ""
    return ok(name, f"{path}, {seen.requests} requests, schema {seen.schema}{later}, yours alone")


def _others(path: Path) -> int:
    """Return the permission bits of a file if others have any of them, else 0."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
    return mode if mode & 0o077 else 0


def there(path: Path) -> bool:
    """Whether `path` exists; a path behind a closed folder counts as missing."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def head(path: Path, n_bytes: int) -> bytes:
    """Return the first bytes of a file. Raises OSError."""
    with open_regular(path) as f:
        return f.read(n_bytes)
