"""`disco doctor`: check everything, and say what to do next. Asks only the configured server; shows no secret.

With `policy.private` it asks no server, unless you say `--online`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...plain import masked, plain, reason_of
from ...system.control_groups import cpu_quota
from ..terminal import make_console

if TYPE_CHECKING:
    from datetime import datetime

    from rich.table import Table

    from ...config.schema import Config
    from ...endpoints.continuation import Profile
    from ...errors import ConfigError
    from .finding import Finding
    from .server import FoundKey

HIDDEN = "********"
# Names of variables whose values are secret, and beginnings of the keys of well-known services.
_SECRET_NAMES = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD)S?$", re.IGNORECASE)
_KEY_LIKE = re.compile(r"\b(?:(?:sk|pk|gsk|xai|hf|nvapi|csk|tgp|fw)[-_]|AIza)[\w-]{12,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_LEAST_SECRET = 4  # characters; a shorter one would blot out words
_COLOURS = {"ok": "green", "warn": "yellow", "wrong": "bold red"}
_MARGIN = 22  # columns before what was found


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "doctor", help="check this machine, the settings and the server", description=__doc__
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--offline", action="store_true", help="do not ask the server either")
    asked.add_argument("--online", action="store_true", help="ask the server, although policy.private is on")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and show; return 1 if something is wrong."""
    found = findings(offline=args.offline, online=args.online)
    seen = list(found) if args.json else list(_show(found))
    n_wrong, n_warn = (sum(f.level == level for f in seen) for level in ("wrong", "warn"))
    if args.json:
        rows = [{"name": f.name, "level": f.level, "found": f.found, "mend": f.mend} for f in seen]
        print(json.dumps({"ok": not n_wrong, "wrong": n_wrong, "warn": n_warn, "findings": rows}))
    else:
        print(f"{len(seen) - n_wrong - n_warn} ok, {n_warn} to look at, {n_wrong} wrong")
    return 1 if n_wrong else 0


def findings(*, offline: bool = False, online: bool = False) -> Iterator[Finding]:
    """Yield all findings in order, each when its check is done; `online` asks the server despite `policy.private`."""
    from ...config.layers import load
    from ...config.schema import Config
    from ...config.servers import alone
    from ...errors import ConfigError
    from .server import OFFLINE, PRIVATE, read_key

    config, error = Config(), ""
    try:
        config = load()
    except ConfigError as e:
        error = str(e)
    key = read_key(config, os.environ)
    keys = {one.name: read_key(alone(config, one), os.environ) for one in config.servers}
    own = (config.api.key, config.api.control_key, key.value, *(one.value for one in keys.values()))
    hidden = _secrets(os.environ, *own)
    unasked = OFFLINE if offline else PRIVATE if config.policy.private and not online else ""
    for finding in _checks(config, error, key, keys, unasked=unasked):
        yield clean(finding, hidden, own)


def _checks(
    config: Config, error: str, key: FoundKey, keys: Mapping[str, FoundKey], *, unasked: str
) -> Iterator[Finding]:
    from datetime import UTC, datetime

    from ...api.http.peers import tells_of_us
    from ...config.layers import config_path
    from ...errors import ConfigError
    from ..service import spec_of
    from . import files, listening, machine, machines
    from .server import OFFLINE

    listener, names = listening.listener(config.api), _named_keys(config_path())
    yield files.configuration(config_path(), config, error, has_keys=not isinstance(names, ConfigError) and bool(names))
    yield machine.python()
    on_gpu = yield from _device(config, listener.state, offline=unasked == OFFLINE)
    yield from _folders(config)
    latest = yield from _history(config)
    yield listening.port(config.api, listener)
    yield listening.users(config.api, is_reported=tells_of_us())
    if (keys_found := files.named_keys(names, (listener.state or {}).get("keys") or ())) is not None:
        yield keys_found
    yield machine.service(spec_of(config))
    yield from machines.checks(config, listener.state, unasked)
    skew_s = None
    if config.server.base_url or not config.servers:
        skew_s = yield from _server(config, key, listener.state, unasked=unasked)
    others_s = yield from _several(config, keys, listener.state, unasked=unasked)
    skew_s = others_s if skew_s is None else skew_s
    yield from _power(config, on_gpu=on_gpu)
    yield machine.clock(datetime.now(UTC), _newest_price(), latest, skew_s)


def _device(config: Config, daemon: dict[str, Any] | None, *, offline: bool) -> Generator[Finding, None, bool]:
    """Yield the device's findings; return whether llama.cpp would use a GPU."""
    import asyncio

    from ...machines.device_settings import n_gpu_layers
    from ...machines.model_memory import run_checkup
    from . import engine, files, machine, server
    from .finding import Level
    from .stand_in import real_model

    settings = config.device
    found = files.model(settings)
    yield real_model(config, found)
    if settings.enabled and settings.base_url:
        unasked = server.OFFLINE if offline else ""
        yield server.network("local server", settings.base_url, unasked=unasked)
    if not settings.enabled or settings.base_url:
        return False
    question = engine.checkup_question(settings, n_gpu_layers(settings))
    seen = asyncio.run(run_checkup(*([] if isinstance(question, str) else [question])))
    yield engine.llama_cpp(settings, seen, engine.pinned_version())
    if (confined := engine.confinement(seen)) is not None:
        yield confined
    yield machine.compiler(engine_works=seen.bindings is not None)
    yield machine.processor(machine.this_processor(), seen.bindings, cpu_quota())
    if found.level == Level.OK:
        yield engine.memory(question, seen, daemon)
    if (crashing := engine.crashes(daemon)) is not None:
        yield crashing
    if (named := files.device_files(settings)) is not None:
        yield named
    return seen.bindings is not None and seen.bindings.gpu_bytes > 0 and settings.n_gpu_layers != 0


def _folders(config: Config) -> Iterator[Finding]:
    from ...config.layers import cache_path, data_path
    from ...models import default as models
    from .files import SPARE_BYTES, folder, there

    device = config.device
    if device.enabled and not device.model and not there(models.default_model_path()):
        yield folder("models folder", models.models_dir(), 2 * models.SIZE)  # the download, and its contents
    yield folder("data folder", data_path())
    yield folder("cache folder", cache_path(), wished=SPARE_BYTES + int(device.spill_gib * 2**30))


def _history(config: Config) -> Generator[Finding, None, float | None]:
    """Yield the history's finding; return the time of the latest request in it."""
    from ...errors import Unavailable
    from ...store import checkup
    from .files import history

    path = _history_path(config)
    try:
        path.stat()
        seen = checkup.look(path)
    except FileNotFoundError:
        seen = None
    except (OSError, Unavailable) as e:
        yield history(path, reason_of(e))
        return None
    yield history(path, seen)
    return None if seen is None else seen.latest


def _history_path(config: Config) -> Path:
    from ...config.layers import data_path

    return Path(config.history.path).expanduser() if config.history.path else data_path() / "history.sqlite"


def _server(
    config: Config, key: FoundKey, daemon: dict[str, Any] | None, *, unasked: str
) -> Generator[Finding, None, float | None]:
    """Yield the server's findings, without asking it where `unasked` says why; return how far our clock is ahead, s."""
    from ...config import pricelist
    from ...config.layers import config_path
    from ...config.servers import SERVER
    from ...errors import ConfigError
    from ...money.catalog import Catalog
    from ...onboarding import asking
    from . import server
    from .finding import Level, wrong

    settings, folder = config.server, config_path().parent / "servers"
    reply = asking.Reply()
    try:
        catalog = pricelist.load(folder)
    except (ConfigError, OSError) as e:
        catalog = Catalog(pricelist.shipped_lists())
        yield wrong("price lists", reason_of(e), "mend that file, or move it away: `disco up` reads it, too")
    yield server.address(settings, config.api, offline=bool(unasked))
    if not settings.base_url:
        return None
    found = server.key(settings, key, catalog)
    reached = server.network("network", settings.base_url, unasked=unasked)
    yield found
    if (own := server.key_file(settings, os.environ)) is not None:
        yield own
    yield reached
    ill = server.left_alone(daemon, SERVER) if config.servers else server.answers(daemon)
    if ill is not None:
        yield ill
    doubts = Level.WRONG in (reached.level, found.level if key.value else Level.OK)
    if not unasked and not doubts and server.may_ask(settings, key):
        reply = asking.ask_models(settings.base_url, key.value)
        yield server.models(settings, reply, with_key=bool(key.value))
    yield server.continuation(settings, _probe_verdict(config, daemon))
    yield server.price(config, catalog, folder)
    if config.device.enabled:
        yield server.grades(config)
    return reply.skew_s


