"""Pages and desktop apps that may ask from an origin of their own, and what their browser is told of it (CORS).

A grant holds for the routes of answers alone: of the daemon's own routes a page of another origin may read nothing. It
names one origin that was asked for and found in `api.origins`, never a wildcard, and no cookies: there are none.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

from aiohttp import hdrs, web

READABLE = ("/v1/", "/api/")  # what a path begins with that may be read from another origin
SCHEME_END = "://"  # what a scheme in `api.origins` ends with
LOCAL_FILE = "file://"  # in `api.origins`: pages that are files, whichever way their browser says it
OPAQUE = "null"  # a page without an origin: of a file in most browsers, but also of any page's sandboxed frame
MAX_AGE_S = 600  # for which a browser need not ask again; each request is judged by itself all the same
MAX_NAMES = 1000  # characters of the header names that a browser asks for
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/,*]*", re.ASCII)
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_GRANTED = web.RequestKey("granted", str)


def lets_in(origin: str, origins: AbstractSet[str]) -> bool:
    """Whether an origin is one of these, each a whole one, or a scheme (`app://`) for all that have it."""
    found = _ORIGIN.fullmatch(origin)
    return found is not None and (origin in origins or found[1] in origins)


def is_anybodys(origin: str) -> bool:
    """Whether an origin is that of files, those that were downloaded too, or of a page which hides its own.

    Most browsers say `null` for a file; some, and apps made with one, say `file://`.
    """
    return origin == OPAQUE or origin.startswith(LOCAL_FILE)


def is_readable(request: web.Request) -> bool:
    """Whether a request is for what pages of other origins may read, if they are let in."""
    return request.path.startswith(READABLE)


def is_preflight(request: web.Request) -> bool:
    """Whether it is a browser's question whether a page may ask; it shows no key."""
    return request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers


def grant(request: web.Request, origin: str) -> None:
    """Let pages of this origin read the response."""
    request[_GRANTED] = origin


def is_granted(request: web.Request) -> bool:
    """Whether pages of the request's origin may read the response."""
    return _GRANTED in request


def preflight(request: web.Request) -> web.Response:
    """Return the answer to a preflight of an origin that is let in; `tell` adds the origin."""
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
        hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
    }
    names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    if len(names) <= MAX_NAMES and _NAMES.fullmatch(names):  # each client has its own (x-stainless-…), none is a danger
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


async def tell(request: web.Request, response: web.StreamResponse) -> None:
    """Tell a browser whether the page may read this response, also an error, and caches that it depends on that."""
    if not is_readable(request):
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if is_granted(request):
        ours = [name for name in response.headers if name.startswith("X-Disco-") or name == hdrs.RETRY_AFTER]
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request[_GRANTED]
        if ours and request.method != hdrs.METH_OPTIONS:
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(ours)
