"""What routes of a partner and of a fleet's home have in common: codes for machines that join, and names of those."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from ...errors import ConfigError, RequestError
from ..http.bodies import convert, decoded
from ..http.connections import body
from .documents import as_json


class PairWish(msgspec.Struct, forbid_unknown_fields=True):
    """What the other machine calls this one by; empty = as this machine finds out itself."""

    address: Annotated[str, Meta(max_length=255)] = ""


class RevokeWish(msgspec.Struct, forbid_unknown_fields=True):
    """The machine that is not to be served any more, by the name in its certificate."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]


async def code_made(request: web.Request, make: Callable[[str], Awaitable[dict[str, Any]]]) -> web.Response:
    """Return the code that `make` makes, with the address that the request may name. Raises RequestError."""
    given = await body(request)
    wish = convert(decoded(given), PairWish) if given else PairWish()
    try:
        return as_json(await make(wish.address.strip()))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting") from e


async def revoked(request: web.Request, revoke: Callable[[str], Awaitable[dict[str, Any]]]) -> web.Response:
    """Return what `revoke` says of the machine that the request names. Raises RequestError."""
    wish = convert(decoded(await body(request)), RevokeWish)
    try:
        return as_json(await revoke(wish.name))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting", param="name") from e
