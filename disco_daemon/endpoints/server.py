"""An OpenAI-compatible server, through the official client. Also serves as the device when that is a local server."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import httpx2
import msgspec
import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from ..clock import Clock, SystemClock
from ..errors import EndpointError
from ..net import is_loopback, without_credentials
from ..types import Continuation, Finish, GenerationRequest, Readiness, Side, Token, Usage

log = logging.getLogger("disco.server")

CONNECT_TIMEOUT_S = 5.0
USAGE_TIMEOUT_S = 1.0  # after finish_reason; the answer is whole, only the bill is missing
CLOSE_TIMEOUT_S = 1.0

RATE_LIMITED_S = 5.0  # after a 429 that names no time
MAX_DOWN_S = 300.0  # a server may ask for hours; we look again after five minutes

MAX_LINE = 4 * 1024 * 1024  # bytes of one event; a token takes a few hundred

Bytes = AsyncIterator[bytes]

CONTINUATIONS = ("auto", "continue_final_message", "prefix", "assistant", "none")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to reach a server. Time-outs in s; `continuation` is one of CONTINUATIONS, see docs/architecture.md."""

    base_url: str
    model: str
    api_key: str = field(repr=False)
    first_token_timeout_s: float = 20.0
    token_timeout_s: float = 15.0
    continuation: str = "auto"
    stream_usage: bool = True


