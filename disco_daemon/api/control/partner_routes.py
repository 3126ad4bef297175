"""Routes for the owner of a machine that computes the upper layers for others: who may, and who may no more."""

from __future__ import annotations

import asyncio

from aiohttp import web

from .documents import DOCUMENTS, as_json
from .member_routes import code_made, revoked


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/partner", _partner)
    app.router.add_post("/disco/v1/partner/pair", _pair)
    app.router.add_post("/disco/v1/partner/revoke", _revoke)


async def _partner(request: web.Request) -> web.Response:
    """GET /disco/v1/partner: List the machines that this one computes upper layers for, and how the link is."""
    return as_json(await asyncio.to_thread(request.app[DOCUMENTS].partner))


async def _pair(request: web.Request) -> web.Response:
    """POST /disco/v1/partner/pair: Make a code for one other machine, `{address?}`; turns `partner.enabled` on."""
    return await code_made(request, request.app[DOCUMENTS].pair)


async def _revoke(request: web.Request) -> web.Response:
    """POST /disco/v1/partner/revoke: Refuse a machine from now on, `{name}`; its link is closed at once."""
    return await revoked(request, request.app[DOCUMENTS].revoke)
