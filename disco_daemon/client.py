"""The HTTP client of a running daemon for verbs that ask once: `disco status`, `disco plan` …; and its errors.

`link` is the client for conversations.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from .errors import DiscoError
from .net import hostname, is_loopback
from .plain import plain

if TYPE_CHECKING:
    from .settings import Config

CONNECT_TIMEOUT_S = 5.0
RELOAD_TIMEOUT_S = 30.0  # the history is read again, and fitted to
MAX_ERROR = 65536  # bytes read of an answer that is an error; a message takes some hundred
NOT_RUNNING, REFUSED_KEY = "not_running", "invalid_api_key"  # codes of a DaemonError with a next step of their own


class DaemonError(DiscoError):
    """The daemon is not there, or says no; the message is fit for a user, with the next step where there is one.

    `code` is the daemon's own (`cap_reached`, `model_not_found` …), or NOT_RUNNING, REFUSED_KEY.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(plain(message))  # whoever answers at that address has worded it
        self.code = code


def not_running(root: str, why: object) -> DaemonError:
    """Nobody listens at `root`."""
    return DaemonError(f"no daemon at {root}: start one with `disco up` ({why})", NOT_RUNNING)


def refusal(root: str, status: int, body: bytes) -> DaemonError:
    """What an answer that is none of 2xx says."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"{root} answers HTTP {status}: is it a disco daemon?", None
    if status == 401 and code == REFUSED_KEY:
        message = f"the daemon at {root} refuses the API key: set its own with `disco config set api.key KEY`"
    return DaemonError(message, code if isinstance(code, str) else None)


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
    with _open(urllib.request.Request(root + path, headers=headers(key)), timeout_s) as response:  # noqa: S310
        return json.load(response)


def change(root: str, changes: dict[str, Any], key: str = "", timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """PATCH settings, `section.name` to value; the daemon's answer. Raises DaemonError."""
    told = headers(key) | {"Content-Type": "application/json"}
    body = json.dumps(changes).encode()
    request = urllib.request.Request(root + "/disco/v1/settings", body, told, method="PATCH")  # noqa: S310
    with _open(request, timeout_s) as response:
        return json.load(response)


def reload(root: str, key: str = "", timeout_s: float = RELOAD_TIMEOUT_S) -> Any:
    """Have the daemon read its configuration again; what it took up. Raises DaemonError."""
    request = urllib.request.Request(root + "/disco/v1/reload", b"", headers(key), method="POST")  # noqa: S310
    with _open(request, timeout_s) as response:
        return json.load(response)


def headers(key: str) -> dict[str, str]:
    """What shows the daemon its key, if it has one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it is an error like any other status."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        """None is to be asked instead."""


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    # Never through a proxy: the daemon is on this machine. And it redirects nobody: its key is for nobody else.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())
    root = f"{request.type}://{request.host}"
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as e:
        with e:
            raise refusal(root, e.code, e.read(MAX_ERROR)) from e
    except OSError as e:
        raise not_running(root, getattr(e, "reason", e)) from e
