"""Routes for the owner of a fleet: how it is, how it is steered, and which machines lend it hosts."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from ...errors import ConfigError, RequestError
from ..http.bodies import convert, decoded
from ..http.connections import body
from .documents import DOCUMENTS, as_json
from .member_routes import code_made, revoked


class DrainWish(msgspec.Struct, forbid_unknown_fields=True):
    """The host that all layers are to leave, by its name in `disco fleet status`."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/fleet", _fleet)
    app.router.add_post("/disco/v1/fleet/pause", _pause)
    app.router.add_post("/disco/v1/fleet/resume", _resume)
    app.router.add_post("/disco/v1/fleet/drain", _drain)
    app.router.add_get("/disco/v1/fleet/members", _members)
    app.router.add_post("/disco/v1/fleet/new", _new)
    app.router.add_post("/disco/v1/fleet/revoke", _revoke)


async def _fleet(request: web.Request) -> web.Response:
    """GET /disco/v1/fleet: Return which hosts compute which layers of the device's model, and how they are."""
    return as_json(request.app[DOCUMENTS].fleet())


async def _pause(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/pause: Let no layers move by themselves; answers go on."""
    return _steered(request, "pause")


async def _resume(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/resume: Let layers move by themselves again, also to hosts that were drained."""
    return _steered(request, "resume")


async def _drain(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/drain: Move all layers off a host, `{host}`, and none there until it is resumed."""
    return _steered(request, "drain", convert(decoded(await body(request)), DrainWish).host)


def _steered(request: web.Request, order: str, host: str = "") -> web.Response:
    try:
        return as_json(request.app[DOCUMENTS].steer_fleet(order, host))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting", param="host" if host else None) from e


async def _members(request: web.Request) -> web.Response:
    """GET /disco/v1/fleet/members: List the machines that have joined the fleet, and whether each lends a host now."""
    return as_json(await asyncio.to_thread(request.app[DOCUMENTS].fleet_members))


async def _new(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/new: Make a code for one machine, `{address?}`; makes the device a fleet."""
    return await code_made(request, request.app[DOCUMENTS].new_machine)


async def _revoke(request: web.Request) -> web.Response:
    """POST /disco/v1/fleet/revoke: Refuse a machine of the fleet from now on, `{name}`; its host is cut off at once."""
    return await revoked(request, request.app[DOCUMENTS].revoke_machine)
