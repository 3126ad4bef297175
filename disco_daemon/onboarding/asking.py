"""Asks a server that may be anything: for its models, and for one short answer. httpx2 is loaded by that alone.

Each request is sent once: none is retried, and no redirect is followed, for the key goes along. Blocking, for a thread.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ..endpoints.refusal_reason import MAX_SAID, error_of, named_wait_s
from ..endpoints.retry import retry_after_s
from ..errors import ConfigError
from ..money.catalog import is_private
from ..plain import one_line, reason_of
from ..system.net import hostname, is_address, is_loopback, is_private_address, pointed_to, without_credentials

if TYPE_CHECKING:
    import httpx2

LOOKUP_TIMEOUT_S = 3.0  # of a name that a key would go to by plain http
MODELS_TIMEOUT_S = 5.0  # a server's list of models, for `disco setup` and `disco doctor`
ANSWER_TIMEOUT_S = 20.0  # until the first token; as server.first_token_timeout_s
FETCH_TIMEOUT_S = 30.0  # a public list of some 300 kB, by a slow line too
MAX_BYTES = 8 * 2**20  # of a list of models; the longest we know of has 1 MB
MAX_ANSWER = 64 * 1024  # bytes read of an answer, or of an error; a token takes a few hundred
MAX_TOKENS = 8  # of the answer that is asked for: next to nothing
QUESTION = "Say hello."

T = TypeVar("T")


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Return the result of `work` within `timeout_s`, s: name look-ups have no time-out of their own.

    Raises TimeoutError, or what `work` raises. The thread that is left behind does not keep the program alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as e:
            future.set_exception(e)

    Thread(target=run, name="disco-asking", daemon=True).start()
    return future.result(timeout_s)


def _late() -> tuple[type[Exception], ...]:
    """Return what is raised where an answer does not come in time."""
    import httpx2

    return (TimeoutError, httpx2.TimeoutException)


def _trouble() -> tuple[type[Exception], ...]:
    """Return what else is raised where a server, or its address, is not right."""
    import httpx2

    return (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError, ImportError)


def _client(url: str, timeout_s: float) -> httpx2.Client:
    # Requests to this machine never go through a proxy.
    import httpx2

    return httpx2.Client(timeout=timeout_s, trust_env=not is_loopback(hostname(url)), follow_redirects=False)


def goes_nowhere_public(url: str) -> bool:
    """Whether all addresses of a host are private; by its name alone where it cannot be looked up now."""
    host = hostname(url)
    if is_address(host):
        return is_private_address(host)
    try:
        found = within(LOOKUP_TIMEOUT_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # a TimeoutError is an OSError
        return is_private(host)
    return all(is_private_address(str(address[4][0])) for address in found)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _page(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"


def fetch_document(url: str, max_bytes: int) -> bytes:
    """Return a public page, of which more than `max_bytes` is not read; no key goes along. Raises ConfigError."""
    shown = without_credentials(url)
    try:
        http = _client(url, FETCH_TIMEOUT_S)
        response, body = within(FETCH_TIMEOUT_S, lambda: _get_page(http, url, max_bytes))
    except _late() as e:
        raise ConfigError(f"{shown}: no answer within {FETCH_TIMEOUT_S:g} s; try again, or give a file") from e
    except _trouble() as e:
        raise ConfigError(f"{shown} cannot be fetched: {reason_of(e)}; try again, or give a file") from e
    if response.status_code != 200:
        to = f" and points to {one_line(elsewhere, 200)}" if (elsewhere := _elsewhere(response)) else ""
        raise ConfigError(f"{shown} answers {response.status_code}{to}; nothing was changed")
    return body


def _get_page(http: httpx2.Client, url: str, max_bytes: int) -> tuple[httpx2.Response, bytes]:
    with http, http.stream("GET", url) as response:
        body = b""
        for part in response.iter_bytes():
            body += part
            if len(body) > max_bytes:
                break
        return response, body


# --- its models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to `GET models`: the HTTP status, its names (None: no list), how far our clock is ahead, s.

    `elsewhere` is the target of a redirect. `late`: the problem is that nothing came in time.
    """

    status: int = 0
    models: tuple[str, ...] | None = None
    skew_s: float | None = None
    problem: str = ""
    late: bool = False
    elsewhere: str = ""


def ask_models(url: str, api_key: str) -> Reply:
    """Ask for the list of models, as an OpenAI client would."""
    try:
        http = _client(url, MODELS_TIMEOUT_S)  # what it takes to load is none of the server's time
        return within(MODELS_TIMEOUT_S, lambda: _get_models(http, url, api_key))
    except _late():
        return Reply(problem=f"no answer within {MODELS_TIMEOUT_S:g} s", late=True)
    except _trouble() as e:
        return Reply(problem=reason_of(e))


