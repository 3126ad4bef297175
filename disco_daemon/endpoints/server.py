"""An OpenAI-compatible server, through the official client. Also serves as the device when that is a local server."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import httpx2
import msgspec
import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from ..clock import Clock, SystemClock
from ..continuations import METHODS, RAW_METHODS
from ..errors import EndpointError
from ..net import hostname, in_the_clear, is_address, is_loopback, is_plain, origin, pointed_to, without_credentials
from ..plain import MAX_LINE, masked, one_line
from ..types import (
    CaughtUp,
    Continuation,
    Finish,
    GenerationRequest,
    Paused,
    PromptLength,
    Readiness,
    Side,
    Token,
    Usage,
)
from .base import Controls
from .bill import Bill
from .continuation import (
    RAW_DEFAULT,
    Ask,
    Profile,
    Way,
    chat,
    completion,
    last_words,
)
from .plainhttp import NotPrivateError, PrivateResolver, confine
from .retry import retry_after_s
from .stream import Bytes, Endless, EventStream, Patience, Reader, most_bytes

__all__ = ["Server", "ServerConfig"]

log = logging.getLogger("disco.server")

CONNECT_TIMEOUT_S = 5.0  # a server that cannot be reached; the device goes on meanwhile
USAGE_TIMEOUT_S = 1.0  # after finish_reason; the answer is whole, only the bill is missing
CLOSE_TIMEOUT_S = 1.0  # closing a stream whose server does not react
LOOKUP_TIMEOUT_S = 1.0  # at the start, of a name that a key would be sent to by plain http

RATE_LIMITED_S = 5.0  # after a 429 that names no time
EXPOSED_S = 10.0  # a name that stands for public addresses is looked up again after this long, as the client's cache
MAX_DOWN_S = 300.0  # a server may ask for hours; we look again after five minutes
MAX_ERROR = 64 * 1024  # bytes read of an answer that is an error; a message takes some hundred
MAX_SAID = 4096  # characters of it that are looked at; a line has MAX_LINE
MAX_REASON = 32  # characters of a finish_reason; OpenAI's longest has 14
_CODINGS = ("", "identity", "gzip", "deflate")  # zlib makes a thousand bytes of one at most, of 16 KiB at a time
_BUSY = (503, 529)  # the second one is Anthropic's

Events = AsyncGenerator[Token | Finish, None]
Chunks = AsyncIterator[dict[str, Any]]

# What the device knows of a request: the token ids or the text of its rendered prompt and the answer so far. None:
# it cannot say now.
Tokens = Callable[[GenerationRequest], Awaitable[tuple[int, ...] | None]]
Render = Callable[[GenerationRequest], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to reach a server. Time-outs in s; `continuation` is one of CONTINUATIONS, see docs/handoff.md."""

    base_url: str
    model: str
    api_key: str = field(repr=False)
    first_token_timeout_s: float = 20.0
    token_timeout_s: float = 15.0
    continuation: str = "auto"
    stream_usage: bool = True
    insecure: bool = False  # the key may go to any host by plain http


