"""Who may come in: no web page of a stranger, and nobody without the key."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from aiohttp import web

from ..errors import RequestError
from ..net import hostname, is_loopback
from .scrape import Handler


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """`host` as bound, `key` that clients must show ("" = none)."""

    host: str
    key: str


CONFIG = web.AppKey("config", ApiConfig)


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No web page may drive the model (DNS rebinding, CVE-2024-28224), and no stranger without the key."""
    config = request.app[CONFIG]
    if is_loopback(config.host) and not is_loopback(hostname(f"//{request.headers.get('Host', '')}")):
        raise RequestError("This Host is not served here: use http://127.0.0.1 or http://localhost.", status=403)
    origin = request.headers.get("Origin")
    if origin is not None and not is_loopback(hostname(origin)):
        raise RequestError("Requests from web pages of this Origin are not allowed.", status=403)
    if config.key and request.path != "/health":
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(shown, config.key.encode()):
            raise RequestError("Incorrect API key provided.", status=401, code="invalid_api_key")
    return await handler(request)
