"""The route of the API's own description."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from aiohttp import web


@dataclass(slots=True)
class DescribedApi:
    """The document as JSON, once somebody has asked for it."""

    body: bytes = b""


DESCRIBED = web.AppKey("described", DescribedApi)


def add_routes(app: web.Application) -> None:
    """Add the route."""
    app[DESCRIBED] = DescribedApi()
    app.router.add_get("/openapi.json", _openapi)


async def _openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: Describe this API in OpenAPI 3.1: routes, fields, answers and errors."""
    described = request.app[DESCRIBED]
    if not described.body:
        described.body = await asyncio.to_thread(_made, request.app)
    return web.Response(body=described.body, content_type="application/json")


def _made(app: web.Application) -> bytes:
    from docs.openapi.document import document, routes_of  # a start has no use for it

    return msgspec.json.encode(document(routes_of(app)))
