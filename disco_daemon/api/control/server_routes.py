"""Routes for first steps: the known servers, the check of one, and the choice of server and device.

A key that comes in here goes only to its server and into its file: no response and no log has it.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from ..doors import fit, may_control
from ..http.connections import body
from .control_requests import parse_device, parse_server
from .documents import DOCUMENTS, as_json, settings_at_fault


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/providers", _providers)
    app.router.add_post("/disco/v1/server/check", _check)
    app.router.add_put("/disco/v1/server", _set)
    app.router.add_put("/disco/v1/device", _set_device)
    app.router.add_get("/disco/v1/offers", _offers)
    app.router.add_post("/disco/v1/fetch", _fetch)
    app.router.add_delete("/disco/v1/fetch", _cancel_fetch)


async def _providers(request: web.Request) -> web.Response:
    """GET /disco/v1/providers: List the known servers, and the models on this machine."""
    with settings_at_fault():
        known = await asyncio.to_thread(request.app[DOCUMENTS].providers)
    if not may_control(request):  # shown is whether there is a key, not where
        for of in ("providers", "servers"):
            rows = [row | {"key": "set" if row.get("key") else ""} for row in known.get(of, ())]
            known = known | {of: rows}
    return as_json(fit(request, known))


async def _check(request: web.Request) -> web.Response:
    """POST /disco/v1/server/check: Test a server, `{base_url, api_key?, model?, name?}`; with a model for money."""
    wish = parse_server(await body(request))
    with settings_at_fault():
        key, model, name = wish.api_key or "", wish.model or "", wish.name or ""
        return as_json(await request.app[DOCUMENTS].check_server(wish.base_url, key, model, name))


async def _set(request: web.Request) -> web.Response:
    """PUT /disco/v1/server: Write a server down and use it, `{base_url, api_key?, model?, name?}`; "" takes it away.

    With a `name` it is one of several: it comes beside the others, or is changed.
    """
    wish = parse_server(await body(request))
    with settings_at_fault():
        key, model, name = wish.api_key or "", wish.model or "", wish.name or ""
        return as_json(await request.app[DOCUMENTS].set_server(wish.base_url, key, model, name))


async def _set_device(request: web.Request) -> web.Response:
    """PUT /disco/v1/device: Use another local model, `{model}`, that `GET /disco/v1/providers` lists, or "previous"."""
    model = parse_device(await body(request))
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].set_device(model))


async def _offers(request: web.Request) -> web.Response:
    """GET /disco/v1/offers: List models that suit this machine's memory, with their speed, size and licence."""
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].offers())


async def _fetch(request: web.Request) -> web.Response:
    """POST /disco/v1/fetch: Fetch a model of `GET /disco/v1/offers`, `{model}`, and use it; the state says how far."""
    name = parse_device(await body(request))
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].fetch_model(name))


async def _cancel_fetch(request: web.Request) -> web.Response:
    """DELETE /disco/v1/fetch: End the fetch that runs; what came is kept."""
    return as_json(await request.app[DOCUMENTS].cancel_fetch())