def _get_models(http: httpx2.Client, url: str, api_key: str) -> Reply:
    with http, http.stream("GET", _page(url, "models"), headers=_headers(api_key)) as response:
        body = b""
        for part in response.iter_bytes():
            body += part
            if len(body) > MAX_BYTES:
                break
        skew_s = _skew(response.headers.get("date"))
        return Reply(response.status_code, _names(body), skew_s, elsewhere=_elsewhere(response))


def _elsewhere(response: httpx2.Response) -> str:
    """Return the target of a redirect, "" for other responses."""
    if not 300 <= response.status_code < 400:
        return ""
    return pointed_to(str(response.request.url), response.headers.get("location", ""))


def _names(body: bytes) -> tuple[str, ...] | None:
    found = _document(body)
    rows = (found.get("data") or found.get("models")) if isinstance(found, dict) else found
    if not isinstance(rows, list):
        return None
    return tuple(name for row in rows if (name := _name(row)))


def _name(row: Any) -> str:
    found = (row.get("id") or row.get("name")) if isinstance(row, dict) else row
    return found if isinstance(found, str) else ""


def _skew(date: str | None) -> float | None:
    try:
        return time.time() - parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError):
        return None


def _document(body: bytes) -> Any:
    """Return the JSON document, None if there is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


# --- one short answer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """The response to a request for an answer: the HTTP status, and the time of its first token, s (None: none came).

    `codes` and `text` are those of an error document, `raw` is the beginning of all that came, `after_s` the wait that
    the server named, s. `problem` is an error below HTTP, `elsewhere` the target of a redirect. `late`: nothing came in
    time.
    """

    status: int = 0
    ttft_s: float | None = None
    codes: tuple[str, ...] = ()
    text: str = ""
    raw: str = ""
    after_s: float | None = None
    problem: str = ""
    late: bool = False
    elsewhere: str = ""

    @property
    def document(self) -> object:
        """The JSON document that came; None if it is none, or a long one."""
        return _document(self.raw.encode())


def ask_answer(url: str, api_key: str, model: str, *, limit: str = "max_tokens") -> Said:
    """Ask for one answer of at most MAX_TOKENS tokens, and read it up to its first one.

    `limit` is the server's name of the limit: OpenAI's newer models refuse `max_tokens`, others the newer name.
    """
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "messages": messages, "stream": True, limit: MAX_TOKENS}
    try:
        http = _client(url, ANSWER_TIMEOUT_S)
        return within(ANSWER_TIMEOUT_S, lambda: _post(http, url, api_key, body))
    except _late():
        return Said(problem=f"no token within {ANSWER_TIMEOUT_S:g} s", late=True)
    except _trouble() as e:
        return Said(problem=reason_of(e))


def _post(http: httpx2.Client, url: str, api_key: str, body: Mapping[str, Any]) -> Said:
    began = time.monotonic()
    page = _page(url, "chat/completions")
    with http, http.stream("POST", page, headers=_headers(api_key), json=dict(body)) as response:
        status, heard = response.status_code, _Ear()
        for part in response.iter_bytes():
            heard.take(part)
            if (status == 200 and heard.is_complete) or heard.n_bytes > MAX_ANSWER:
                break
            if time.monotonic() - began > ANSWER_TIMEOUT_S:  # it dribbles: the wait is over
                break
        if status == 200 and (heard.token or heard.whole):
            return Said(status, time.monotonic() - began)
        after_s = retry_after_s(response.headers, time.time())
        if after_s is None:
            after_s = named_wait_s(heard.raw)
        return Said(status, None, *heard.error, heard.raw, after_s, elsewhere=_elsewhere(response))


class _Ear:
    """Listens to the bytes of an answer for a token, or an error."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.token = False
        self._all = self._rest = b""
        self._error: tuple[tuple[str, ...], str] | None = None

    def take(self, part: bytes) -> None:
        """Take some more bytes."""
        self.n_bytes += len(part)
        self._all += part
        *lines, self._rest = (self._rest + part).split(b"\n")
        self._read(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:"))

    def _read(self, events: Iterable[bytes]) -> None:
        for event in events:
            document = _document(event)
            if isinstance(document, dict) and "error" in document:
                self._error = self._error or error_of(document)
            elif _has_token(document):
                self.token = True

    @property
    def is_complete(self) -> bool:
        """Whether more bytes would change nothing."""
        return self.token or self._error is not None

    @property
    def whole(self) -> bool:
        """Whether the bytes are an answer in one piece, from a server that does not stream."""
        document = _document(self._all)
        return isinstance(document, dict) and bool(document.get("choices")) and "error" not in document

    @property
    def error(self) -> tuple[tuple[str, ...], str]:
        """Return codes and message of the error, where there is one."""
        return self._error or error_of(_document(self._all))

    @property
    def raw(self) -> str:
        """Return the beginning of what came, as text."""
        return self._all[:MAX_SAID].decode("utf-8", "replace")


def _has_token(chunk: Any) -> bool:
    """Whether a chunk has a token, or ends the answer."""
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    for choice in choices if isinstance(choices, list) else []:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        said = isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role")
        if said or (isinstance(choice, dict) and choice.get("finish_reason")):
            return True
    return False
