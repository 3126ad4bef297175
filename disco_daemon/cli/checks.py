"""What `disco doctor` finds on this machine: one small function a check, from what was seen to a `Finding`."""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import stat
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from .. import __version__
from ..client import once as client
from ..config.layers import require_complete
from ..config.schema import Api, Config, DeviceSettings
from ..errors import ConfigError, DiscoError
from ..models.default import SIZE, default_model_path
from ..money.exchange import DEFAULT_FLOOR
from ..net import is_loopback
from ..onboarding.asking import within
from ..power.reading import Charge, Covers, Thermal
from ..power.sensors import GUESS, State
from ..smallfile import open_regular
from ..store.checkup import NEWEST, Seen

DAEMON_TIMEOUT_S = 5.0  # the running daemon's answer to one look of `disco doctor`
SPARE_BYTES, LEAST_BYTES = 2**30, 64 * 2**20  # of a disk: below the first it is told, below the second wrong
GIB = 2**30
MAX_SKEW_S = 120.0  # between two clocks; certificates and daily caps do not mind less
EPOCH = timedelta(days=20 * 365)  # a clock so far ahead of the newest price list is wrong


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do next ("" for nothing; may have several lines)."""

    name: str
    level: Level
    found: str
    mend: str = ""


def ok(name: str, found: str, mend: str = "") -> Finding:
    """Nothing has to be done."""
    return Finding(name, Level.OK, found, mend)


def warn(name: str, found: str, mend: str) -> Finding:
    """It works, and might work better."""
    return Finding(name, Level.WARN, found, mend)


def wrong(name: str, found: str, mend: str) -> Finding:
    """Something cannot work."""
    return Finding(name, Level.WRONG, found, mend)


# --- configuration and files ------------------------------------------------------------------------------------------


def configuration(path: Path, config: Config, error: str) -> Finding:
    """Whether the settings can be read and go together; `error` is what reading them said."""
    name = "configuration"
    if error:
        return wrong(name, error, "mend or unset it; what follows was looked at with the defaults")
    try:
        require_complete(config)
    except ConfigError as e:
        return wrong(name, str(e), "`disco up` does not start before")
    if not config.device.enabled and not config.server.base_url:
        mend = "`disco config set device.enabled true`, or `disco config set server.base_url URL`"
        return wrong(name, "neither device nor server may answer", mend)
    if not is_loopback(config.api.host) and not config.api.key:
        mend = "`disco config set api.key SECRET`, or `disco config set api.host 127.0.0.1`"
        return wrong(name, f"api.host = {config.api.host} is open to others, and there is no api.key", mend)
    if not there(path):
        return ok(name, f"defaults and variables; there is no {path}")
    if (config.api.key or config.api.control_key) and (mode := _others(path)):
        return warn(name, f"{path} holds api.key, and others may read it (mode {mode:o})", f"`chmod 600 {path}`")
    return ok(name, str(path))


def model(settings: DeviceSettings) -> Finding:
    """Whether the device's model file is there and is one."""
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
    return ok(name, f"{path}, {size / 1e6:.0f} MB")


def model_path(settings: DeviceSettings) -> Path:
    """Where the device's model is, or would be."""
    return Path(settings.model).expanduser() if settings.model else default_model_path()


def device_files(settings: DeviceSettings) -> Finding | None:
    """Whether the other files that the settings name can be read; None if they name none."""
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
    """Whether files can be made in a folder that is or will be at `path`, and how many bytes of room there are."""
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


def history(path: Path, seen: Seen | str | None) -> Finding:
    """The history file; `seen` is what is in it, why it cannot be read, or None if there is none."""
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
    """The permission bits of a file that others have some of, else 0."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
    return mode if mode & 0o077 else 0


def there(path: Path) -> bool:
    """Whether something is at `path`, and may be known of: what lies behind a closed folder is not there."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def head(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a file. Raises OSError."""
    with open_regular(path) as f:
        return f.read(n_bytes)


# --- the port ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listener:
    """Who has the daemon's port: nobody (`free`), a daemon (its `state`), or something else (`problem` says what)."""

    free: bool = False
    state: dict[str, Any] | None = None
    problem: str = ""


def listener(api: Api) -> Listener:
    """Try to listen there; if that is taken, ask who does. No other machine is asked."""
    try:
        # A name would be asked of the network; "localhost" is known here.
        flags = 0 if is_loopback(api.host) else socket.AI_NUMERICHOST
        family, kind, _, _, address = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM, flags=flags)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
        return Listener(free=True)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            return Listener(problem=e.strerror or str(e))
    root = client.base_url(client.reachable(api.host), api.port)
    try:
        state = within(DAEMON_TIMEOUT_S, lambda: client.get(root, "/disco/v1/state", api.control_key or api.key))
    except (DiscoError, OSError, ValueError, http.client.HTTPException) as e:
        return Listener(problem=str(e) or type(e).__name__)
    is_ours = isinstance(state, dict) and "version" in state and "endpoints" in state
    return Listener(state=state) if is_ours else Listener(problem="it is no disco daemon")


