"""Admits callers: no web page of a stranger, no other user of this machine, and no caller without the key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web

from ...errors import RequestError
from ...keys.keyring import Keyring
from ...keys.named_key import NamedKey, parts_of
from ...system.net import hostname, is_http_url, is_loopback
from ..control.scrape import Handler
from . import cross_origin
from .connections import peer_of
from .peers import Peer, Whose

OPEN = frozenset({"/health", "/metrics"})  # for every user of this machine
WITHOUT_KEY = frozenset({"/", "/health"})
OWN_SITES = frozenset({"same-origin", "none"})  # Sec-Fetch-Site: the request is not from another site's page
_FETCH_HEADERS = ("Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest", "Sec-Fetch-User")
# This machine by a name that no resolver can point elsewhere, with or without a port; nothing before or behind it.
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_LOOPBACK = re.compile(
    rf"(?:(?:[a-z0-9_-]+\.)*localhost|127(?:\.{_OCTET}){{3}}|\[::1\])(?::\d{{1,5}})?", re.IGNORECASE | re.ASCII
)
_PORT = re.compile(r":(\d{1,5})$", re.ASCII)
MAX_PORT = 65535  # of TCP


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The guard's settings: `host` as bound, `key` that clients must show ("" = none), and further callers let in.

    `origins` are whole ones, and schemes such as `app://` for all origins that have it. `control_key` opens the
    controls over TCP, and all that `key` opens ("" = `key` opens the controls). `aliases` are names of models. `keys`
    have names; each opens what is served to callers, as far as it may. `is_open`: other machines reach a socket.
    """

    host: str
    key: str
    any_user: bool = False
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    control_key: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    keys: Keyring = field(default_factory=Keyring)
    is_open: bool = False

    @property
    def asks_users(self) -> bool:
        """Whether the owner of a connection matters; where a key is asked for, only the key does."""
        return not self.asks_key and not self.any_user

    @property
    def asks_key(self) -> bool:
        """Whether a connection over TCP has to show a key."""
        return bool(self.key) or self.is_open


CONFIG = web.AppKey("config", ApiConfig)
_KEY = web.RequestKey("key", NamedKey)


@web.middleware
async def check_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse web pages (DNS rebinding, CVE-2024-28224), other users, callers without the key. Raises RequestError."""
    config, peer = request.app[CONFIG], peer_of(request)
    shown = [text for text in _shown(request) if parts_of(text)]
    if (key := next((found for text in shown if (found := config.keys.find(text)) is not None), None)) is not None:
        request[_KEY] = key
    if is_loopback(config.host) and peer.whose is not Whose.DOOR:
        _check_host(request, config)
    _check_page(request, config)
    if (
        shown and request.path not in WITHOUT_KEY and not knows_key(request)
    ):  # at either door, also where none is asked for
        msg = "The API key is none of this daemon, or was revoked: ask whoever gave it to you for another one."
        raise RequestError(msg, status=401, code="invalid_api_key")
    if config.asks_users and peer.stranger and request.path not in OPEN and not knows_key(request):
        raise _not_yours(peer)
    if cross_origin.is_preflight(request) and cross_origin.is_granted(request):
        return cross_origin.preflight(request)
    # The Unix socket needs no key: by the file system only the owner reaches it.
    asks_key = config.asks_key and request.path not in WITHOUT_KEY and peer.whose is not Whose.DOOR
    if asks_key and not knows_key(request):
        msg = "Incorrect API key provided: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`."
        raise RequestError(msg, status=401, code="invalid_api_key")
    return await handler(request)


def knows_key(request: web.Request) -> bool:
    """Whether a request shows one of the keys."""
    config = request.app[CONFIG]
    return _KEY in request or any(key and shows_key(request, key) for key in (config.key, config.control_key))


def key_of(request: web.Request) -> NamedKey | None:
    """Return the key with a name that a request shows; None where it shows none."""
    return request.get(_KEY)


def _shown(request: web.Request) -> list[str]:
    """Return the texts that a request shows as keys."""
    headers = request.headers
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    return [text.strip(" ") for text in (bearer if scheme.lower() == "bearer" else "", headers.get("X-Api-Key", ""))]


def shows_key(request: web.Request, key: str) -> bool:
    """Whether a request shows a key, as clients of OpenAI or as those of Anthropic do."""
    bearer = shows(request.headers.get("Authorization", ""), key)
    return _is_same(request.headers.get("X-Api-Key", ""), key) or bearer


def shows(authorization: str, key: str) -> bool:
    """Whether an Authorization header has the key: its scheme in any case (RFC 9110), and never the key alone."""
    scheme, _, shown = authorization.partition(" ")
    return _is_same(shown, key) and scheme.lower() == "bearer"


def _is_same(shown: str, key: str) -> bool:
    """Whether a text is the key; how long this takes tells nothing of it."""
    return hmac.compare_digest(shown.strip(" ").encode("utf-8", "surrogateescape"), key.encode())


# --- other users --------------------------------------------------------------------------------------------------


def _not_yours(peer: Peer) -> RequestError:
    if peer.uid is not None:
        who = f"user {peer.uid} of this machine"
    else:  # under WSL or in a container the process is out of sight
        who = "nobody that can be told: its process has closed it, or is not in sight"
    msg = (
        f"This connection is of {who}; the daemon is another user's, who can let others in: by a key that they send "
        "(`disco config set api.key SECRET`), or all of this machine (`disco config set api.any_user true`)."
    )
    return RequestError(msg, status=403, code="other_user")


# --- web pages ----------------------------------------------------------------------------------------------------


def _check_host(request: web.Request, config: ApiConfig) -> None:
    """Require this machine's name in Host, whatever it resolved to, and in a target that names a host."""
    named = [request.headers.get("Host", "")]
    if not request.raw_path.startswith(("/", "*")):
        named.append(urlsplit(request.raw_path).netloc or request.raw_path)
    if not all(serves(name, config.hosts) for name in named):
        msg = (
            "This Host is not served here: use http://127.0.0.1 or http://localhost, or let its name in with "
            "`disco config set api.hosts NAME`."
        )
        raise RequestError(msg, status=403, code="wrong_host")


