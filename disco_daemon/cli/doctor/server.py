"""Checks of the configured server. No other server is asked, and no key and no password is shown."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...client.side_health import breaker_words, sides_of
from ...config.layers import KeyRefusedError, server_api_key
from ...config.schema import Api, Config, NamedServer, ServerSettings
from ...config.servers import place_of
from ...endpoints.continuation import Profile, Way
from ...errors import ConfigError
from ...money.catalog import Catalog, is_private
from ...onboarding.asking import Reply, goes_nowhere_public, within
from ...system.net import hostname, is_loopback, is_plain
from ...types import Continuation, Unequal, relation
from .finding import Finding, ok, warn, wrong

NETWORK_TIMEOUT_S = 3.0  # looking up the name, and connecting
N_NEAR = 3  # names like the one asked for, in a hint
_PORTS = {"http": 80, "https": 443}
_SET_SERVER = re.compile(r"`disco config set server\.(\w+) ([^`]*)`")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
OFFLINE = "not asked: --offline"
PRIVATE = "not asked: policy.private is on (`disco doctor --online` asks it all the same)"


def address(settings: ServerSettings, api: Api, *, offline: bool = False) -> Finding:
    """Check whether an OpenAI client can use the URL, and that it is not the daemon's own (`api`)."""
    name, url = "server", settings.base_url
    if not url:
        return ok(name, "none, this machine answers alone", "`disco setup` adds one")
    parts, where = urlsplit(url), display_url(url)
    text = f"{settings.model or 'no model'} at {where}"
    if "@" in parts.netloc or parts.query:
        return warn(name, f"{text}; the URL holds more than an address", "put the key into a file or a variable")
    if is_loopback(parts.hostname or "") and (parts.port or _PORTS[parts.scheme]) == api.port:
        return wrong(
            name, f"{text} is this daemon itself", f"put the server's own address into {place_of(settings)}base_url"
        )
    if parts.path.rstrip("/").endswith(("/completions", "/models", "/responses")):
        return wrong(
            name, f"{text}: that is one of its pages", f"end {place_of(settings)}base_url before it, mostly with /v1"
        )
    if parts.scheme == "http" and not (is_private(hostname(url)) if offline else goes_nowhere_public(url)):
        if settings.insecure:
            return warn(name, f"{text}: whoever is on the way can read key and prompts", "use https")
        mend = f"use https, or {_set(settings, 'insecure', 'true')} if you own the way there"
        return warn(name, f"{text}: prompts can be read on the way; no key is sent there, and with one it is off", mend)
    return ok(name, text)


def answers(daemon: Mapping[str, Any] | None) -> Finding | None:
    """Return how the running daemon's last question to the server failed, why it is left alone; None if it is well."""
    found = sides_of(daemon or {}).get("server")
    side = ((daemon or {}).get("endpoints") or {}).get("server") or {}
    breaker = breaker_words(side)
    if found is None or (found.since is None and not breaker):
        return None
    mend = "`disco setup` sets it up anew" if found.key else "it is asked again by itself"
    if found.since is None:
        return warn("answers", breaker, mend)
    said = f"{found.lasting}: {side.get('last_error') or ''}".rstrip(": ")
    return warn("answers", f"{said}. The breaker is {breaker}" if breaker else said, mend)


def left_alone(daemon: Mapping[str, Any] | None, name: str) -> Finding | None:
    """Return why the running daemon leaves one of several servers alone; None where it does not."""
    for one in (daemon or {}).get("servers") or ():
        if one.get("name") == name and (breaker := breaker_words(one)):
            said = f"{one.get('model')}: {one.get('last_error') or ''}".rstrip(": ")
            breaker_now = one.get("breaker") or {}
            lasts = breaker_now.get("state") == "open" and breaker_now.get("until_s") is None
            mend = "mend what it says, then `disco config reload`" if lasts else "it is asked again by itself"
            return warn("answers", f"{said}. The breaker is {breaker}", mend)
    return None


