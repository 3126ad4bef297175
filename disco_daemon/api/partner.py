"""Routes for the owner of a machine that computes the upper layers for others: who may, and who may no more."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from ..errors import ConfigError, RequestError
from .connections import body
from .documents import DOCUMENTS, as_json
from .openai import convert, decoded


class PairWish(msgspec.Struct, forbid_unknown_fields=True):
    """What the other machine calls this one by; empty = as this machine finds out itself."""

    address: Annotated[str, Meta(max_length=255)] = ""


class RevokeWish(msgspec.Struct, forbid_unknown_fields=True):
    """The machine that is not to be served any more, by the name in its certificate."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]


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
    given = await body(request)
    wish = convert(decoded(given), PairWish) if given else PairWish()
    try:
        return as_json(await request.app[DOCUMENTS].pair(wish.address.strip()))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting") from e


async def _revoke(request: web.Request) -> web.Response:
    """POST /disco/v1/partner/revoke: Refuse a machine from now on, `{name}`; its link is closed at once."""
    wish = convert(decoded(await body(request)), RevokeWish)
    try:
        return as_json(await request.app[DOCUMENTS].revoke(wish.name))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting", param="name") from e
