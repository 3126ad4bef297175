"""Small facts about addresses. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import lru_cache
from urllib.parse import urljoin, urlsplit


@lru_cache(maxsize=256)  # twice a request, of a few names
def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


# Loopback and RFC 1918, 100.64/10 (carriers, Tailscale), link-local, IPv6's ULA; 0.0.0.0 and :: are this machine.
_PRIVATE = tuple(
    ipaddress.ip_network(net)
    for net in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "0.0.0.0/32",
        "::1/128", "fc00::/7", "fe80::/10", "::/128",
    )
)  # fmt: skip
_PORTS = {"http": 80, "https": 443}


def is_private_address(address: str) -> bool:
    """Whether an IP address is of this machine or of a network of one's own; False for what is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in net for net in _PRIVATE if net.version == found.version)


def is_address(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def origin(url: str) -> str:
    """Scheme, host and port of a URL in one spelling, such as https://api.openai.com; "" if it has none."""
    if not is_http_url(url):
        return ""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    host = f"[{host}]" if ":" in host else host
    usual = parts.port in (None, _PORTS[parts.scheme])
    return f"{parts.scheme}://{host}{'' if usual else f':{parts.port}'}"


def is_plain(url: str) -> bool:
    """Whether what is sent to a URL can be read on the way."""
    return urlsplit(url).scheme == "http"


def in_the_clear(asked: str, server: str = "") -> str:
    """Why no key is sent to an origin by plain http, and what to do; `server` is the name of one of several."""
    allow = f"`insecure = true` of [[servers]] {server}" if server else "`disco config set server.insecure true`"
    return (
        f"the API key would travel to {asked} in the clear: use https (`disco setup`), or, if you own the way there, "
        f"{allow}"
    )


def hostname(url: str) -> str:
    """The host of a URL, "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_http_url(url: str) -> bool:
    """Whether it is an http(s) URL with a host and, if any, a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def with_scheme(text: str) -> str:
    """Return an address as a URL: one without a scheme gets http on networks of one's own, https elsewhere.

    "" if it is no address: a single word, unless it has a port or is this machine's name.
    """
    if "://" in text:
        return text if is_http_url(text) else ""
    host = hostname(f"//{text}")
    named = "." in host or ":" in host or host == "localhost" or re.match(r"[^/]+:\d+(/|$)", text)
    if not host or not named or any(map(str.isspace, text)):
        return ""
    url = f"{'http' if is_loopback(host) or is_private_address(host) or '.' not in host else 'https'}://{text}"
    return url if is_http_url(url) else ""


def without_credentials(url: str) -> str:
    """A URL fit to be shown: no user, password or token before the host."""
    before, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(f"{before}@", "", 1) if at else url


def pointed_to(url: str, location: str) -> str:
    """Where a redirect of `url` leads, fit to be shown: no credentials, and no query, which may hold some."""
    try:
        parts = urlsplit(urljoin(url, location) if location else "")
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        host = ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{parts.path}" if host else "somewhere else"
