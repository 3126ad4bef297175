"""An OpenAI-compatible server, through the official client. Also serves as the device when that is a local server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import openai
from openai import AsyncOpenAI, AsyncStream, DefaultAioHttpClient
from openai.types.chat import ChatCompletionChunk

from ..errors import EndpointError
from ..types import Finish, GenerationRequest, Side, Token, Usage

log = logging.getLogger("disco.server")

CONNECT_TIMEOUT_S = 5.0
USAGE_TIMEOUT_S = 1.0  # after finish_reason; the answer is whole, only the bill is missing
CLOSE_TIMEOUT_S = 1.0

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

    def __init__(self, config: ServerConfig, side: Side = Side.SERVER) -> None:
        self.side = side
        self.model = config.model
        self.config = config
        self.last_error: str | None = None
        self.n_failures = 0
        self._continuation = _continuation(config)
        self._client: AsyncOpenAI | None = None

    async def start(self) -> None:
        """Make the client; nothing is sent."""
        config = self.config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(config.first_token_timeout_s, connect=CONNECT_TIMEOUT_S),
            http_client=DefaultAioHttpClient(),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def refuses(self, request: GenerationRequest) -> str | None:
        """A server takes everything, except to continue where it has no way to."""
        if request.answer_so_far and self._continuation == "none":
            return "this server cannot continue a partial answer"
        return None

    def may_serve(self) -> bool:
        """A configured server may always be tried."""
        return True

    async def count(self, request: GenerationRequest) -> int | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    def status(self) -> dict[str, Any]:
        """Address, model, continuation method and last failure."""
        return {
            "kind": "openai",
            "base_url": _without_credentials(self.config.base_url),
            "model": self.model,
            "state": "configured",
            "continuation": self._continuation,
            "failures": self.n_failures,
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
        deadline = asyncio.get_running_loop().time() + self.config.first_token_timeout_s
        with self._translate():
            async with asyncio.timeout_at(deadline):
                stream = await self._open(request)
            try:
                async with aclosing(self._read(stream, usage)) as events:
                    while True:
                        async with asyncio.timeout_at(deadline):
                            event = await anext(events, None)
                        if event is None:
                            text = "the server ended its stream without a finish_reason: the answer was cut"
                            raise EndpointError(self.side, "cut", text)
                        if isinstance(event, Finish):
                            break
                        yield event
                        # Counted from here: the deadline is for the server, not for a slow reader.
                        deadline = asyncio.get_running_loop().time() + self.config.token_timeout_s
                    await self._settle(events)
                    yield event
            finally:
                await _close(stream)

    async def _settle(self, events: AsyncGenerator[Token | Finish, None]) -> None:
        """Read on for the usage chunk; the answer is whole, so nothing that happens here is an error."""
        try:
            with self._translate():
                async with asyncio.timeout(USAGE_TIMEOUT_S):
                    async for _ in events:
                        pass
        except EndpointError as e:
            log.debug("no usage after the answer: %s", e)

    async def _open(self, request: GenerationRequest) -> AsyncStream[ChatCompletionChunk]:
        assert self._client is not None, "start() comes first"
        body = self._body(request)
        return await self._client.chat.completions.create(
            model=self.model, messages=body.pop("messages"), stream=True, extra_body=body
        )

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
            if self._continuation == "prefix":
                partial["prefix"] = True
            elif self._continuation == "continue_final_message":
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            messages.append(partial)
        if self.config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        return body | {"messages": messages}

    async def _read(
        self, stream: AsyncStream[ChatCompletionChunk], usage: Usage
    ) -> AsyncGenerator[Token | Finish, None]:
        n_chunks = 0
        async for chunk in stream:
            if chunk.usage is not None:
                usage.prompt_tokens = chunk.usage.prompt_tokens or usage.prompt_tokens
                usage.completion_tokens = chunk.usage.completion_tokens or usage.completion_tokens
                if not chunk.choices and n_chunks:
                    return
            for choice in chunk.choices:
                token = _token(choice)
                if token is not None:
                    n_chunks += 1
                    usage.completion_tokens = max(usage.completion_tokens, n_chunks)
                    yield token
                if choice.finish_reason:
                    n_chunks = max(n_chunks, 1)
                    yield Finish(choice.finish_reason)
                    if not self.config.stream_usage:
                        return

    # --- errors --------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate(self) -> Iterator[None]:
        """Foreign errors become EndpointErrors here, and nowhere else."""
        try:
            yield
        except TimeoutError as e:
            raise self._error("timeout", "the server gave no token in time") from e
        except openai.APITimeoutError as e:
            raise self._error("timeout", "the server did not answer in time") from e
        except openai.APIStatusError as e:
            raise self._status_error(e) from e
        except openai.APIConnectionError as e:
            cause = e.__cause__ or e
            raise self._error("unreachable", f"the server cannot be reached: {_brief(cause)}") from e
        except openai.APIError as e:
            raise self._error("server_error", f"the server reports: {e.message}") from e
        except (json.JSONDecodeError, UnicodeDecodeError, openai.OpenAIError) as e:
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
            return EndpointError(self.side, "rate_limited", f"the server said 429: {text}", retry_after_s=retry_after_s)
        if status == 404:
            return self._error("not_found", f"the server said 404, check server.base_url and server.model: {text}")
        if status < 500:
            return EndpointError(self.side, "refused", f"the server said {status}: {text}", your_fault=True)
        return self._error("server_error", f"the server said {status}: {text}")


def _http_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library below the openai client, which do not reach us wrapped while a stream is read."""
    import aiohttp
    import httpx2

    return (httpx2.HTTPError, httpx2.StreamError, aiohttp.ClientError, OSError)


_HTTP_ERRORS = _http_errors()


def _token(choice: Any) -> Token | None:
    """One chunk's choice as a Token, None if it carries nothing."""
    delta = choice.delta.model_dump(exclude_none=True, exclude_unset=True) if choice.delta else {}
    delta.pop("role", None)
    text = delta.pop("content", None) or ""
    delta = {k: v for k, v in delta.items() if v not in ("", [], {})}
    logprobs = choice.logprobs.model_dump(exclude_none=True) if choice.logprobs else None
    if not text and not delta:
        return None
    return Token(text, 1, delta or None, logprobs)


async def _close(stream: AsyncStream[ChatCompletionChunk]) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stream.close()
    except _HTTP_ERRORS as e:  # a TimeoutError is an OSError
        log.debug("closing a server stream: %s", _brief(e))


def _continuation(config: ServerConfig) -> str:
    """How this server continues a partial answer; `auto` knows some hosts, and tries the common way elsewhere."""
    if config.continuation != "auto":
        return config.continuation
    host = urlsplit(config.base_url).hostname or ""
    for known, method in _KNOWN_HOSTS.items():
        if host == known or host.endswith("." + known):
            return method
    return "continue_final_message"


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
    text = " ".join(str(getattr(e, "message", "") or e).split()) or type(e).__name__
    return text if len(text) <= 200 else text[:200] + "…"


def _number(text: str | None) -> float | None:
    try:
        return float(cast("str", text))
    except (TypeError, ValueError):
        return None


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f"{parts.username}:{parts.password}@", "") if parts.username else url
