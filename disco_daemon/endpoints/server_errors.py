"""What goes wrong at a server, as EndpointErrors: foreign errors are translated here, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from ..clock import Clock
from ..errors import EndpointError
from ..plain import MAX_LINE, masked, one_line, reason_of
from ..system.net import in_the_clear, origin, pointed_to
from ..types import GenerationRequest, Side, wanted
from .breaker import Breaker, BreakerCall, BreakerState
from .chunks import CutError
from .kept_connections import KeptDrop
from .plainhttp import NotPrivateError
from .refusal_reason import MAX_SAID, error_of, named_wait_s, names_model, reason_of_refusal
from .retry import exhausted_s, retry_after_s
from .stream import Endless

RATE_LIMITED_S = 5.0  # after a 429 that names no time
EXPOSED_S = 10.0  # a name that stands for public addresses is looked up again after this long, as the client's cache
UNHEDGED_S = 86_400.0  # after a 429: a server that had enough once in a day has no room for second requests
MAX_DOWN_S = 300.0  # a server may ask for hours; we look again after five minutes, as at an account without credit
_BARRING = ("unauthorized", "not_found")  # no waiting mends these: the settings do
_NO_NEWS = (
    "dropped",
    "insecure",
    "no_continuation",
)  # of a kept connection that was idle, and of nothing that was sent
_OF_ROUTES = ("provider", "models", "route", "plugins", "transforms")  # whom a router asks, in OpenRouter's words
_BUSY = (503, 529)  # the second one is Anthropic's
_NAMED = {  # the status that a word within an answer stands for: OpenAI's, Anthropic's and Google's
    "rate_limit_error": 429, "rate_limit_exceeded": 429, "resource_exhausted": 429,
    "overloaded_error": 529, "unavailable": 503,
}  # fmt: skip


class StatusError(Exception):
    """A server's answer that is no success: its status and headers, the URL that was asked, and what was said.

    `raw` is the beginning of the body, `document` what of it is JSON: the `error` of OpenAI's shape where it has one.
    `codes` and `message` are the server's own, where it has such.
    """

    def __init__(self, status: int, headers: Mapping[str, str], url: str, said: bytes) -> None:
        self.status, self.headers, self.url = status, headers, url
        self.raw = said.decode("utf-8", "replace").strip()
        self.document: object = None
        with suppress(msgspec.MsgspecError, RecursionError):
            self.document = msgspec.json.decode(said)
        self.codes, self.message = error_of(self.document)
        if self.document is None:
            self.message = self.raw
        elif isinstance(self.document, list) and self.document:  # Google wraps it in a list
            self.document = self.document[0]
        if isinstance(self.document, dict):
            self.document = self.document.get("error", self.document)
        super().__init__(self.message or self.raw or f"status {status}")


# A connection that fails, an answer that is none, and what reading it raises where it is no OpenAI stream.
_FOREIGN = (
    aiohttp.ClientError, OSError, StatusError, CutError, Endless,
    msgspec.MsgspecError, ValueError, TypeError, AttributeError, LookupError, RecursionError,
)  # fmt: skip


class Translation:
    """The context of `ServerErrors.translate`."""

    def __init__(self, errors: ServerErrors) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        """Nothing has gone wrong yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise an EndpointError for a foreign error."""
        if isinstance(error, _FOREIGN):
            raise self._errors.translated(error) from error


class ServerErrors:
    """Translates the errors of one server.

    All mutable state: whether it `is_tried` (has answered or failed), and how it is `failing`, which the next answer
    ends; the `breaker`, which says how long the server is left alone; until when it is not asked twice for one answer;
    and whether its name was `exposed` when last looked up: a key would have gone to public addresses in the clear.
    None of it is kept on disk: after a restart one request more may meet a 429, and no answer fails of it.
    """

    def __init__(self, side: Side, base_url: str, api_key: str, clock: Clock, name: str = "") -> None:
        """`name` is that of one of several servers."""
        self.exposed = self.is_tried = False
        self.failing: tuple[str, float] | None = None
        self.breaker = Breaker()
        self._side, self._base_url, self._api_key, self._clock = side, base_url, api_key, clock
        self._name, self._unhedged_until = name, -math.inf

    @property
    def hedgeable(self) -> bool:
        """Whether the server has room for second requests, as far as it has said; a trial is one request alone."""
        now = self._clock.now()
        return now >= self._unhedged_until and not self.breaker.is_tried(now)

    @property
    def down_s(self) -> float:
        """How long the server is to be left alone, s; infinite where only the settings mend what is wrong."""
        return self.breaker.down_s(self._clock.now())

    @property
    def is_unheard(self) -> bool:
        """Whether nobody knows if it answers questions: it has not been asked any, or is away."""
        return not self.is_tried or (self.failing is not None and self.failing[0] == "unreachable")

    def heard(self) -> None:
        """Note that the server has answered: whatever was wrong is over."""
        self.failing, self.is_tried = None, True

    def reached(self) -> None:
        """Note that the server can be reached, though nobody knows yet whether it answers."""
        if self.failing is not None and self.failing[0] == "unreachable":
            self.failing, self.is_tried = None, False

    def failed(self, error: EndpointError) -> None:
        """Note a failure that is not the request's: why, and since when the server fails like this (Unix time, s)."""
        self.is_tried = True
        if self.failing is None or self.failing[0] != error.reason:
            self.failing = (error.reason, self._clock.wall())

    def broke(self, call: BreakerCall, error: EndpointError, *, is_plain: bool) -> None:
        """Tell the breaker how a request failed; one that is no `is_plain` chat says nothing of the model's name."""
        breaker, now = self.breaker, self._clock.now()
        if error.reason in _NO_NEWS:
            breaker.leave(call, None, now)
            return
        if error.reason in _BARRING and is_plain:
            breaker.bar(error.reason)
        elif error.reason == "no_credit":
            breaker.limit(error.reason, MAX_DOWN_S, now)
        breaker.fail(call, error.reason, now)

    def told(self, headers: Mapping[str, str]) -> None:
        """Take what the headers of a good answer say of the room that is left."""
        rest_s = exhausted_s(headers, self._clock.wall())
        self.breaker.rest("rate_limited", min(rest_s or 0.0, MAX_DOWN_S), self._clock.now())

    def health(self) -> dict[str, Any]:
        """Return whether it was `tried`, and its last failure's reason and time unless it has answered since.

        The `breaker` is open up to the Unix time `until_s`; None where it is not, or where the settings alone end it.
        """
        now, failing = self._clock.now(), None
        if self.failing is not None:
            failing = {"reason": self.failing[0], "since": self.failing[1]}
        state, left_s = self.breaker.state(now), self.breaker.down_s(now)
        until_s = round(self._clock.wall() + left_s, 1) if state is BreakerState.OPEN and left_s < math.inf else None
        breaker = {"state": state.value, "why": self.breaker.why(now), "until_s": until_s}
        return {"tried": self.is_tried, "failing": failing, "breaker": breaker}

    def translate(self) -> Translation:
        """Return a context that raises an EndpointError for each foreign error of its body."""
        return Translation(self)  # a new one: kept, both would be in a cycle

    def translated(self, e: BaseException) -> EndpointError:
        """Return the EndpointError for a foreign error."""
        match e:
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():  # some of them are TimeoutErrors
                return self._connection_error(e)
            case TimeoutError():
                return self.error("timeout", "the server gave no token in time")
            case KeptDrop():
                return self.error("dropped", f"the server closed a kept connection unheard: {self._brief(e)}")
            case StatusError():
                return self._status_error(e)
            case CutError():
                return self.error("cut", self.show(str(e)))
            case Endless():
                return self.error("endless", f"the server's answer has no end: {e}")
            case aiohttp.ClientPayloadError():  # its own words are of chunks and lengths
                return self.error("cut", "the connection to the server broke before the end of its answer")
            case aiohttp.ClientError() | OSError():
                return self.error("cut", f"the connection to the server broke: {self._brief(e)}")
        return self.error("garbage", f"the server sent what is no OpenAI stream: {self._brief(e)}")

    def _connection_error(self, e: aiohttp.ClientError) -> EndpointError:
        """Say why there was no connection."""
        if _cause(e, NotPrivateError) is not None:
            return self.refuse_clear_text()
        if isinstance(e, TimeoutError):
            return self.error("timeout", "the server did not answer in time")
        return self.error("unreachable", f"the server cannot be reached: {self._unconnected(e)}")

    def _unconnected(self, e: aiohttp.ClientError) -> str:
        """Say which address gave no connection, and why."""
        if not isinstance(e, aiohttp.ClientConnectorError):
            return self._brief(e)
        return self.show(f"{e.host}:{e.port}: {reason_of(e)}")

    def refuse_clear_text(self) -> EndpointError:
        """Return the error for a key that would go out in the clear: nothing was sent.

        The server is left alone for as long as the addresses of its name are remembered.
        """
        self.exposed = True
        self.breaker.rest("insecure", EXPOSED_S, self._clock.now())
        return self.error("insecure", in_the_clear(origin(self._base_url), self._name))

    def error(self, reason: str, message: str) -> EndpointError:
        """Return an error of this server."""
        return EndpointError(self._side, reason, message)

    def reported(self, error: object) -> EndpointError:
        """Return the error that a server tells within an answer, whose headers have said that all is well.

        A gateway says there what it would have said as a status: OpenRouter's and Google's `code` is one. The request
        is at no fault then: it was taken, so another side may answer it.
        """
        said = StatusError(_status_in(error), {}, self._base_url, msgspec.json.encode({"error": error}))
        found = self._status_error(said)
        if said.status != 200 and not found.your_fault and found.reason not in ("server_error", "timeout"):
            return found
        reason = found.reason if found.reason in ("unauthorized", "no_credit", "not_found") else "server_error"
        return self.error(reason, f"the server reports: {self.show(said.message or str(error))}")

    def show(self, text: str, limit: int = MAX_LINE) -> str:
        """Return a server's message, fit to be shown: plain, one line, and nothing of its key."""
        return one_line(masked(text[:MAX_SAID], self._api_key), limit)

    def _brief(self, e: BaseException) -> str:
        """Return one line of an error, never a page of HTML."""
        return (
            self.show(reason_of(e))
            if isinstance(e, OSError | aiohttp.ClientError)
            else self.show(str(e)) or type(e).__name__
        )

    def _status_error(self, e: StatusError) -> EndpointError:
        status, text = e.status, self._brief(e)
        if 300 <= status < 400:
            to = self.show(pointed_to(e.url, e.headers.get("location", "")))
            mend = f"redirects are not followed, so set {self._key('base_url')} to the address that answers"
            return self.error("redirected", f"the server said {status} and points to {to}: {mend}")
        after_s = retry_after_s(e.headers, self._clock.wall())
        if after_s is None and status == 429:
            after_s = named_wait_s(e.raw)
        if status == 429 or (status in _BUSY and after_s is not None):
            down_s = RATE_LIMITED_S if after_s is None else min(after_s, MAX_DOWN_S)
            self.breaker.limit("rate_limited" if status == 429 else "overloaded", down_s, self._clock.now())
        if status == 429:
            self._unhedged_until = self._clock.now() + UNHEDGED_S
        match reason_of_refusal(status, e.codes, e.message, e.raw, after_s):
            case "unauthorized":
                hint = f"check it ({self._key('api_key_env')} or {self._key('api_key_file')})"
                return self.error("unauthorized", f"the server refused the API key with {status}, {hint}: {text}")
            case "no_credit":
                message = f"the account has no credit, the server said {status}: {text}"
                return EndpointError(self._side, "no_credit", message, retry_after_s=after_s)
            case "not_found":
                return self.error("not_found", f"the server said {status}, check {self._key('model')}: {text}")
            case "forbidden":
                return self.error("forbidden", f"the server does not allow that with this key, it said 403: {text}")
            case "rate_limited":
                return EndpointError(self._side, "rate_limited", f"the server said 429: {text}", retry_after_s=after_s)
            case "refused":
                return self._refused(status, text)
        if status in (400, 413, 415, 422):
            return self._refused(status, text)
        if status == 404:
            keys = f"{self._key('base_url')} and {self._key('model')}"
            return self.error("not_found", f"the server said 404, check {keys}: {text}")
        if status == 408:
            return self.error("timeout", f"the server said 408: {text}")
        reason = "overloaded" if status in _BUSY else "server_error"
        return EndpointError(self._side, reason, f"the server said {status}: {text}", retry_after_s=after_s)

    def _key(self, name: str) -> str:
        """Return what a setting of this server is called."""
        if self._name:
            return f"{name} of [[servers]] {self._name}"
        return f"{'server' if self._side is Side.SERVER else 'device'}.{name}"

    def _refused(self, status: int, text: str) -> EndpointError:
        """Return the error for a request that is at fault by itself."""
        return EndpointError(self._side, "refused", f"the server said {status}: {text}", your_fault=True)


