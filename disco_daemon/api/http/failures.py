"""Errors as responses: JSON in the shape of the API that was asked, with the right status."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from ...errors import DiscoError, ReaderGone, RequestError
from ...plain import did_you_mean
from ..control.scrape import Handler
from ..openai.shapes import error_body

ErrorShape = Callable[[DiscoError], dict[str, Any]]
# Of paths by their beginning, whose clients know another shape than OpenAI's.
ERROR_SHAPES: dict[str, ErrorShape] = {}

log = logging.getLogger("disco.api")

MAX_BODY = 8 * 1024 * 1024  # bytes of a request; a context of a million tokens is about half of it
RETRY_S = 2.0  # for a client, where the daemon is full and it is not known for how long
MAX_RETRY_S = 86400.0  # a day: a cap's day ends by then, and a server's longer advice is none
MAX_TOLD = 200  # characters of the fault of a request that could not be read
SERVER = "disco"  # without versions, which would tell a stranger what to try


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON document as a response."""
    body = msgspec.json.encode(payload)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_shape(path: str) -> ErrorShape:
    """Return the shape that errors have for clients of this path: OpenAI's, where no other API has it."""
    return next((shape for begin, shape in ERROR_SHAPES.items() if path.startswith(begin)), error_body)


def failure(
    error: DiscoError, headers: dict[str, str] | None = None, *, shape: ErrorShape = error_body
) -> web.Response:
    """Return an error as a response; one that asks to come again has a Retry-After."""
    headers = dict(headers or {})
    retry_after_s = getattr(error, "retry_after_s", None)
    if error.status == 503 and (retry_after_s is None or not math.isfinite(retry_after_s)):
        retry_after_s = RETRY_S
    if retry_after_s is not None and math.isfinite(retry_after_s):
        headers["Retry-After"] = str(round(min(MAX_RETRY_S, max(1.0, retry_after_s))))
    return json_response(shape(error), error.status, headers)


def unexpected(error: BaseException) -> DiscoError:
    """Return the error that a client sees for a fault of ours; the log has the rest."""
    log.error("a request failed unexpectedly", exc_info=error)
    return DiscoError("Something went wrong in the daemon; its log says what (`disco service logs`).")


def plain(text: object) -> str:
    """Return a stranger's text as one short line without control characters."""
    first = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return first if len(first) <= MAX_TOLD else first[: MAX_TOLD - 1] + "…"


def too_large() -> RequestError:
    """Return the error for a body beyond MAX_BODY."""
    return RequestError(f"The request body is larger than {MAX_BODY} bytes.", status=413, code="request_too_large")


def of_http(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """Return an error that aiohttp raises by itself as one of ours."""
    where, shape = plain(f"{request.method} {request.path}"), error_shape(request.path)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return failure(too_large(), shape=shape)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        msg = f"{plain(request.method)} is not allowed here; use {allowed}."
        return failure(RequestError(msg, status=405), {"Allow": allowed}, shape=shape)
    if isinstance(error, web.HTTPNotFound):
        known = request.app.router.resources() if isinstance(request, web.Request) else ()
        near = did_you_mean(request.path, (one.canonical for one in known)).strip()
        text = f"Invalid URL ({where}){': ' * bool(near)}{near}"
        return failure(RequestError(text, status=404, code="not_found"), shape=shape)
    return failure(RequestError(f"{error.reason} ({where})", status=error.status), shape=shape)


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the shape that its path's clients know, also an unexpected one."""
    shape = error_shape(request.path)
    try:
        return await handler(request)
    except ReaderGone as e:
        raise asyncio.CancelledError from e  # as if aiohttp had noticed it first
    except DiscoError as e:
        return failure(e, shape=shape)
    except web.HTTPException as e:
        return of_http(e, request)
    except web.RequestPayloadError as e:
        return failure(RequestError(f"The request body cannot be read: {plain(e)}"), shape=shape)
    except ConnectionError:
        raise  # the client has left: there is no response to write
    except Exception as e:
        if request.writer.output_size:  # the answer has begun: only its end can say that it is not whole
            unexpected(e)
            raise ConnectionResetError("the answer broke off") from e
        return failure(unexpected(e), shape=shape)


async def signed(_request: web.Request, response: web.StreamResponse) -> None:
    """Set the Server header to the name alone."""
    response.headers["Server"] = SERVER
