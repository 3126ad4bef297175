"""Small facts about addresses. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
from urllib.parse import urljoin, urlsplit


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


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