def of_named(finding: Finding, name: str) -> Finding:
    """Return a finding on one of `[[servers]]`: `disco config set` does not reach its settings, which the file has."""
    entry = f"[[servers]] {name}"
    mend = _SET_SERVER.sub(lambda said: f"`{said[1]} = {said[2]}`", finding.mend)
    mend, found = (re.sub(r"\bserver\.(?=[a-z])", "", text) for text in (mend, finding.found))
    mend = mend.replace("`disco setup`", f"`disco setup --as {name}`")
    if entry not in mend and (
        mend != finding.mend or set(re.findall(r"\w+_\w+", mend)) & set(NamedServer.__struct_fields__)
    ):
        mend = f"{mend} (in {entry})"
    return replace(finding, name=f"{name}: {finding.name}", found=found, mend=mend)


def grades(config: Config) -> Finding:
    """Say which side is a stand-in for the other, by all that is known without asking."""
    from ...daemon.grading import device_grade, server_grade

    found = relation(device_grade(config), server_grade(config), Unequal(config.policy.unequal))
    is_used = found.lower is not None
    return ok("grades", found.why, "`disco config set policy.unequal race` lets both race" if is_used else "")


def display_url(url: str) -> str:
    """Return an address without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


# --- the key ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundKey:
    """The API key and its source, or in `problem` why there is none."""

    value: str = ""
    source: str = ""
    problem: str = ""
    refused: bool = False  # there is one that may not go to that server

    def __repr__(self) -> str:
        return f"<FoundKey from {self.source or 'nowhere'}>"


def read_key(config: Config, env: Mapping[str, str]) -> FoundKey:
    """Find the key as the daemon does."""
    settings = config.server
    # The key itself may stand where the variable's name belongs.
    named = _VARIABLE.fullmatch(settings.api_key_env) is not None
    variable = f"${settings.api_key_env}" if named else f"the variable that {place_of(settings)}api_key_env names"
    try:
        value = server_api_key(config, env)
    except KeyRefusedError as e:
        return FoundKey(problem=str(e), refused=True)
    except ConfigError as e:
        return FoundKey(problem=str(e))
    if value:
        return FoundKey(
            value, variable if env.get(settings.api_key_env) else str(Path(settings.api_key_file).expanduser())
        )
    if not settings.api_key_env:
        return FoundKey(problem=f"neither {place_of(settings)}api_key_env nor api_key_file says where one is")
    hint = "" if named else f" ({place_of(settings)}api_key_env is to be a name, not the key)"
    file = f", and the file in {place_of(settings)}api_key_file is empty" if settings.api_key_file else ""
    return FoundKey(problem=f"{variable} is not set{hint}{file}")


def _set(settings: ServerSettings, key: str, value: str) -> str:
    """Say how a setting of a server gets a value: by a command, or in the file where it is one of several."""
    if isinstance(settings, NamedServer):
        return f"set `{key} = {value}` of [[servers]] {settings.name} in config.toml"
    return f"`disco config set server.{key} {value}`"


def may_ask(settings: ServerSettings, found: FoundKey) -> bool:
    """Whether the server may be asked as the daemon would: with a key by plain http at private addresses only."""
    if found.refused:
        return False
    return (
        not found.value
        or settings.insecure
        or not is_plain(settings.base_url)
        or goes_nowhere_public(settings.base_url)
    )


def key(settings: ServerSettings, found: FoundKey, catalog: Catalog) -> Finding:
    """Check whether there is a key where one is needed."""
    name = "server key"
    file = _set(settings, "api_key_file", "FILE")
    mend = f"set that variable where the daemon starts, or {file} (chmod 600)"
    if found.value:
        if found.value != found.value.strip() or not (found.value.isascii() and found.value.isprintable()):
            return wrong(name, f"the one in {found.source} has white space or odd characters in it", "write it anew")
        return ok(name, f"there, in {found.source}")
    if found.refused:
        text, _, way = found.problem.partition(": ")
        return wrong(name, f"the server is off: {text}", way)
    known = catalog.server(settings.base_url)
    if is_private(hostname(settings.base_url)):
        unset = not settings.api_key_file
        return ok(name, "none; a server of your own mostly needs none") if unset else wrong(name, found.problem, mend)
    sure = settings.api_key_file or (known is not None and not known.private)
    return (wrong if sure else warn)(name, found.problem, mend)


def key_file(settings: ServerSettings, env: Mapping[str, str]) -> Finding | None:
    """Check that the key file is its owner's alone; None if none is named. A variable with a key goes first."""
    name = "key file"
    if not settings.api_key_file:
        return None
    path = Path(settings.api_key_file).expanduser()
    try:
        seen = path.stat()
    except OSError as e:
        text, mend = f"{path} cannot be read: {e.strerror}", "write the key into it (chmod 600), or unset api_key_file"
        if env.get(settings.api_key_env):
            return warn(name, f"{text}; the variable goes first", mend)
        return wrong(name, text, mend)
    mode = stat.S_IMODE(seen.st_mode)
    if mode & 0o077:
        return wrong(name, f"others may read {path} (mode {mode:o}); it is not used like that", f"`chmod 600 {path}`")
    if seen.st_uid not in (os.geteuid(), 0):
        text = f"{path} belongs to another user ({seen.st_uid}); it is not used like that"
        return wrong(name, text, f"`chown $(id -un) {path}`")
    if not stat.S_ISREG(seen.st_mode):
        return wrong(name, f"{path} is no regular file; it is not used", "name a file with the key in it")
    return ok(name, f"{path}, yours alone (mode {mode:o})")


