"""Routes for the owner of a fleet: how it is, and how it is steered."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from ..http.bodies import convert, decoded
from ..http.connections import body
from .documents import DOCUMENTS, as_json, settings_at_fault


class DrainWish(msgspec.Struct, forbid_unknown_fields=True):
    """The host that all layers are to leave, by its name in `disco fleet status`."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/fleet", _fleet)
    app.router.add_post("/disco/v1/fleet/pause", _pause)
    app.router.add_post("/disco/v1/fleet/resume", _resume)
    app.router.add_post("/disco/v1/fleet/drain", _drain)


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
    with settings_at_fault("host" if host else None):
        return as_json(request.app[DOCUMENTS].steer_fleet(order, host))
