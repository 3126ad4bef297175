"""The HTTP client for one server: bounded responses, no redirects, and no key in the clear to public addresses."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2
import msgspec
import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from ..net import hostname, is_address, is_loopback
from .plainhttp import PrivateResolver, confine
from .server_errors import HTTP_ERRORS, connection_drop
from .stream import Bytes, Endless

log = logging.getLogger("disco.server")

CONNECT_TIMEOUT_S = 5.0  # a server that cannot be reached; the device goes on meanwhile
KEEP_WARM_S = 60.0  # an idle connection: a new one costs round trips, most of all with TLS; many servers close after 75
MAX_CONNECTIONS = 1000  # to one server
CLOSE_TIMEOUT_S = 1.0  # closing a stream whose server does not react
LOOKUP_TIMEOUT_S = 1.0  # at the start, of a name that a key would be sent to by plain http
MAX_ERROR = 64 * 1024  # bytes read of an answer that is an error; a message takes some hundred
ASK_TIMEOUT_S = 10.0  # what a server tells of its models
MAX_TOLD = 16 * 2**20  # bytes of that; OpenRouter's list of all its models takes less than one
_CODINGS = ("", "identity", "gzip", "deflate")  # zlib makes a thousand bytes of one at most, of 16 KiB at a time


_CHUNKS = openai.AsyncStream[Any]  # its response is read here
_encode = msgspec.json.Encoder().encode


class ServerClient:
    """The openai client, without its retries: those are the conductor's business.

    Questions go past it: what it does for each (its options, models, headers and addresses are made anew) took half of
    the time that this daemon added to a first token. They go through the same HTTP client, with the same errors.
    """

    def __init__(self, base_url: str, api_key: str, timeout_s: float, *, confined: bool) -> None:
        """Make the client; nothing is sent. `confined`: it connects to private addresses only."""
        # Reading has time-outs of our own everywhere; the client's would be one more timer for each token.
        timeout = openai.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, read=None)
        self._http = _http(base_url, confined=confined)
        # A coding could make gigabytes of a few bytes, and saves little of a stream.
        plain = {"Accept-Encoding": "identity"}
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or "none",
            max_retries=0,
            timeout=timeout,
            default_headers=plain,
            http_client=self._http,
        )
        told = {
            "Accept": "application/json",
            "Content-Type": "application/json",
            "User-Agent": self._client.user_agent,
            "OpenAI-Organization": self._client.organization,
            "OpenAI-Project": self._client.project,
            **plain,
            **self._client.auth_headers,
        }
        self._headers = httpx2.Headers({name: value for name, value in told.items() if value is not None})
        self._extensions = {"timeout": timeout.as_dict()}
        self._urls: dict[str, httpx2.URL] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def stream(self, path: str, body: dict[str, Any], stack: AsyncExitStack) -> Bytes:
        """Send a request; return the response's body as it comes. `stack` closes it.

        The body is read by `EventStream`, not by the client's own chunk models: those cost more than all the rest of
        the relay together (`disco bench relay`), and their decoder trips over what real servers send.
        """
        content = _encode(body)
        try:
            response = await self._post(path, content)
        except openai.APIConnectionError as e:
            if connection_drop(e) is None:
                raise
            response = await self._post(path, content)
        stack.push_async_callback(_close, response)
        coded = response.headers.get("content-encoding", "").strip().lower() not in ("", "identity")
        return response.aiter_bytes() if coded else response.aiter_raw()

    async def get(self, url: str) -> bytes:
        """Return what is at a page of the server, bounded in size and time. Raises its client's errors."""
        async with asyncio.timeout(ASK_TIMEOUT_S):
            stream = await self._client.get(url, cast_to=object, stream=True, stream_cls=_CHUNKS)
            try:
                told = bytearray()
                async for part in stream.response.aiter_bytes():
                    told += part
                    if len(told) > MAX_TOLD:
                        msg = f"more than {MAX_TOLD} bytes"
                        raise Endless(msg)
                return bytes(told)
            finally:
                await _close(stream.response)

    async def _post(self, path: str, content: bytes) -> httpx2.Response:
        """Send a request; what comes back is open, and nothing of it is read. Raises the openai client's errors."""
        url = self._urls.get(path)
        if url is None:
            base = self._client.base_url
            url = self._urls[path] = base.copy_with(raw_path=base.raw_path + path.lstrip("/").encode())
        request = httpx2.Request("POST", url, headers=self._headers, content=content, extensions=self._extensions)
        try:
            response = await self._http.send(request, stream=True)
        except httpx2.TimeoutException as e:
            raise openai.APITimeoutError(request=request) from e
        except (httpx2.RequestError, ssl.SSLError) as e:
            raise openai.APIConnectionError(request=request) from e
        if response.is_success:
            return response
        try:
            await response.aread()
            raise self._client._make_status_error_from_response(response)
        finally:
            await _close(response)


def _http(base_url: str, *, confined: bool) -> httpx2.AsyncClient:
    """Return the HTTP client; the prompt goes to no address that a server names.

    What is for this machine, or a key by plain http, never goes through a proxy.
    """
    local = is_loopback(urlsplit(base_url).hostname or "")
    http = DefaultAioHttpClient(
        trust_env=not local and not confined,
        follow_redirects=False,
        event_hooks={"response": [_bound]},
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_WARM_S),
    )
    if confined:
        confine(http._transport)
    return http


async def _bound(response: httpx2.Response) -> None:
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


async def look_up_private(base_url: str) -> None:
    """Look the server's name up. Raises NotPrivateError if it stands for public addresses only, and other OSErrors."""
    host, resolver = hostname(base_url), PrivateResolver()
    try:
        if not is_address(host):
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await resolver.resolve(host)
    finally:
        await resolver.close()


async def _close(response: httpx2.Response) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await response.aclose()
    except HTTP_ERRORS as e:  # a TimeoutError is an OSError
        log.debug("closing a server stream: %s", type(e).__name__)