# --- the network ------------------------------------------------------------------------------------------------------


def network(name: str, url: str, *, unasked: str = "") -> Finding:
    """Check a TCP connection to the host of `url` or the proxy before it, unless `unasked` says why not."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or _PORTS[where.scheme]
    if unasked:
        return ok(name, unasked)
    proxy = _proxy(where.scheme, host)
    if proxy is not None:
        host, port = proxy
    via = f"the proxy {host}:{port}" if proxy else f"{host}:{port}"
    mend = "check the network and a firewall; the daemon answers from this machine meanwhile"
    return reach(name, host, port, via, mend)


def reach(name: str, host: str, port: int, via: str, mend: str) -> Finding:
    """Check a TCP connection to a port, which is shown as `via`; `mend` is for one that does not answer."""
    began = time.monotonic()
    try:
        within(NETWORK_TIMEOUT_S, lambda: _connect(host, port))
    except TimeoutError:
        return wrong(name, f"{via} did not answer within {NETWORK_TIMEOUT_S:g} s", mend)
    except socket.gaierror as e:
        return wrong(name, f"the name {host} is not known: {e.strerror}", "check the URL, and the network's DNS")
    except (OSError, UnicodeError) as e:
        reason = getattr(e, "strerror", None) or e
        return wrong(name, f"{via} cannot be reached: {reason}", "check that it runs, the URL, and the network")
    return ok(name, f"{via} answered in {1e3 * (time.monotonic() - began):.0f} ms")


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=NETWORK_TIMEOUT_S).close()


def _proxy(scheme: str, host: str) -> tuple[str, int] | None:
    """Return the proxy of the daemon's client, None if there is none; local addresses have none."""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    found = urlsplit(proxies.get(scheme) or proxies.get("all") or "")
    return (found.hostname, found.port or _PORTS.get(found.scheme, 80)) if found.hostname else None


# --- what it serves ---------------------------------------------------------------------------------------------------


