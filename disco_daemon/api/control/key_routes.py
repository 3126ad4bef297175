"""Routes for the owner of keys with names: which there are, one more, other terms, one less, and what was used."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from ...errors import RequestError
from ...keys.named_key import MOST_MODELS, MOST_PER_MINUTE, KeyTerms, Pattern, Usd
from ..http.bodies import convert, decoded
from ..http.connections import body
from ..http.guard import key_of
from .documents import DOCUMENTS, By, as_json, number, settings_at_fault

USAGE: tuple[By, ...] = ("key", "model", "server", "day")
Name = Annotated[str, Meta(min_length=1, max_length=64)]


class KeyWish(KeyTerms, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to be made: its name, and what it may."""

    name: Name


class KeyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key may from now on; null is no limit, and what is left out stays."""

    name: Name
    usd_per_day: Usd | UnsetType | None = UNSET
    usd_per_month: Usd | UnsetType | None = UNSET
    requests_per_minute: Annotated[int, Meta(ge=1, le=MOST_PER_MINUTE)] | UnsetType | None = UNSET
    models: Annotated[tuple[Pattern, ...], Meta(max_length=MOST_MODELS)] | UnsetType = UNSET
    private: bool | UnsetType = UNSET


class KeyEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key that is to be revoked."""

    name: Name


def add_routes(app: web.Application) -> None:
    """Add the routes; `documents.DOCUMENTS` stands behind them."""
    app.router.add_get("/disco/v1/keys", _keys)
    app.router.add_post("/disco/v1/keys", _add)
    app.router.add_post("/disco/v1/keys/change", _change)
    app.router.add_post("/disco/v1/keys/revoke", _revoke)
    app.router.add_get("/disco/v1/usage", _usage)
    app.router.add_get("/disco/v1/usage/own", _own_usage)


async def _keys(request: web.Request) -> web.Response:
    """GET /disco/v1/keys: List the keys with names, what they may and what they have spent; no secrets."""
    with settings_at_fault():
        return as_json({"data": await request.app[DOCUMENTS].keys()})


async def _add(request: web.Request) -> web.Response:
    """POST /disco/v1/keys: Make a key, `{name, usd_per_day?, models?, …}`; `key` of the answer is told this once."""
    wish = convert(decoded(await body(request)), KeyWish)
    terms = KeyTerms(**{field: getattr(wish, field) for field in KeyTerms.__struct_fields__})
    with settings_at_fault("name"):
        return as_json(await request.app[DOCUMENTS].add_key(wish.name, terms))


async def _change(request: web.Request) -> web.Response:
    """POST /disco/v1/keys/change: Give a key other terms, `{name, usd_per_day?, …}`, from the next request on."""
    wish = convert(decoded(await body(request)), KeyChange)
    changes: dict[str, Any] = {
        field: value for field in KeyTerms.__struct_fields__ if (value := getattr(wish, field)) is not UNSET
    }
    if not changes:
        raise RequestError("Nothing to change: give limits, such as 'usd_per_day'.")
    with settings_at_fault("name"):
        return as_json(await request.app[DOCUMENTS].change_key(wish.name, changes))


async def _revoke(request: web.Request) -> web.Response:
    """POST /disco/v1/keys/revoke: Let a key in no more, `{name}`; what runs for it ends at once."""
    wish = convert(decoded(await body(request)), KeyEnd)
    with settings_at_fault("name"):
        return as_json(await request.app[DOCUMENTS].revoke_key(wish.name))


async def _usage(request: web.Request) -> web.Response:
    """GET /disco/v1/usage: Return what was used, `?by=key&days=31`, by `key`, `model`, `server` or `day`."""
    by = next((one for one in USAGE if one == request.query.get("by", "key")), None)
    if by is None:
        raise RequestError(f"by must be one of: {', '.join(USAGE)}", param="by")
    rows = await asyncio.to_thread(request.app[DOCUMENTS].usage, by, number(request, "days", 31))
    return as_json({"data": rows})


async def _own_usage(request: web.Request) -> web.Response:
    """GET /disco/v1/usage/own: Return what the key of this request may, has spent and uses a day; `?days=31`."""
    if (key := key_of(request)) is None:
        raise RequestError("This is for keys with names: show one. GET /disco/v1/usage has what all have used.")
    return as_json(await request.app[DOCUMENTS].usage_of_key(key.name, number(request, "days", 31)))