def _several(
    config: Config, keys: Mapping[str, FoundKey], daemon: dict[str, Any] | None, *, unasked: str
) -> Generator[Finding, None, float | None]:
    """Yield the findings of each server of `[[servers]]`; of one without a model those that need none.

    Return how far our clock is ahead, s, by the first of them that tells.
    """
    from ...config.servers import alone
    from . import server

    ahead_s = None
    for one in config.servers:
        ill = server.left_alone(daemon, one.name)
        checks = _server(alone(config, one), keys[one.name], None, unasked=unasked)
        while True:
            try:
                finding = next(checks)
            except StopIteration as end:
                ahead_s = end.value if ahead_s is None else ahead_s
                break
            if one.model or finding.name not in ("server model", "continuation", "price", "grades"):
                yield server.of_named(finding, one.name)
        if ill is not None:
            yield server.of_named(ill, one.name)
    return ahead_s


def _named_keys(config: Path) -> list[str] | ConfigError:
    """Return the names of the keys that others have, or why their file cannot be read."""
    from ...errors import ConfigError
    from ...keys.key_file import KeyFile

    try:
        return [key.name for key in KeyFile(config).read()]
    except ConfigError as e:
        return e


def _probe_verdict(config: Config, daemon: dict[str, Any] | None) -> Profile | None:
    """Return the probe's verdict on the server, from the running daemon or the history."""
    from ...endpoints.continuation import Profile, profile_name
    from ...errors import Unavailable
    from ...store import checkup

    name = profile_name(config.server.base_url, config.server.model)
    probed = (((daemon or {}).get("endpoints") or {}).get("server") or {}).get("probed")
    try:
        if probed is None and (path := _history_path(config)).exists():
            probed = checkup.profile(path, name)
        found = Profile.from_json(probed) if probed else None
    except (OSError, Unavailable, ValueError):  # the finding on the history says it
        return None
    return found if found is not None and found.server == name else None


def _power(config: Config, *, on_gpu: bool) -> Iterator[Finding]:
    import time

    from ...power.sensors import of_this_machine
    from . import machine

    state = of_this_machine(config.device.watts, config.device.n_threads, on_gpu=on_gpu).look(time.monotonic())
    yield machine.energy(state)
    yield machine.battery(state.charge, config.caps.battery_floor)
    yield machine.heat(state.thermal)


def _newest_price() -> datetime:
    """Return a time that is certainly past: this program was made after it."""
    from datetime import UTC, datetime

    from ...config import pricelist

    days = [price.as_of for profile in pricelist.shipped_lists() for price in profile.models.values() if price.as_of]
    return datetime.combine(max(days), datetime.min.time(), UTC)


# --- showing ----------------------------------------------------------------------------------------------------------


def clean(finding: Finding, hidden: Iterable[str], own: Iterable[str] = ()) -> Finding:
    """Return a finding without secrets, without even pieces of `own` keys, and without control codes."""
    return replace(finding, found=_clean(finding.found, hidden, own), mend=_clean(finding.mend, hidden, own))


def _clean(text: str, hidden: Iterable[str], own: Iterable[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    for key in own:
        text = masked(text, key)
    text = _KEY_LIKE.sub(HIDDEN, _CREDENTIALS.sub("", text))
    return plain(text)


def _secrets(env: Mapping[str, str], *own: str) -> list[str]:
    """Return the secrets to hide, the longest first: one may be part of another."""
    found = {value for name, value in env.items() if _SECRET_NAMES.search(name)} | {*own}
    return sorted(
        (secret for secret in found if len(secret) >= _LEAST_SECRET), key=lambda secret: (-len(secret), secret)
    )


def _show(found: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding as it comes: in colours and folded on a terminal, as one line elsewhere."""
    console = make_console(highlight=False)
    for finding in found:
        if console.is_terminal:
            console.print(_row(finding))
        else:
            print(line(finding), flush=True)
        yield finding


def line(finding: Finding) -> str:
    """Return a finding as plain text; further lines of its mend are indented."""
    mend = finding.mend.replace("\n", f"\n{'':{_MARGIN}}")
    return f"{finding.level:<6}{finding.name:<{_MARGIN - 7}} {finding.found}{f' -> {mend}' if mend else ''}"


def _row(finding: Finding) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    table.add_column(width=6)
    table.add_column(width=_MARGIN - 6)
    table.add_column(overflow="fold")
    text = Text(finding.found)
    if finding.mend:
        text.append(f"\n→ {finding.mend}", "dim" if finding.level == "ok" else "")
    table.add_row(Text(finding.level.value, _COLOURS[finding.level]), finding.name, text)
    return table