class Server:
    """`Endpoint` over `openai.AsyncOpenAI`; retries are the conductor's business, so the client makes none."""

    can_hold = False

    def __init__(
        self,
        config: ServerConfig,
        side: Side = Side.SERVER,
        clock: Clock | None = None,
        *,
        tokens: Tokens | None = None,
        render: Render | None = None,
    ) -> None:
        self.side = side
        self._clock = clock or SystemClock()
        self._down_until = -math.inf  # by its own Retry-After
        self.model = config.model
        self.config = config
        self.last_error: str | None = None
        self.n_failures = 0
        self._doubted = False  # whether a bill of this server has been doubted in the log
        self.adapters: dict[str, str] = {}  # a server has models, and its own names for them
        self._tokens = tokens
        self._render = render
        self._way = Way.configured(config.continuation, config.base_url)
        self.profile: Profile | None = None
        self._client: AsyncOpenAI | None = None
        # A key by plain http: the name may stand for private addresses only, whenever a connection is made.
        self._confined = bool(config.api_key) and is_plain(config.base_url) and not config.insecure
        self._exposed = False  # it did not, the last time

    @property
    def name(self) -> str:
        """The key of a profile: address and model, no credentials."""
        return f"{without_credentials(self.config.base_url)} {self.model}"

    @property
    def continuation(self) -> Continuation:
        """The trust in its way to continue."""
        return self._way.trust

    @property
    def should_probe(self) -> bool:
        """Whether it is unknown how this server continues: no setting, no table of hosts and no probe says it."""
        return not self._way.known

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that can be tried here, best first: all that the device provides the input for."""
        told = {"token_ids": self._tokens is not None, "text": self._render is not None}
        return tuple(method for method in METHODS if told.get(method, True))

    def adopt(self, profile: Profile) -> None:
        """Continue as the probe found best. What the user has set stands, and another server's profile is ignored."""
        if profile.server == self.name and self.config.continuation == "auto":
            self.profile, self._way = profile, Way.of(profile)

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """The end of the answer so far that this server is asked to repeat first; None if it is not."""
        return last_words(request.answer_so_far) or None if self._way.method == "instruct" else None

    async def start(self) -> None:
        """Make the client; nothing is sent."""
        config = self.config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key or "none",
            max_retries=0,
            # Reading has time-outs of our own everywhere; the client's would be one more timer for each token.
            timeout=openai.Timeout(
                max(config.first_token_timeout_s, config.token_timeout_s), connect=CONNECT_TIMEOUT_S, read=None
            ),
            # A coding could make gigabytes of a few bytes, and saves little of a stream.
            default_headers={"Accept-Encoding": "identity"},
            http_client=self._http(),
        )

        if self._confined:
            await self._look()

    def _http(self) -> Any:
        """Return the HTTP client; the prompt goes to no address that a server names.

        What is for this machine, or a key by plain http, never goes through a proxy.
        """
        local = is_loopback(urlsplit(self.config.base_url).hostname or "")
        http = DefaultAioHttpClient(
            trust_env=not local and not self._confined, follow_redirects=False, event_hooks={"response": [_bounded]}
        )
        if self._confined:
            confine(http._transport)
        return http

    async def _look(self) -> None:
        """Resolve the name, so that `disco status` shows at once if the server is not asked because of it."""
        host, resolver = hostname(self.config.base_url), PrivateResolver()
        try:
            if not is_address(host):
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    await resolver.resolve(host)
        except NotPrivateError:
            self.last_error = str(self._clear_text())
            log.warning("the server is off: %s", self.last_error)
        except (OSError, ValueError):  # a TimeoutError is an OSError; the first request tells
            pass
        finally:
            await resolver.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def refuses(self, request: GenerationRequest) -> str | None:
        """A server takes every chat, except to continue where it has no way to."""
        if request.prompt is not None:
            return "a raw prompt is for the device's model only"
        if request.answer_so_far and self._way.method == "none":
            return "this server cannot continue a partial answer"
        return None

    def may_serve(self) -> bool:
        """A configured server may always be tried."""
        return True

    def readiness(self) -> Readiness:
        """Nothing to load; down for as long as it asked to be left alone."""
        return Readiness(down_s=max(0.0, self._down_until - self._clock.now()))

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    def status(self) -> dict[str, Any]:
        """Address, model, continuation method and last failure."""
        return {
            "kind": "openai",
            "base_url": without_credentials(self.config.base_url),
            "model": self.model,
            "state": "off" if self._exposed else "configured",
            "continuation": self._way.method,
            "probed": None if self.profile is None else self.profile.to_json(),
            "failures": self.n_failures,
            "down_s": round(self.readiness().down_s, 1),
            "last_error": self.last_error,
        }

    # --- one answer ----------------------------------------------------------------------------------------------

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Stream one answer; the stream is closed on the way out, however that is. A server cannot be held."""
        del controls
        return self.ask(request, usage, noted=True)

    async def ask(
        self, request: GenerationRequest, usage: Usage, method: str | None = None, *, noted: bool = False
    ) -> Events:
        """Generate with a continuation method to try; a failure is not `noted`. For the probe."""
        with self._noted() if noted else nullcontext(), self._translate():
            refusal = self.refuses(request) if method is None else None
            if refusal is not None:
                raise EndpointError(self.side, "no_continuation", refusal)
            began = self._clock.now()
            limit = request.sampling.max_tokens
            patience = Patience(self.config.first_token_timeout_s, self.config.token_timeout_s, limit)
            async with AsyncExitStack() as stack:
                stack.callback(patience.close)
                async with asyncio.timeout_at(patience.until()):
                    asked = await self._asked(request, method)
                    body = await self._open(stack, asked)
                stream = EventStream(body, patience, most_bytes(limit))
                chunks = await stack.enter_async_context(aclosing(stream.objects()))
                bill = Bill(usage, asked.body, limit)
                reader = Reader(ids_back="return_token_ids" in asked.body)
                async for chunk in chunks:
                    for event in self._read(chunk, bill, reader, began):
                        if isinstance(event, Finish):
                            if self.config.stream_usage:
                                await self._settle(chunks, bill, reader, began)
                            self._doubt(bill)
                            if event.reason == "length" and asked.unlimited and usage.completion_tokens <= RAW_DEFAULT:
                                text = "the server cut an answer that had no limit to its own default"
                                raise self._error("cut", text)
                            yield event
                            return
                        patience.heard()
                        yield event
                self._doubt(bill)
                if stream.done and reader.n_tokens:  # it says that this was all, if not why
                    yield Finish(reader.ending)
                    return
                text = "the server ended its stream without a finish_reason: the answer was cut"
                raise self._error("cut", text)

    async def _settle(self, chunks: Chunks, bill: Bill, reader: Reader, began: float) -> None:
        """Read on for the usage chunk; the answer is whole, so nothing that happens here is an error."""
        try:
            with self._translate():
                async with asyncio.timeout(USAGE_TIMEOUT_S):
                    async for chunk in chunks:
                        for _ in self._read(chunk, bill, reader, began):
                            pass
        except EndpointError as e:
            log.debug("no usage after the answer: %s", e)

    async def _asked(self, request: GenerationRequest, method: str | None) -> Ask:
        """Return the request body. Raises EndpointError when the device cannot give what the method needs."""
        # With stop strings a server may hold text back whose ids it has told already.
        ids_back = self._way.vocab and not request.sampling.stop
        if not request.answer_so_far:
            return chat(request, "none", ids_back=ids_back)
        chosen = method or self._way.method
        if chosen in RAW_METHODS:
            prompt = await self._raw(request, chosen)
            if prompt:
                return completion(request, prompt, ids_back=ids_back)
            if method is not None or self._way.fallback == "none":
                raise self._error("no_continuation", f"the device does not tell what {chosen} needs")
            chosen = self._way.fallback
        return chat(request, chosen, ids_back=ids_back)

    async def _raw(self, request: GenerationRequest, method: str) -> str | tuple[int, ...] | None:
        if method == "token_ids":
            return await self._tokens(request) if self._tokens else None
        return await self._render(request) if self._render else None

    async def _open(self, stack: AsyncExitStack, asked: Ask) -> Bytes:
        """Send the request; the response's body as it comes. `stack` closes it.

        The body is read by `json_events`, not by the client's own chunk models: those cost more than all the rest of
        the relay together (`disco bench relay`), and their decoder trips over what real servers send.
        """
        try:
            stream = await self._post(asked)
        except openai.APIConnectionError as e:
            if _dropped(e) is None:
                raise
            stream = await self._post(asked)
        self._exposed = False
        stack.push_async_callback(_close, stream)
        response = stream.response
        coded = response.headers.get("content-encoding", "").strip().lower() not in ("", "identity")
        return response.aiter_bytes() if coded else response.aiter_raw()

    async def _post(self, asked: Ask) -> openai.AsyncStream[Any]:
        """Send the request; what comes back is open, and nothing of it is read.

        Not by the client's method for the path: that one walks the whole conversation by its type annotations, at a
        third of the cost of sending it, and the parameters have been looked at already.
        """
        assert self._client is not None, "start() comes first"
        body = {"model": self.model, **asked.body, "stream": True}
        if self.config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        return await self._client.post(asked.path, cast_to=object, body=body, stream=True, stream_cls=_CHUNKS)

    def _read(self, chunk: dict[str, Any], bill: Bill, reader: Reader, began: float) -> Iterator[Token | Finish]:
        """One of OpenAI's chunks as tokens; `bill` follows. The request was sent at `began`, by our clock."""
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise self._error("server_error", f"the server reports: {self._said(str(message))}")
        if billed := chunk.get("usage"):
            bill.take(billed, self._clock.now() - began)
        for choice in chunk.get("choices") or ():
            told = bill.told if billed else None
            token = reader.token(choice, told)
            if token is not None:
                bill.heard(token, reader.n_tokens, counted=told is not None)
                yield token
            if choice.get("finish_reason"):
                yield Finish(self._said(str(choice["finish_reason"]), MAX_REASON))

    def _doubt(self, bill: Bill) -> None:
        """Log once what of a bill cannot be true."""
        if bill.odd and not self._doubted:
            self._doubted = True
            log.warning("the %s's usage is not taken as it says: %s (told once)", self.side, self._said(bill.odd))

    # --- errors --------------------------------------------------------------------------------------------------

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except EndpointError as e:
            if not e.your_fault:
                self.n_failures += 1
                self.last_error = str(e)
            raise

    @contextmanager
    def _translate(self) -> Iterator[None]:
        """Foreign errors become EndpointErrors here, and nowhere else."""
        try:
            yield
        except TimeoutError as e:
            raise self._error("timeout", "the server gave no token in time") from e
        except openai.APIConnectionError as e:
            raise self._connection_error(e) from e
        except openai.APIStatusError as e:
            raise self._status_error(e) from e
        except openai.APIError as e:
            raise self._error("server_error", f"the server reports: {self._brief(e)}") from e
        except Endless as e:
            raise self._error("endless", f"the server's answer has no end: {e}") from e
        except (msgspec.MsgspecError, openai.OpenAIError) as e:
            raise self._error("garbage", f"the server sent what is no OpenAI stream: {self._brief(e)}") from e
        except _HTTP_ERRORS as e:
            raise self._error("cut", f"the connection to the server broke: {self._brief(e)}") from e
        except (ValueError, TypeError, AttributeError, LookupError) as e:
            raise self._error("garbage", f"the server sent what is no OpenAI stream: {self._brief(e)}") from e

    def _connection_error(self, e: openai.APIConnectionError) -> EndpointError:
        """Why there was no connection, or no answer on it."""
        if _cause(e, NotPrivateError) is not None:
            return self._clear_text()
        # The client's aiohttp transport reports a connection refused or dropped as a time-out.
        if isinstance(e, openai.APITimeoutError):
            if (cause := _cause(e, aiohttp.ClientConnectorError)) is not None:
                return self._error("unreachable", f"the server cannot be reached: {self._brief(cause)}")
            if (cause := _dropped(e)) is not None:
                return self._error("cut", f"the connection to the server broke: {self._brief(cause)}")
            return self._error("timeout", "the server did not answer in time")
        cause = e.__cause__ or e
        if isinstance(cause, httpx2.DecodingError):
            return self._error("garbage", f"the server sent what is no OpenAI stream: {self._brief(cause)}")
        return self._error("unreachable", f"the server cannot be reached: {self._brief(cause)}")

    def _clear_text(self) -> EndpointError:
        """Nothing was sent; it is left alone for as long as the name's addresses are remembered."""
        self._exposed = True
        self._down_until = self._clock.now() + EXPOSED_S
        return self._error("insecure", in_the_clear(origin(self.config.base_url)))

    def _error(self, reason: str, message: str) -> EndpointError:
        return EndpointError(self.side, reason, message)

    def _said(self, text: str, limit: int = MAX_LINE) -> str:
        """Return a server's message, fit to be shown: plain, one line, and nothing of its key."""
        return one_line(masked(text[:MAX_SAID], self.config.api_key), limit)

    def _brief(self, e: BaseException) -> str:
        """One line of an error, never a page of HTML."""
        return self._said(str(getattr(e, "message", "") or e)) or type(e).__name__

    def _status_error(self, e: openai.APIStatusError) -> EndpointError:
        status, text = e.status_code, self._brief(e)
        where = "server" if self.side is Side.SERVER else "device"
        if 300 <= status < 400:
            to = self._said(pointed_to(str(e.request.url), e.response.headers.get("location", "")))
            mend = f"redirects are not followed, so set {where}.base_url to the address that answers"
            return self._error("redirected", f"the server said {status} and points to {to}: {mend}")
        if status in (401, 403):
            hint = "check the API key (server.api_key_env or server.api_key_file)"
            return self._error("unauthorized", f"the server refused the API key with {status}: {hint}")
        if status in (400, 413, 415, 422):
            return EndpointError(self.side, "refused", f"the server said {status}: {text}", your_fault=True)
        after_s = retry_after_s(e.response.headers, self._clock.wall())
        if status == 429 or (status in _BUSY and after_s is not None):
            down_s = RATE_LIMITED_S if after_s is None else min(after_s, MAX_DOWN_S)
            self._down_until = self._clock.now() + down_s
        if status == 429:
            return EndpointError(self.side, "rate_limited", f"the server said 429: {text}", retry_after_s=after_s)
        if status == 404:
            return self._error("not_found", f"the server said 404, check {where}.base_url and {where}.model: {text}")
        if status == 408:
            return self._error("timeout", f"the server said 408: {text}")
        reason = "overloaded" if status in _BUSY else "server_error"
        return EndpointError(self.side, reason, f"the server said {status}: {text}", retry_after_s=after_s)


