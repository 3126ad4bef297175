"""How every failure leaves: as JSON, in OpenAI's shape, with the right status."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from ..errors import DiscoError, ReaderGone, RequestError
from .scrape import Handler
from .shapes import error_body

MAX_BODY = 8 * 1024 * 1024  # bytes; a context of a million tokens is about half of it


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON document."""
    body = msgspec.json.encode(payload)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def failure(error: DiscoError, headers: dict[str, str] | None = None) -> web.Response:
    """An error in OpenAI's shape."""
    headers = dict(headers or {})
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
    return json_response(error_body(error), error.status, headers)


@web.middleware
async def errors_in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in OpenAI's shape."""
    try:
        return await handler(request)
    except ReaderGone as e:
        raise asyncio.CancelledError from e  # as if aiohttp had noticed it first
    except DiscoError as e:
        return failure(e)
    except web.HTTPRequestEntityTooLarge:
        msg = f"The request body is larger than {MAX_BODY} bytes."
        return failure(RequestError(msg, status=413, code="request_too_large"))
    except web.HTTPMethodNotAllowed as e:
        msg = f"{request.method} is not allowed here; use {', '.join(sorted(e.allowed_methods))}."
        return failure(RequestError(msg, status=405))
    except web.HTTPNotFound:
        msg = f"Invalid URL ({request.method} {request.path})"
        return failure(RequestError(msg, status=404, code="not_found"))
    except web.HTTPException as e:
        return failure(RequestError(e.reason, status=e.status))