def models(settings: ServerSettings, reply: Reply, *, with_key: bool) -> Finding:
    """Check whether the server answers, takes the key, and has the model."""
    name, address = "server model", f"{place_of(settings)}base_url"
    page = f"{display_url(settings.base_url).rstrip('/')}/models"
    if reply.problem:
        return wrong(name, f"{page}: {reply.problem}", f"check {address}, and what stands between here and there")
    if reply.status == 403 and with_key:  # it may be good for answers
        mend = "if answers fail, too, give the key the right to, or use another one; `disco status` tells why"
        return warn(name, f"{page} is not allowed with this key (403)", mend)
    if reply.status in (401, 403):
        refused = "refuses the key" if with_key else "wants a key"
        mend = "check the key, and that it is this server's" if with_key else "see the line on the server's key"
        return wrong(name, f"{page} {refused} ({reply.status})", mend)
    if 300 <= reply.status < 400:
        to = f" to {reply.elsewhere}" if reply.elsewhere else ""
        return wrong(name, f"{page} points elsewhere ({reply.status}{to})", f"put the right address into {address}")
    if reply.status == 404:
        return warn(name, f"{page} is not there (404)", f"check {address}; it mostly ends with /v1")
    if reply.status != 200 or reply.models is None:
        said = f"answers {reply.status}" if reply.status != 200 else "gives no list of models"
        return warn(name, f"{page} {said}", f"if answers fail, too, check {address}; `disco status` tells why")
    return _check_listed(name, settings, reply.models)


def _check_listed(name: str, settings: ServerSettings, listed: tuple[str, ...]) -> Finding:
    model = settings.model
    plain = {one.casefold().removeprefix("models/"): one for one in listed}
    wanted = model.casefold().removeprefix("models/")
    if wanted in plain:
        return ok(name, f"{model} is one of {len(listed)} listed")
    near = [plain[one] for one in get_close_matches(wanted, plain, N_NEAR, 0.5)]
    mend = f"{_set(settings, 'model', 'NAME')}{': ' + ', '.join(near) if near else ''}"
    return warn(name, f"{model} is not among the {len(listed)} models listed", mend)


def price(config: Config, catalog: Catalog, folder: Path) -> Finding:
    """Check the price of a token; the mend asks for an unknown one."""
    name, settings = "price", config.server
    own = (settings.input_usd_per_mtok, settings.output_usd_per_mtok)
    if own[0] is not None and own[1] is not None:
        return ok(name, f"${own[0]:g} and ${own[1]:g} per million input and output tokens, by your settings")
    advice = catalog.advice(settings.base_url, settings.model, str(folder / "own.toml"))
    if advice is not None:
        found, _, mend = advice.partition(". Put into ")
        return warn(name, f"{found} (`disco prices refresh` fetches a newer list)", f"put into {mend}")
    known = catalog.price(settings.base_url, settings.model)
    day = f", {known.as_of}" if known.as_of else ""
    dollars = f"${known.input:g} and ${known.output:g} per million input and output tokens"
    return ok(name, f"{dollars} ({known.entry}{day})")


# --- going on with half an answer -------------------------------------------------------------------------------------


def continuation(settings: ServerSettings, profile: Profile | None) -> Finding:
    """Check how this server continues an answer that was begun elsewhere; `profile` is the probe's verdict, if any."""
    name, way = "continuation", Way.from_setting(settings.continuation, settings.base_url)
    source = "as you have set it" if settings.continuation != "auto" else "known of this host"
    if settings.continuation == "auto" and profile is not None:
        way, source = Way.of(profile), "found by the probe"
    if not way.known:
        if settings.probe:
            return ok(name, "not known yet", "it is found out after this server's first answer, with some 200 tokens")
        mend = "`disco config set server.probe true`, or set server.continuation to what this server can do"
        return warn(name, f"not known, and server.probe is off: {way.method} is tried in need", mend)
    if way.method == "none":
        text = f"none, {source}: answers move away from this server, not to it"
        instruct = "`disco config set server.continuation instruct` would ask for it in words"
        return ok(name, text, instruct if settings.continuation == "auto" else "")
    trust = "" if way.trust is Continuation.EXACT else ", checked where the texts meet"
    return ok(name, f"{way.method}, {source}{trust}")