# The errors of the HTTP libraries below the openai client, which reach us unwrapped while a stream is read.
_CHUNKS = openai.AsyncStream[Any]  # its response is read by `EventStream`
_HTTP_ERRORS = (httpx2.HTTPError, httpx2.StreamError, aiohttp.ClientError, OSError)


def _dropped(e: BaseException) -> BaseException | None:
    """Return the error by which the server closed the connection before it answered; None if it did not.

    On a kept connection that says nothing about this request: llama-server closes after an answer, and tells it too
    late for a request that follows at once.
    """
    cause = _cause(e, aiohttp.ServerDisconnectedError) or _cause(e, aiohttp.ClientOSError)
    return None if isinstance(cause, aiohttp.ClientConnectorError) else cause


def _cause(e: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The first error of that kind in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


async def _close(stream: openai.AsyncStream[Any]) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stream.close()
    except _HTTP_ERRORS as e:  # a TimeoutError is an OSError
        log.debug("closing a server stream: %s", type(e).__name__)


async def _bounded(response: httpx2.Response) -> None:
    """Bound a response: an error's body is read up to MAX_ERROR, and no content coding that expands is taken."""
    if response.headers.get("content-encoding", "").strip().lower() not in _CODINGS:
        msg = "the answer is packed in a way that was not asked for"
        raise httpx2.DecodingError(msg)
    if not response.is_success:
        response.stream = _Head(cast("httpx2.AsyncByteStream", response.stream))


class _Head(httpx2.AsyncByteStream):
    """The beginning of a body."""

    def __init__(self, whole: httpx2.AsyncByteStream) -> None:
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        n_bytes = 0
        async for part in self._whole:
            yield part
            n_bytes += len(part)
            if n_bytes > MAX_ERROR:
                return

    async def aclose(self) -> None:
        await self._whole.aclose()