def serves(host: str, more: frozenset[str] = frozenset()) -> bool:
    """Whether a Host header names this machine: a loopback name or address, or one of `more` names."""
    found = _LOOPBACK.fullmatch(host)
    port = _PORT.search(host)
    if port is not None and int(port[1]) > MAX_PORT:
        return False
    return found is not None or (bool(more) and _PORT.sub("", host).lower() in more)


def _check_page(request: web.Request, config: ApiConfig) -> None:
    """Refuse a page of another site by a browser's headers; other clients send none of these.

    A page that is let in may read what it asks for, where that is an answer.
    """
    headers = request.headers
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
    known = origin is not None and _is_let_in(request, origin, config)
    if not known and ((origin is not None and not _is_here(origin)) or (site is not None and site not in OWN_SITES)):
        msg = "Requests from web pages of this Origin are not allowed; api.origins lists those that are."
        if origin is not None and cross_origin.is_anybodys(origin):
            msg = "A page without an Origin of its own, such as a local file, has to show api.key, which has to be set."
        raise RequestError(msg, status=403, code="wrong_origin")
    if origin is not None and known and cross_origin.is_readable(request):
        cross_origin.grant(request, origin)
    if request.body_exists and request.content_type != "application/json" and any(h in headers for h in _FETCH_HEADERS):
        msg = "A web page has to send its body as Content-Type: application/json."
        raise RequestError(msg, status=415, code="wrong_content_type")


def _is_here(origin: str) -> bool:
    """Whether an origin is a web page's that a program of this machine serves; other schemes only look like it."""
    return is_http_url(origin) and is_loopback(hostname(origin))


def _is_let_in(request: web.Request, origin: str, config: ApiConfig) -> bool:
    """Whether the settings let pages of an origin in: a whole one everywhere, a scheme where answers are.

    `null` and `file://` are a local file's, but a sandboxed frame of any web page says `null`, too, and a file may be a
    page that was downloaded: a key has to tell them apart. A preflight cannot show one, and gets the page no further.
    """
    if origin in config.origins and not origin.endswith(cross_origin.SCHEME_END):
        return True
    if not cross_origin.is_readable(request):
        return False
    if cross_origin.is_anybodys(origin):
        if cross_origin.LOCAL_FILE not in config.origins:
            return False
        asks_key = bool(config.asks_key or config.control_key or len(config.keys))
        return asks_key and (cross_origin.is_preflight(request) or knows_key(request))
    return cross_origin.lets_in(origin, config.origins)