class Server:
    """`Endpoint` over `openai.AsyncOpenAI`; retries are the conductor's business, so the client makes none."""

    def __init__(self, config: ServerConfig, side: Side = Side.SERVER, clock: Clock | None = None) -> None:
        self.side = side
        self._clock = clock or SystemClock()
        self._down_until = -math.inf  # by its own Retry-After
        self.model = config.model
        self.config = config
        self.last_error: str | None = None
        self.n_failures = 0
        self._method = _method(config)
        self.continuation = _trust(config, self._method)
        self._client: AsyncOpenAI | None = None

    async def start(self) -> None:
        """Make the client; nothing is sent."""
        config = self.config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(
                max(config.first_token_timeout_s, config.token_timeout_s), connect=CONNECT_TIMEOUT_S
            ),
            # What is for this machine never goes through a proxy.
            http_client=DefaultAioHttpClient(trust_env=not is_loopback(urlsplit(config.base_url).hostname or "")),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def refuses(self, request: GenerationRequest) -> str | None:
        """A server takes everything, except to continue where it has no way to."""
        if request.answer_so_far and self._method == "none":
            return "this server cannot continue a partial answer"
        return None

    def may_serve(self) -> bool:
        """A configured server may always be tried."""
        return True

    def readiness(self) -> Readiness:
        """Nothing to load; down for as long as it asked to be left alone."""
        return Readiness(down_s=max(0.0, self._down_until - self._clock.now()))

    async def count(self, request: GenerationRequest) -> int | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    def status(self) -> dict[str, Any]:
        """Address, model, continuation method and last failure."""
        return {
            "kind": "openai",
            "base_url": without_credentials(self.config.base_url),
            "model": self.model,
            "state": "configured",
            "continuation": self._method,
            "failures": self.n_failures,
            "down_s": round(self.readiness().down_s, 1),
            "last_error": self.last_error,
        }

    # --- one answer ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        """Stream one answer; the stream is closed on the way out, however that is."""
        try:
            async with aclosing(self._generate(request, usage)) as events:
                async for event in events:
                    yield event
        except EndpointError as e:
            if not e.your_fault:
                self.n_failures += 1
                self.last_error = str(e)
            raise

    async def _generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        refusal = self.refuses(request)
        if refusal is not None:
            raise EndpointError(self.side, "no_continuation", refusal)
        patience = _Patience(self.config.first_token_timeout_s, self.config.token_timeout_s)
        with self._translate():
            async with AsyncExitStack() as stack:
                async with asyncio.timeout_at(patience.until()):
                    body = await self._open(stack, request)
                chunks = await stack.enter_async_context(aclosing(_sse(body, patience)))
                events = await stack.enter_async_context(aclosing(self._read(chunks, usage)))
                async for event in events:
                    if isinstance(event, Finish):
                        if self.config.stream_usage:
                            await self._settle(events)
                        yield event
                        return
                    patience.heard()
                    yield event
                text = "the server ended its stream without a finish_reason: the answer was cut"
                raise self._error("cut", text)

    async def _settle(self, events: AsyncGenerator[Token | Finish, None]) -> None:
        """Read on for the usage chunk; the answer is whole, so nothing that happens here is an error."""
        try:
            with self._translate():
                async with asyncio.timeout(USAGE_TIMEOUT_S):
                    async for _ in events:
                        pass
        except EndpointError as e:
            log.debug("no usage after the answer: %s", e)

    async def _open(self, stack: AsyncExitStack, request: GenerationRequest) -> Bytes:
        """Send the request; the response's body as it comes. `stack` closes it.

        The body is read by `_sse` instead of the client's own chunk models: those cost more than all the rest of
        the relay together (`disco bench relay`), and their decoder trips over what real servers send.
        """
        assert self._client is not None, "start() comes first"
        body = self._body(request)
        opening = self._client.chat.completions.with_streaming_response.create(
            model=self.model, messages=body.pop("messages"), stream=True, extra_body=body
        )
        response = await opening.__aenter__()
        stack.push_async_callback(_close, opening)
        return response.iter_bytes()

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        s = request.sampling
        limit = {request.max_tokens_key: s.max_tokens}
        sampling = {
            "temperature": s.temperature, "top_p": s.top_p, "seed": s.seed, "stop": list(s.stop) or None,
            "frequency_penalty": s.frequency_penalty, "presence_penalty": s.presence_penalty,
        }  # fmt: skip
        body = {k: v for k, v in (limit | sampling).items() if v is not None} | dict(request.extra)
        messages = [dict(m) for m in request.messages]
        if request.answer_so_far:
            partial: dict[str, Any] = {"role": "assistant", "content": request.answer_so_far}
            if self._method == "prefix":
                partial["prefix"] = True
            elif self._method == "continue_final_message":
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            messages.append(partial)
        if self.config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        return body | {"messages": messages}

    async def _read(self, chunks: AsyncIterator[dict[str, Any]], usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        """OpenAI's chunks as tokens; `usage` follows."""
        n_tokens = 0
        async for chunk in chunks:
            if error := chunk.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                raise self._error("server_error", f"the server reports: {_brief_text(str(message))}")
            if billed := chunk.get("usage"):
                usage.prompt_tokens = _count(billed, "prompt_tokens") or usage.prompt_tokens
                usage.completion_tokens = _count(billed, "completion_tokens") or usage.completion_tokens
            for choice in chunk.get("choices") or ():
                token = _token(choice)
                if token is not None:
                    n_tokens += 1
                    usage.completion_tokens = max(usage.completion_tokens, n_tokens)
                    yield token
                if choice.get("finish_reason"):
                    yield Finish(str(choice["finish_reason"]))

    # --- errors --------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate(self) -> Iterator[None]:
        """Foreign errors become EndpointErrors here, and nowhere else."""
        try:
            yield
        except TimeoutError as e:
            raise self._error("timeout", "the server gave no token in time") from e
        except openai.APITimeoutError as e:
            # The client's aiohttp transport reports a refused connection as a connect time-out.
            if (cause := _cause(e, aiohttp.ClientConnectorError)) is not None:
                raise self._error("unreachable", f"the server cannot be reached: {_brief(cause)}") from e
            raise self._error("timeout", "the server did not answer in time") from e
        except openai.APIStatusError as e:
            raise self._status_error(e) from e
        except openai.APIConnectionError as e:
            cause = e.__cause__ or e
            raise self._error("unreachable", f"the server cannot be reached: {_brief(cause)}") from e
        except openai.APIError as e:
            raise self._error("server_error", f"the server reports: {e.message}") from e
        except (msgspec.MsgspecError, openai.OpenAIError) as e:
            raise self._error("garbage", f"the server sent what is no OpenAI stream: {_brief(e)}") from e
        except _HTTP_ERRORS as e:
            raise self._error("cut", f"the connection to the server broke: {_brief(e)}") from e
        except (ValueError, TypeError, AttributeError) as e:
            raise self._error("garbage", f"the server sent what is no OpenAI stream: {_brief(e)}") from e

    def _error(self, reason: str, message: str) -> EndpointError:
        return EndpointError(self.side, reason, message)

    def _status_error(self, e: openai.APIStatusError) -> EndpointError:
        status, text = e.status_code, _brief(e)
        if status in (401, 403):
            hint = "check the API key (server.api_key_env or server.api_key_file)"
            return self._error("unauthorized", f"the server refused the API key with {status}: {hint}")
        if status == 429:
            retry_after_s = _number(e.response.headers.get("retry-after"))
            down_s = RATE_LIMITED_S if retry_after_s is None else min(max(0.0, retry_after_s), MAX_DOWN_S)
            self._down_until = self._clock.now() + down_s
            return EndpointError(self.side, "rate_limited", f"the server said 429: {text}", retry_after_s=retry_after_s)
        if status == 404:
            return self._error("not_found", f"the server said 404, check server.base_url and server.model: {text}")
        if status == 408:
            return self._error("timeout", f"the server said 408: {text}")
        if status in (400, 413, 415, 422):
            return EndpointError(self.side, "refused", f"the server said {status}: {text}", your_fault=True)
        return self._error("server_error", f"the server said {status}: {text}")


# The errors of the HTTP libraries below the openai client, which reach us unwrapped while a stream is read.
_HTTP_ERRORS = (httpx2.HTTPError, httpx2.StreamError, aiohttp.ClientError, OSError)


def _cause(e: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The first error of that kind in the chain of causes."""
    cause: BaseException | None = e
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def _count(billed: dict[str, Any], key: str) -> int:
    """A token count of a usage block. Raises TypeError for what is none: it would be booked and stored."""
    n = billed.get(key) or 0
    if not isinstance(n, int) or n < 0:
        msg = f"usage.{key} is no count"
        raise TypeError(msg)
    return n


def _token(choice: dict[str, Any]) -> Token | None:
    """One chunk's choice as a Token, None if it carries nothing."""
    delta = choice.get("delta") or {}
    logprobs = choice.get("logprobs") or None
    if not isinstance(logprobs, dict | None):
        raise TypeError("logprobs is no object")
    text = delta.get("content") or ""
    if not isinstance(text, str):
        raise TypeError("delta.content is no string")
    if len(delta) > 1 or not text:
        delta = {k: v for k, v in delta.items() if k not in ("content", "role") and v not in (None, "", [], {})}
        if not text and not delta:
            return None
        return Token(text, 1, delta or None, logprobs)
    return Token(text, 1, None, logprobs)


class _Patience:
    """How long to wait for the server's next bytes: until a first token, then from token to token, s.

    Comments and empty chunks do not prolong it; the time a slow reader takes does, since it is not the server's.
    """

    def __init__(self, first_token_s: float, token_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._token_s = token_s
        self._until = self._now() + first_token_s
        self._heard = False

    def heard(self) -> None:
        """A token has come."""
        self._heard = True

    def until(self) -> float:
        """Deadline of a wait that begins now, in the event loop's time."""
        if self._heard:
            self._heard, self._until = False, self._now() + self._token_s
        return self._until


async def _sse(body: Bytes, patience: _Patience) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of an event stream, up to `[DONE]` or its end.

    Raises ValueError for what is none, TimeoutError when `patience` is over.

    Cut at line feeds in the bytes, so that neither a character split between two reads nor a U+2028 inside a text
    can cut a line. Comments, `id:` and `event:` lines are skipped.
    """
    buffer = b""
    while True:
        async with asyncio.timeout_at(patience.until()):  # once a read, not once a token: a read may carry many
            data = await anext(body, None)
        if data is None:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > MAX_LINE:
            msg = f"a line of more than {MAX_LINE} bytes"
            raise ValueError(msg)
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                yield _decode(payload)
    if buffer.startswith(b"data:") and buffer[5:].strip() != b"[DONE]":
        yield _decode(buffer[5:].strip())


_decode = msgspec.json.Decoder(dict[str, Any]).decode


async def _close(opening: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await opening.__aexit__(None, None, None)
    except _HTTP_ERRORS as e:  # a TimeoutError is an OSError
        log.debug("closing a server stream: %s", _brief(e))


def _method(config: ServerConfig) -> str:
    """How this server continues a partial answer; `auto` knows some hosts, and tries the common way elsewhere."""
    if config.continuation != "auto":
        return config.continuation
    host = urlsplit(config.base_url).hostname or ""
    for known, method in _KNOWN_HOSTS.items():
        if host == known or host.endswith("." + known):
            return method
    return "continue_final_message"


def _trust(config: ServerConfig, method: str) -> Continuation:
    """A method that is known to work there is believed; the guess for unknown hosts is checked at the seam."""
    if method == "none":
        return Continuation.NONE
    guessed = config.continuation == "auto" and method == "continue_final_message"
    return Continuation.GUARDED if guessed else Continuation.EXACT


_KNOWN_HOSTS: Mapping[str, str] = {
    "openai.com": "none",
    "anthropic.com": "none",
    "openai.azure.com": "none",
    "deepseek.com": "prefix",
    "mistral.ai": "prefix",
    "openrouter.ai": "assistant",
}


def _brief(e: BaseException) -> str:
    """One line of an error, never a page of HTML."""
    return _brief_text(str(getattr(e, "message", "") or e)) or type(e).__name__


def _brief_text(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:200] + "…"


def _number(text: str | None) -> float | None:
    try:
        return float(cast("str", text))
    except (TypeError, ValueError):
        return None
