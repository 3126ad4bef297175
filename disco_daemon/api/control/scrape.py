"""The count of all that is asked over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ...errors import release_frames
from .metrics import Metrics

METRICS = web.AppKey("metrics", Metrics)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answer. What a client did not wait for has none; what no route knows is one handler, `other`."""
    try:
        response = await handler(request)
    except BaseException as e:  # mostly of a client that left; its task keeps it, and with it all that it passed
        release_frames(e)
        raise
    resource = request.match_info.route.resource
    request.app[METRICS].count_request("other" if resource is None else resource.canonical, response.status)
    return response
