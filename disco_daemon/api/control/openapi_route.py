"""The route of the API's own description, a file that `make docs` writes (docs/openapi)."""

from __future__ import annotations

import asyncio
from importlib.resources import files

from aiohttp import web

FILE = files("disco_daemon.api") / "openapi.json"


def add_routes(app: web.Application) -> None:
    """Add the route."""
    app.router.add_get("/openapi.json", _openapi)


async def _openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: Describe this API in OpenAPI 3.1: routes, fields, answers and errors."""
    del request
    return web.Response(body=await asyncio.to_thread(FILE.read_bytes), content_type="application/json")
