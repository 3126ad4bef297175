"""Routes for the owner of a machine that others join: who has, a code for one more, and who may no more, by role."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from ...link.trust.roles import Role
from ..http.bodies import convert, decoded
from ..http.connections import body
from .documents import DOCUMENTS, as_json, settings_at_fault


class PairWish(msgspec.Struct, forbid_unknown_fields=True):
    """What the other machine calls this one by; empty = as this machine finds out itself."""

    address: Annotated[str, Meta(max_length=255)] = ""


class RevokeWish(msgspec.Struct, forbid_unknown_fields=True):
    """The machine that is not to be served any more, by the name in its certificate."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/partner", _partner)
    app.router.add_post("/disco/v1/partner/pair", _pair_to_split)
    app.router.add_post("/disco/v1/partner/revoke", _revoke_of_split)
    app.router.add_get("/disco/v1/fleet/members", _members)
    app.router.add_post("/disco/v1/fleet/new", _pair_to_lend)
    app.router.add_post("/disco/v1/fleet/revoke", _revoke_of_fleet)


async def _partner(request: web.Request) -> web.Response:
    """GET /disco/v1/partner: List the machines that this one computes upper layers for, and how the link is."""
    return await _listed(request, Role.SPLIT)


async def _members(request: web.Request) -> web.Response:
    """GET /disco/v1/fleet/members: List the machines that have joined the fleet, and whether each lends a host now."""
    return await _listed(request, Role.FLEET)


async def _pair_to_split(request: web.Request) -> web.Response:
    """POST /disco/v1/partner/pair: Make a code for one other machine, `{address?}`; turns `partner.enabled` on."""
    return await _code_made(request, Role.SPLIT)


async def _pair_to_lend(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/new: Make a code for one machine, `{address?}`; makes the device a fleet."""
    return await _code_made(request, Role.FLEET)


async def _revoke_of_split(request: web.Request) -> web.Response:
    """POST /disco/v1/partner/revoke: Refuse a machine from now on, `{name}`; its link is closed at once."""
    return await _revoked(request, Role.SPLIT)


async def _revoke_of_fleet(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/revoke: Refuse a machine of the fleet from now on, `{name}`; its host is cut off at once."""
    return await _revoked(request, Role.FLEET)


async def _listed(request: web.Request, role: Role) -> web.Response:
    return as_json(await asyncio.to_thread(request.app[DOCUMENTS].machines, role))


async def _code_made(request: web.Request, role: Role) -> web.Response:
    given = await body(request)
    wish = convert(decoded(given), PairWish) if given else PairWish()
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].new_code(role, wish.address.strip()))


async def _revoked(request: web.Request, role: Role) -> web.Response:
    wish = convert(decoded(await body(request)), RevokeWish)
    with settings_at_fault("name"):
        return as_json(await request.app[DOCUMENTS].revoke(role, wish.name))