def port(api: Api, found: Listener) -> Finding:
    """Whether the daemon can listen, or does."""
    name, where = "port", f"{api.host}:{api.port}"
    if found.state is not None:
        told = f"a disco daemon {found.state['version']} listens on {where}"
        if found.state["version"] != __version__:
            return warn(name, f"{told}; this is {__version__}", "restart it")
        return ok(name, told)
    if found.free:
        return ok(name, f"{where} is free, no daemon runs" if api.port else "a free one is taken at each start")
    mend = "`disco config set api.port N` with another one, or stop what listens there"
    return wrong(name, f"{where} cannot be used: {found.problem}", mend)


def users(api: Api, *, told: bool, platform: str = sys.platform) -> Finding:
    """Who else on this machine may ask; `told`: whether the system says whose a connection is."""
    name = "other users"
    if api.key:
        return ok(name, "need api.key, as everybody")
    if api.any_user:
        return ok(name, "may ask without a key (api.any_user)", "`disco config set api.any_user false` keeps them out")
    if told:
        return ok(name, "are kept out", "`disco config set api.key SECRET` lets those in who send it")
    if platform.startswith("linux"):
        found = "this system does not say whose a connection is: nobody is let in, you included"
        return wrong(name, found, "`disco config set api.key SECRET`, or `disco config set api.any_user true`")
    mend = "`disco config set api.key SECRET`, if others use it and should be kept out"
    return ok(name, "may ask: this system does not say whose a connection is", mend)


# --- energy and time --------------------------------------------------------------------------------------------------


def energy(state: State) -> Finding:
    """The source that energy is taken from, how far off it may be, and why no better one."""
    reading = state.reading
    watts = f" = {reading.watts:.3g} W" if reading.watts is not None else ""
    skipped = "".join(f"; not {s.source}: {s.reason}" for s in state.skipped)
    found = f"{reading.source} ({reading.note}{watts}), give or take {100 * reading.uncertainty:.0f} %{skipped}"
    if reading.source == GUESS:
        return warn("energy", found, "`disco config set device.watts W`, what computing adds by a plug-in meter")
    return ok("energy", found if reading.covers is not Covers.COMPUTING else f"{found}; assumed, not measured")


def battery(charge: Charge | None, floor: float | None) -> Finding:
    """How full it is; from `caps.battery_floor` on, if that is set, the device makes no answers on battery."""
    if charge is None:
        return ok("battery", "none")
    left = f", {charge.seconds_left / 3600:.1f} h left" if charge.seconds_left is not None else ""
    found = f"{charge.fraction:.0%}, {'on mains' if charge.on_mains else 'on battery'}{left}"
    if not charge.on_mains and charge.fraction < (DEFAULT_FLOOR if floor is None else floor):
        stops = "its energy counts as dear" if floor is None else f"below {floor:.0%} the device makes no answers"
        return warn("battery", found, f"plug in: {stops}")
    return ok("battery", found)


def heat(thermal: Thermal | None) -> Finding:
    """Whether the processor is slowed down by it."""
    if thermal is None:
        return ok("heat", "nothing here tells of it")
    left = f"{thermal.headroom_k:.0f} K below throttling" if thermal.headroom_k is not None else ""
    told = ", ".join(part for part in (left, thermal.note) if part)
    if thermal.throttled:
        return warn(
            "heat", f"the processor is slowed down{f' ({told})' if told else ''}", "let it cool, clear its vents"
        )
    return ok("heat", told or "the processor is not slowed down")


def clock(now: datetime, past: datetime, latest: float | None, skew_s: float | None) -> Finding:
    """Whether the time can be right: after `past`, not long after, not before the `latest` request (Unix time, s).

    `skew_s` is how far this clock is ahead of the server's, s, None if that is not known.
    """
    name, mend = "clock", "let the system set its time from the network"
    shown = f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if not past <= now <= past + EPOCH:
        return wrong(name, f"{shown} cannot be: disco's price lists are of {past:%Y-%m-%d}", mend)
    if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        return warn(name, f"{shown}, {abs(skew_s):.0f} s {side} the server's", mend)
    if latest is not None and latest > now.timestamp() + MAX_SKEW_S:
        when = f"{datetime.fromtimestamp(latest, UTC):%Y-%m-%d %H:%M} UTC" if latest < 1e11 else "far ahead"
        return warn(name, f"{shown}, but the latest request in the history is of {when}", mend)
    return ok(name, shown)
