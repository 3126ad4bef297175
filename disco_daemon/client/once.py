"""The HTTP client of a running daemon for verbs that ask once: `disco status`, `disco plan` …; and its errors.

A daemon on this machine is asked by its Unix socket, which only this user can have made; any other one over TCP, with
its key. `stream` is the client for conversations.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import DiscoError
from ..plain import plain, reason_of
from ..system import socketfile
from ..system.net import hostname, is_loopback, without_credentials
from . import listeners

if TYPE_CHECKING:
    from ..config.schema import Config

CONNECT_TIMEOUT_S = 5.0  # to a daemon on this machine, mostly; it takes milliseconds
WAKE_TIMEOUT_S = 10.0  # a service manager starts the daemon, which then reads its history
RELOAD_TIMEOUT_S = 30.0  # the history is read again, and fitted to
MAX_ERROR = 65536  # bytes read of an answer that is an error; a message takes some hundred
NOT_RUNNING, REFUSED_KEY, NOT_OURS = "not_running", "invalid_api_key", "not_ours"  # with a next step of their own


class DaemonError(DiscoError):
    """The daemon does not run, or refuses; the message is fit for a user, with the next step where there is one.

    `code` is the daemon's own (`cap_reached`, `model_not_found` …), or NOT_RUNNING, REFUSED_KEY, NOT_OURS.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(plain(message))  # whoever answers at that address has worded it
        self.code = code


def not_running(root: str, why: BaseException | str) -> DaemonError:
    """Return the error for a daemon that does not listen at `root`."""
    return DaemonError(f"no daemon at {root}: start one with `disco up` ({reason_of(why)})", NOT_RUNNING)


def refusal(root: str, status: int, body: bytes) -> DaemonError:
    """Return the error of a response whose status is not 2xx."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"{root} answers HTTP {status}: is it a disco daemon?", None
    if status == 401 and code == REFUSED_KEY:
        message = f"the daemon at {root} refuses the API key: set its own with `disco config set api.key KEY`"
    return DaemonError(message, code if isinstance(code, str) else None)


def base_url(host: str, port: int) -> str:
    """Return the daemon's root, without /v1."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def daemon_at(url: str | None, config: Config) -> tuple[str, str]:
    """Return root and API key of a daemon; the key goes to the configured daemon and this machine only."""
    own = base_url(reachable(config.api.host), config.api.port)
    root = url.rstrip("/").removesuffix("/v1") if url else own
    key = config.api.control_key or config.api.key
    return root, key if root == own or is_loopback(hostname(root)) else ""


def reachable(host: str) -> str:
    """Return the address of a daemon that listens on `host`; one that listens everywhere is reached on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound


# --- by which way -----------------------------------------------------------------------------------------------------


def way(root: str, *, wake: bool = True) -> Path | None:
    """Return the Unix socket of the daemon at `root`; None if TCP is the way. Blocks for WAKE_TIMEOUT_S at most.

    With `wake` a service whose manager holds the port only is started by it. Raises DaemonError where another user's
    program listens.
    """
    port = local_port(root)
    if port is None:
        require_ours(root)
        return None
    if (path := socketfile.found(port)) is not None:
        return path
    require_ours(root)
    if wake and _wake(root):
        return socketfile.found(port)
    return None


def local_port(root: str) -> int | None:
    """Return the port of a daemon on this machine; None for any other daemon."""
    try:
        return (urlsplit(root).port or 80) if is_loopback(hostname(root)) else None
    except ValueError:
        return None


def require_ours(root: str) -> None:
    """Raise DaemonError if a program of another user of this machine listens there: it would get key and prompts."""
    try:
        port = urlsplit(root).port or 80
    except ValueError:
        return  # no address at all: the request itself fails, and says so
    if users := listeners.strangers(hostname(root), port):
        msg = (
            f"what listens at {without_credentials(root)} is no daemon of yours but a program of "
            f"{listeners.names_of(users)}; nothing was sent there. End it, or give your daemon another port: "
            "`disco config set api.port N`"
        )
        raise DaemonError(msg, NOT_OURS)


def _wake(root: str) -> bool:
    """Ask for the daemon's health, without a key; return whether there is an answer."""
    try:
        with _open(urllib.request.Request(root + "/health"), WAKE_TIMEOUT_S):  # noqa: S310
            return True
    except DaemonError as e:
        return e.code != NOT_RUNNING
    except (OSError, ValueError, http.client.HTTPException):
        return False


# --- what is asked ----------------------------------------------------------------------------------------------------


def get(root: str, path: str, key: str = "", timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """GET a JSON document. Raises DaemonError."""
    return _send("GET", root, path, key, timeout_s)


def change(root: str, changes: dict[str, Any], key: str = "", timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
    """PATCH settings, `section.name` to value; return the daemon's answer. Raises DaemonError."""
    return _send("PATCH", root, "/disco/v1/settings", key, timeout_s, json.dumps(changes).encode())


def post(root: str, path: str, document: dict[str, Any], key: str = "", timeout_s: float = RELOAD_TIMEOUT_S) -> Any:
    """POST a JSON document; return the daemon's answer. Raises DaemonError."""
    return _send("POST", root, path, key, timeout_s, json.dumps(document).encode())


def reload(root: str, key: str = "", timeout_s: float = RELOAD_TIMEOUT_S) -> Any:
    """Have the daemon read its configuration again; return what it took up. Raises DaemonError."""
    return _send("POST", root, "/disco/v1/reload", key, timeout_s, b"")


def headers(key: str) -> dict[str, str]:
    """Return the header with the daemon's key, if it has one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _send(method: str, root: str, path: str, key: str, timeout_s: float, body: bytes | None = None) -> Any:
    """Send a request; return the JSON document of the response. The key goes over TCP only: the socket needs none."""
    by = way(root)
    sent_headers = headers(key) if by is None else {}
    if body:
        sent_headers["Content-Type"] = "application/json"
    request = urllib.request.Request(root + path, body, sent_headers, method=method)  # noqa: S310
    with _open(request, timeout_s, by) as response:
        return json.load(response)


class _BySocket(urllib.request.HTTPHandler):
    """Sends requests by a Unix socket, whatever host they name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """See HTTPHandler."""
        path = self._path

        class SocketConnection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.sock.settimeout(self.timeout)
                self.sock.connect(str(path))

        return self.do_open(SocketConnection, request)


def _open(request: urllib.request.Request, timeout_s: float, by: Path | None = None) -> Any:
    # Never through a proxy: the daemon is on this machine. And nobody is redirected: its key is for nobody else.
    ways: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
    if by is not None:
        ways.append(_BySocket(by))
    opener = urllib.request.build_opener(*ways)
    root = without_credentials(f"{request.type}://{request.host}")
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as e:
        with e:
            raise refusal(root, e.code, e.read(MAX_ERROR)) from e
    except OSError as e:
        raise not_running(root, getattr(e, "reason", e)) from e


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a daemon sends none."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: a redirect is an error."""
        return