def _status_in(error: object) -> int:
    """Return the HTTP status that an error within an answer names; 200 where it names none."""
    told = (error.get("code"), error.get("type"), error.get("status")) if isinstance(error, dict) else ()
    for word in map(str, told):
        status = int(word) if word.isascii() and word.isdigit() and len(word) == 3 else _NAMED.get(word.lower(), 0)
        if 400 <= status < 600:
            return status
    return 200


def refusal_of(error: EndpointError) -> tuple[int, object]:
    """Return the HTTP status that an error is made of, and the document that came with it; (0, None) if none is."""
    said = error.__cause__
    return (said.status, said.document) if isinstance(said, StatusError) else (0, None)


def is_of_model(error: EndpointError, request: GenerationRequest) -> bool:
    """Whether nothing was found for a model: its refusal names that, or the request wants nothing beside."""
    said = error.__cause__
    return not wanted(request) or (isinstance(said, StatusError) and names_model(said.codes, said.message))


def refused_wish(error: EndpointError, request: GenerationRequest) -> EndpointError | None:
    """Return the error where nothing was found for what a request says of whom to ask; None where it is not that.

    OpenRouter says 404 where no provider fits: the model is there for all others. Of several `models` of the request
    one that is unknown is the request's too.
    """
    said, extra = error.__cause__, request.extra
    if error.reason != "not_found" or not any(extra.get(name) for name in _OF_ROUTES):
        return None
    if isinstance(said, StatusError) and names_model(said.codes, said.message) and not extra.get("models"):
        return None
    return EndpointError(error.side, "refused", str(error), your_fault=True)


def _cause(e: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first error of that kind in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause
