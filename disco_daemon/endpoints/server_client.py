"""The HTTP client for one server: bounded responses, no redirects, and no key in the clear to public addresses.

It is aiohttp, without the openai client above it: what that makes for each request (options, models, headers,
addresses) took half of the time that this daemon added to a first token, and its import a third of a daemon's start.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import os
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
from aiohttp import (
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
)

from .. import __version__
from ..system.net import hostname, is_address, is_loopback
from .kept_connections import KeptConnections
from .plainhttp import PrivateResolver
from .server_errors import StatusError
from .stream import Bytes, Endless

CONNECT_TIMEOUT_S = 5.0  # a server that cannot be reached; the device goes on meanwhile
KEEP_WARM_S = 60.0  # an idle connection: a new one costs round trips, most of all with TLS; many servers close after 75
MAX_CONNECTIONS = 1000  # to one server
CLOSE_TIMEOUT_S = 1.0  # closing the connections to a server that does not react
LOOKUP_TIMEOUT_S = 1.0  # at the start, of a name that a key would be sent to by plain http
MAX_ERROR = 64 * 1024  # bytes read of an answer that is an error; a message takes some hundred
ASK_TIMEOUT_S = 10.0  # what a server tells of its models
MAX_TOLD = 16 * 2**20  # bytes of that; OpenRouter's list of all its models takes less than one
MAX_UNPACKED = 64 * 1024  # bytes of a packed answer that are unpacked at a time: zlib makes a thousand of one
# Content codings that a server sends though it was asked for none, as zlib's window bits.
_CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": 32 + zlib.MAX_WBITS}

_encode = msgspec.json.Encoder().encode


class ServerClient:
    """Connections to one server, and what is sent with each request. Without retries: those are the conductor's.

    `told` gets the headers of each good answer to a request that is streamed.
    """

    def __init__(
        self, base_url: str, api_key: str, *, confined: bool, told: Callable[[Mapping[str, str]], None] | None = None
    ) -> None:
        """Make the client, in the loop that uses it; nothing is sent. `confined`: private addresses only.

        What is for this machine, or a key by plain http, never goes through a proxy.
        """
        self._told, self._is_owner = told, True
        self._base_url = base_url.rstrip("/")
        host = hostname(base_url)
        self._proxy, self._proxy_headers = (None, {}) if confined or is_loopback(host) else _proxy(base_url)
        connector = KeptConnections(
            limit=MAX_CONNECTIONS,
            keepalive_timeout=KEEP_WARM_S,
            resolver=PrivateResolver() if confined else None,
            ssl=_tls() if urlsplit(base_url).scheme == "https" else True,
        )
        self._session = ClientSession(
            connector=connector,
            headers=_headers(host, api_key),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            # Reading has time-outs of our own everywhere; the client's would be one more timer for each token.
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    def beside(self, told: Callable[[Mapping[str, str]], None]) -> ServerClient:
        """Return a client over the same connections, for another model: it closes none of them."""
        other = copy.copy(self)
        other._told, other._is_owner = told, False
        return other

    async def close(self) -> None:
        """Close all connections, unless they are another one's."""
        if not self._is_owner:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._session.close()

    async def stream(self, path: str, body: dict[str, Any], stack: AsyncExitStack) -> Bytes:
        """Send a request, once; return the response's body as it comes. `stack` closes it.

        Raises aiohttp's errors, KeptDrop among them, TimeoutError where there is no connection in time, StatusError.
        """
        return await self._ask("POST", f"{self._base_url}/{path.lstrip('/')}", stack, _encode(body))

    async def get(self, url: str) -> bytes:
        """Return what is at a page of the server, bounded in size and time. Raises as `stream`, and Endless."""
        async with asyncio.timeout(ASK_TIMEOUT_S), AsyncExitStack() as stack:
            told = await _beginning(await self._ask("GET", url, stack), MAX_TOLD + 1)
        if len(told) > MAX_TOLD:
            raise Endless(f"more than {MAX_TOLD} bytes")
        return told

    async def _ask(self, method: str, url: str, stack: AsyncExitStack, content: bytes | None = None) -> Bytes:
        response = await self._session.request(
            method, url, data=content, allow_redirects=False, proxy=self._proxy, proxy_headers=self._proxy_headers
        )
        stack.callback(response.release)  # what is not at its end is closed by that, without waiting for anybody
        body = _unpacked(response)
        if 200 <= response.status < 300:
            if content is not None and self._told is not None:
                self._told(response.headers)
            return body
        raise StatusError(response.status, response.headers, url, await _beginning(body, MAX_ERROR))


def _headers(host: str, api_key: str) -> dict[str, str]:
    """Return the headers of each request. A user's organization and project are OpenAI's business alone."""
    headers = {
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": f"disco/{__version__}",
        "Authorization": f"Bearer {api_key or 'none'}",
        # A coding could make gigabytes of a few bytes, and saves little of a stream.
        "Accept-Encoding": "identity",
    }
    if host == "openai.com" or host.endswith(".openai.com"):
        told = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
        headers |= {name: value for name, variable in told.items() if (value := os.environ.get(variable))}
    return headers


def _proxy(base_url: str) -> tuple[str | None, dict[str, str]]:
    """Return the proxy that the environment, or the system's settings, name for a server, and what that one is sent."""
    parts = urlsplit(base_url)
    proxies = getproxies()
    named = proxies.get(parts.scheme) or proxies.get("all")
    if not named or proxy_bypass(parts.hostname or ""):
        return None, {}
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    headers = {}
    if proxy.username:
        user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"  # aiohttp makes it the proxy's
    return proxy._replace(netloc=proxy.netloc.rpartition("@")[2]).geturl(), headers


@cache
def _tls() -> ssl.SSLContext:
    """Return whom to trust: the system's certificates, or those that SSL_CERT_FILE or SSL_CERT_DIR name.

    By httpx2, which knows where each system has them; it is loaded for servers by https alone.
    """
    import httpx2

    return httpx2.create_ssl_context()


async def _beginning(body: Bytes, most: int) -> bytes:
    """Return the beginning of a body, `most` bytes at most."""
    told = bytearray()
    async for part in body:
        told += part
        if len(told) >= most:
            break
    return bytes(told[:most])


def _unpacked(response: ClientResponse) -> Bytes:
    """Return a response's body as it comes. Raises ValueError where it is packed in a way that nobody asked for."""
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    if coding in ("", "identity"):
        return response.content.iter_any()
    if coding not in _CODINGS:
        raise ValueError("the answer is packed in a way that was not asked for")
    return _unpack(response.content.iter_any(), _CODINGS[coding])


async def _unpack(packed: Bytes, window_bits: int) -> AsyncIterator[bytes]:
    """Yield what is packed, a little at a time. Raises ValueError for what cannot be unpacked."""
    try:
        unpacker = zlib.decompressobj(window_bits)
        async for part in packed:
            while part:
                if found := unpacker.decompress(part, MAX_UNPACKED):
                    yield found
                part = unpacker.unconsumed_tail
                if part:
                    await asyncio.sleep(0)  # a few bytes may make megabytes: others have a turn
        if rest := unpacker.flush():
            yield rest
    except zlib.error as e:
        raise ValueError(f"the answer is packed, and broken: {e}") from e


async def look_up_private(base_url: str) -> None:
    """Look the server's name up. Raises NotPrivateError if it stands for public addresses only, and other OSErrors."""
    host, resolver = hostname(base_url), PrivateResolver()
    try:
        if not is_address(host):
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await resolver.resolve(host)
    finally:
        await resolver.close()
