"""The HTTP client of a running daemon, shared by `disco status`, `disco chat`, `disco demo` and the TUI."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import DiscoError
from .net import hostname, is_loopback

if TYPE_CHECKING:
    from .settings import Config

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0  # between two reads; a daemon gives up on its endpoints long before


class DaemonError(DiscoError):
    """The daemon is not there, or says no; the message is fit for a user."""


def base_url(host: str, port: int) -> str:
    """The daemon's root, without /v1."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def daemon_at(url: str | None, config: Config) -> tuple[str, str]:
    """Root and API key of the daemon to talk to; the key is shown to the configured daemon and this machine only."""
    own = base_url(config.api.host, config.api.port)
    root = url.rstrip("/").removesuffix("/v1") if url else own
    return root, config.api.key if root == own or is_loopback(hostname(root)) else ""


def get(root: str, path: str, key: str = "", timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """GET a JSON document. Raises DaemonError."""
    with _open(urllib.request.Request(root + path, headers=_headers(key)), timeout_s) as response:  # noqa: S310
        return json.load(response)


def change(root: str, changes: dict[str, Any], key: str = "", timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """PATCH settings, `section.name` to value; the daemon's answer. Raises DaemonError."""
    headers = _headers(key) | {"Content-Type": "application/json"}
    body = json.dumps(changes).encode()
    request = urllib.request.Request(root + "/disco/v1/settings", body, headers, method="PATCH")  # noqa: S310
    with _open(request, timeout_s) as response:
        return json.load(response)


def stream_chat(root: str, payload: dict[str, Any], key: str = "") -> Iterator[dict[str, Any]]:
    """POST a chat completion with `stream`, yield its chunks. Raises DaemonError, for in-band errors too."""
    body = json.dumps(payload | {"stream": True}).encode()
    headers = _headers(key) | {"Content-Type": "application/json"}
    request = urllib.request.Request(root + "/v1/chat/completions", body, headers)  # noqa: S310
    with _open(request, ANSWER_TIMEOUT_S) as response:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise DaemonError(chunk["error"]["message"])
            yield chunk
    raise DaemonError("the daemon ended the answer too early")


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    # Never through a proxy: the daemon is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as e:
        try:
            message = json.load(e)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {e.code}"
        raise DaemonError(message) from e
    except OSError as e:
        root = f"{request.type}://{request.host}"
        msg = f"no daemon at {root}: start one with `disco up` ({getattr(e, 'reason', e)})"
        raise DaemonError(msg) from e
