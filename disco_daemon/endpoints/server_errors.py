"""What goes wrong at a server, as EndpointErrors: foreign errors are translated here, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import httpx2
import msgspec
import openai

from ..clock import Clock
from ..errors import EndpointError
from ..net import in_the_clear, origin, pointed_to
from ..plain import MAX_LINE, masked, one_line
from ..types import Side
from .plainhttp import NotPrivateError
from .retry import retry_after_s
from .stream import Endless

RATE_LIMITED_S = 5.0  # after a 429 that names no time
EXPOSED_S = 10.0  # a name that stands for public addresses is looked up again after this long, as the client's cache
UNHEDGED_S = 86_400.0  # after a 429: a server that had enough once in a day has no room for second requests
MAX_DOWN_S = 300.0  # a server may ask for hours; we look again after five minutes
MAX_SAID = 4096  # characters of an error's text that are looked at; a line has MAX_LINE
_BUSY = (503, 529)  # the second one is Anthropic's
# The errors of the HTTP libraries below the openai client, which reach us unwrapped while a stream is read.
HTTP_ERRORS = (httpx2.HTTPError, httpx2.StreamError, aiohttp.ClientError, OSError)


class ServerErrors:
    """Translates the errors of one server.

    All mutable state: until when the server is to be left alone, and not to be asked twice for one answer, and whether
    its name was `exposed` when last looked up: a key would have gone to public addresses in the clear. None of it is
    kept on disk: after a restart one request more may meet a 429, and no answer fails of it.
    """

    def __init__(self, side: Side, base_url: str, api_key: str, clock: Clock) -> None:
        self.exposed = False
        self._side, self._base_url, self._api_key, self._clock = side, base_url, api_key, clock
        self._down_until = self._unhedged_until = -math.inf

    @property
    def hedgeable(self) -> bool:
        """Whether the server has room for second requests, as far as it has said."""
        return self._clock.now() >= self._unhedged_until

    @property
    def down_s(self) -> float:
        """How long the server still wants to be left alone, s."""
        return max(0.0, self._down_until - self._clock.now())

    @contextmanager
    def translate(self) -> Iterator[None]:
        """Raise an EndpointError for each foreign error of the body."""
        try:
            yield
        except TimeoutError as e:
            raise self.error("timeout", "the server gave no token in time") from e
        except openai.APIConnectionError as e:
            raise self._connection_error(e) from e
        except openai.APIStatusError as e:
            raise self._status_error(e) from e
        except openai.APIError as e:
            raise self.error("server_error", f"the server reports: {self._brief(e)}") from e
        except Endless as e:
            raise self.error("endless", f"the server's answer has no end: {e}") from e
        except (msgspec.MsgspecError, openai.OpenAIError) as e:
            raise self.error("garbage", f"the server sent what is no OpenAI stream: {self._brief(e)}") from e
        except HTTP_ERRORS as e:
            raise self.error("cut", f"the connection to the server broke: {self._brief(e)}") from e
        except (ValueError, TypeError, AttributeError, LookupError) as e:
            raise self.error("garbage", f"the server sent what is no OpenAI stream: {self._brief(e)}") from e

    def _connection_error(self, e: openai.APIConnectionError) -> EndpointError:
        """Say why there was no connection, or no answer on it."""
        if _cause(e, NotPrivateError) is not None:
            return self.refuse_clear_text()
        # The client's aiohttp transport reports a connection refused or dropped as a time-out.
        if isinstance(e, openai.APITimeoutError):
            if (cause := _cause(e, aiohttp.ClientConnectorError)) is not None:
                return self.error("unreachable", f"the server cannot be reached: {self._brief(cause)}")
            if (cause := connection_drop(e)) is not None:
                return self.error("cut", f"the connection to the server broke: {self._brief(cause)}")
            return self.error("timeout", "the server did not answer in time")
        cause = e.__cause__ or e
        if isinstance(cause, httpx2.DecodingError):
            return self.error("garbage", f"the server sent what is no OpenAI stream: {self._brief(cause)}")
        return self.error("unreachable", f"the server cannot be reached: {self._brief(cause)}")

    def refuse_clear_text(self) -> EndpointError:
        """Return the error for a key that would go out in the clear: nothing was sent.

        The server is left alone for as long as the addresses of its name are remembered.
        """
        self.exposed = True
        self._down_until = self._clock.now() + EXPOSED_S
        return self.error("insecure", in_the_clear(origin(self._base_url)))

    def error(self, reason: str, message: str) -> EndpointError:
        """Return an error of this server."""
        return EndpointError(self._side, reason, message)

    def show(self, text: str, limit: int = MAX_LINE) -> str:
        """Return a server's message, fit to be shown: plain, one line, and nothing of its key."""
        return one_line(masked(text[:MAX_SAID], self._api_key), limit)

    def _brief(self, e: BaseException) -> str:
        """Return one line of an error, never a page of HTML."""
        return self.show(str(getattr(e, "message", "") or e)) or type(e).__name__

    def _status_error(self, e: openai.APIStatusError) -> EndpointError:
        status, text = e.status_code, self._brief(e)
        where = "server" if self._side is Side.SERVER else "device"
        if 300 <= status < 400:
            to = self.show(pointed_to(str(e.request.url), e.response.headers.get("location", "")))
            mend = f"redirects are not followed, so set {where}.base_url to the address that answers"
            return self.error("redirected", f"the server said {status} and points to {to}: {mend}")
        if status in (401, 403):
            hint = "check the API key (server.api_key_env or server.api_key_file)"
            return self.error("unauthorized", f"the server refused the API key with {status}: {hint}")
        if status in (400, 413, 415, 422):
            return EndpointError(self._side, "refused", f"the server said {status}: {text}", your_fault=True)
        after_s = retry_after_s(e.response.headers, self._clock.wall())
        if status == 429 or (status in _BUSY and after_s is not None):
            down_s = RATE_LIMITED_S if after_s is None else min(after_s, MAX_DOWN_S)
            self._down_until = self._clock.now() + down_s
        if status == 429:
            self._unhedged_until = self._clock.now() + UNHEDGED_S
            return EndpointError(self._side, "rate_limited", f"the server said 429: {text}", retry_after_s=after_s)
        if status == 404:
            return self.error("not_found", f"the server said 404, check {where}.base_url and {where}.model: {text}")
        if status == 408:
            return self.error("timeout", f"the server said 408: {text}")
        reason = "overloaded" if status in _BUSY else "server_error"
        return EndpointError(self._side, reason, f"the server said {status}: {text}", retry_after_s=after_s)


def refusal_of(error: EndpointError) -> tuple[int, object]:
    """Return the HTTP status that an error is made of, and the document that came with it; (0, None) if none is."""
    said = error.__cause__
    return (said.status_code, said.body) if isinstance(said, openai.APIStatusError) else (0, None)


def connection_drop(e: BaseException) -> BaseException | None:
    """Return the error by which the server closed the connection before it answered; None if it did not.

    On a kept connection that says nothing about this request: llama-server closes after an answer, and tells it too
    late for a request that follows at once.
    """
    cause = _cause(e, aiohttp.ServerDisconnectedError) or _cause(e, aiohttp.ClientOSError)
    return None if isinstance(cause, aiohttp.ClientConnectorError) else cause


def _cause(e: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first error of that kind in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause
