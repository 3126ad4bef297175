"""The two doors of the daemon, and which route is served at which.

The *Unix socket* is the owner's: by the file system only this user can reach it (`socketfile`). Every route is served
there, without a key. *TCP* is for callers, and any process of this machine can reach it: it serves answers and state. A
*control*, a route that changes something or shows paths, prompts or places of keys, is served over TCP only with a key:
`api.control_key`, or where that is not set, `api.key`. A key with a name opens what `FOR_KEYS` says, at either door:
what editors and agents need, never a control, and nothing that says what others ask or use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from aiohttp import web

from ..errors import RequestError
from .control.scrape import Handler
from .http.connections import peer_of
from .http.guard import CONFIG, key_of, shows_key
from .http.peers import Whose


class At(Enum):
    """How a route is served over TCP; at the Unix socket all are served."""

    BOTH = "over TCP"
    PLAIN = "over TCP, without paths and places of keys unless the key for controls is shown"
    CONTROL = "over TCP only with the key for controls"


# Every route of the application; one that is missing here is a control.
ROUTES: dict[tuple[str, str], At] = {
    ("POST", "/v1/chat/completions"): At.BOTH,
    ("POST", "/v1/completions"): At.BOTH,
    ("POST", "/v1/embeddings"): At.BOTH,
    ("POST", "/v1/rerank"): At.BOTH,
    ("POST", "/v2/rerank"): At.BOTH,
    ("POST", "/rerank"): At.BOTH,
    ("POST", "/v1/responses"): At.BOTH,
    ("POST", "/v1/responses/input_tokens"): At.BOTH,
    ("POST", "/v1/messages"): At.BOTH,
    ("POST", "/v1/messages/count_tokens"): At.BOTH,
    ("POST", "/infill"): At.BOTH,
    ("POST", "/api/chat"): At.BOTH,
    ("POST", "/api/generate"): At.BOTH,
    ("POST", "/api/embed"): At.BOTH,
    ("POST", "/api/embeddings"): At.BOTH,
    ("GET", "/api/tags"): At.BOTH,
    ("GET", "/api/ps"): At.BOTH,
    ("POST", "/api/show"): At.BOTH,
    ("GET", "/api/version"): At.BOTH,
    ("POST", "/api/pull"): At.CONTROL,  # takes network and disk
    ("POST", "/api/create"): At.BOTH,  # a 501, as those that follow
    ("POST", "/api/push"): At.BOTH,
    ("POST", "/api/copy"): At.BOTH,
    ("DELETE", "/api/delete"): At.BOTH,
    ("POST", "/api/blobs/{digest}"): At.BOTH,
    ("GET", "/v1/models"): At.BOTH,
    ("GET", "/v1/models/{name}"): At.BOTH,
    ("GET", "/"): At.BOTH,
    ("GET", "/openapi.json"): At.BOTH,
    ("GET", "/health"): At.BOTH,
    ("GET", "/metrics"): At.BOTH,
    ("GET", "/disco/v1/state"): At.PLAIN,
    ("GET", "/disco/v1/trace/{request_id}"): At.PLAIN,
    ("GET", "/disco/v1/providers"): At.PLAIN,
    ("GET", "/disco/v1/ledger"): At.BOTH,
    ("GET", "/disco/v1/plan"): At.BOTH,
    ("GET", "/disco/v1/whatif"): At.BOTH,
    ("POST", "/disco/v1/answers/{request_id}"): At.BOTH,  # the id of an answer is enough to pace it
    ("GET", "/disco/v1/history"): At.CONTROL,  # may hold prompts
    ("GET", "/disco/v1/settings"): At.CONTROL,  # names paths, and where keys are
    ("PATCH", "/disco/v1/settings"): At.CONTROL,
    ("POST", "/disco/v1/reload"): At.CONTROL,
    ("POST", "/disco/v1/server/check"): At.CONTROL,
    ("PUT", "/disco/v1/server"): At.CONTROL,
    ("PUT", "/disco/v1/device"): At.CONTROL,
    ("GET", "/disco/v1/offers"): At.CONTROL,  # measures for some seconds
    ("POST", "/disco/v1/fetch"): At.CONTROL,
    ("DELETE", "/disco/v1/fetch"): At.CONTROL,
    ("GET", "/disco/v1/fleet"): At.CONTROL,  # names the user's machines
    ("POST", "/disco/v1/fleet/pause"): At.CONTROL,
    ("POST", "/disco/v1/fleet/resume"): At.CONTROL,
    ("POST", "/disco/v1/fleet/drain"): At.CONTROL,
    ("GET", "/disco/v1/fleet/members"): At.CONTROL,
    ("POST", "/disco/v1/fleet/new"): At.CONTROL,
    ("POST", "/disco/v1/fleet/revoke"): At.CONTROL,
    ("GET", "/disco/v1/partner"): At.CONTROL,  # names the user's machines, and where they are
    ("POST", "/disco/v1/partner/pair"): At.CONTROL,
    ("POST", "/disco/v1/partner/revoke"): At.CONTROL,
    ("GET", "/disco/v1/keys"): At.CONTROL,
    ("POST", "/disco/v1/keys"): At.CONTROL,
    ("POST", "/disco/v1/keys/change"): At.CONTROL,
    ("POST", "/disco/v1/keys/revoke"): At.CONTROL,
    ("POST", "/disco/v1/history/outdone"): At.CONTROL,  # what is learned of it moves the owner's money
    ("GET", "/disco/v1/usage/own"): At.BOTH,  # of the key that is shown
    ("GET", "/disco/v1/usage"): At.CONTROL,  # names those who have keys
}


class ForKey(Enum):
    """What a key with a name gets of a route, at either door."""

    TERMS = "as far as it may ask"
    OWN = "of its own answers alone"
    ITSELF = "of itself alone"
    PART = "without what others ask or use"
    SAME = "as anybody, since it says nothing of anybody"


_ASKED = """
    /v1/chat/completions /v1/completions /v1/embeddings /v1/rerank /v2/rerank /rerank /v1/responses
    /v1/responses/input_tokens /v1/messages /v1/messages/count_tokens /infill /api/chat /api/generate /api/embed
    /api/embeddings /api/show
"""
# Every route that a key with a name opens; one that is missing here it does not.
FOR_KEYS: dict[tuple[str, str], ForKey] = {
    **{("POST", path): ForKey.TERMS for path in _ASKED.split()},
    **{("GET", path): ForKey.TERMS for path in ("/api/tags", "/api/ps", "/v1/models", "/v1/models/{name}")},
    ("GET", "/disco/v1/trace/{request_id}"): ForKey.OWN,
    ("POST", "/disco/v1/answers/{request_id}"): ForKey.OWN,
    ("GET", "/disco/v1/usage/own"): ForKey.ITSELF,
    ("GET", "/disco/v1/state"): ForKey.PART,
    **{("GET", path): ForKey.SAME for path in ("/", "/health", "/openapi.json", "/api/version")},
    **{("POST", f"/api/{verb}"): ForKey.SAME for verb in ("create", "push", "copy", "blobs/{digest}")},
    ("DELETE", "/api/delete"): ForKey.SAME,
}


@dataclass(slots=True)
class UnixDoor:
    """The Unix socket: its path, once it is open."""

    path: str = ""


DOOR = web.AppKey("door", UnixDoor)


def may_control(request: web.Request) -> bool:
    """Whether a request may use the controls."""
    if key_of(request) is not None:
        return False
    if peer_of(request).whose is Whose.DOOR:
        return True
    config = request.app[CONFIG]
    key = config.control_key or config.key
    return bool(key) and shows_key(request, key)


def sees_keys(request: web.Request) -> bool:
    """Whether a request may see who has keys and what each has used, where it need not use the controls.

    Where no key is asked for, that is each program of the daemon's own user.
    """
    if may_control(request):
        return True
    is_ours = peer_of(request).whose is Whose.OURS and not request.app[CONFIG].asks_key
    return is_ours and key_of(request) is None


def route_of(request: web.Request) -> tuple[str, str] | None:
    """Return the requested route as the tables have it; None for an unknown one, also by its method."""
    route = request.match_info.route
    if request.match_info.http_exception is not None or route.resource is None:
        return None
    return "GET" if request.method == "HEAD" else request.method, route.resource.canonical


@web.middleware
async def check_control(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a control to everybody but the owner, and more to a key with a name. Raises RequestError."""
    route = route_of(request)  # an unknown one answers so at both doors
    if route is not None and ROUTES.get(route, At.CONTROL) is At.CONTROL and not may_control(request):
        raise RequestError(_where(request), status=403, code="control")
    if route is not None and route not in FOR_KEYS and (key := key_of(request)) is not None:
        msg = (
            f"The key '{key.name}' does not open {request.method} {request.path}: a key with a name opens what asks "
            "models, and nothing that says what others ask or use."
        )
        raise RequestError(msg, status=403, code="control")
    return await handler(request)


def _where(request: web.Request) -> str:
    """Return the error for a refused control, with the way to it."""
    config, path = request.app[CONFIG], request.app[DOOR].path
    name = "api.control_key" if config.control_key else "api.key"
    key = f"with {name} as the API key" if config.control_key or config.key else f"where {name} is set, with that key"
    if (named := key_of(request)) is not None:
        return f"{request.method} {request.path} is a control, which a key with a name ('{named.name}') does not open."
    here = f"at the Unix socket {path} (`disco` and its terminal UI use it), and " if path else ""
    return f"{request.method} {request.path} is a control: it is served {here}over TCP only {key}."


# --- what is told at the open door ------------------------------------------------------------------------------------

# Folders before a name, from a root or a home to the last slash. A folder may contain blanks, so words between two
# paths are removed, too: better than to show a part of a path.
_FOLDERS = re.compile(r"(?<![\w.:/])~?/(?=\S)(?:[^/\n\"'`:;,()<>]*/)*")


def fit(request: web.Request, payload: Any) -> Any:
    """Return a document as the client of a request may see it, by where its route is served."""
    return payload if may_control(request) else without_paths(msgspec.to_builtins(payload))


# Of the state what holds whoever asks. Sums, counts, errors and what was learned are of others' requests as well.
_OF_STATE = ("version", "uptime_s", "policy", "private")
_OF_ENDPOINT = ("kind", "model", "state")


def state_for_key(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a key with a name may see of the daemon's state."""
    endpoints = {
        side: {name: status[name] for name in _OF_ENDPOINT if name in status}
        for side, status in state["endpoints"].items()
    }
    return {name: state[name] for name in _OF_STATE} | {"endpoints": endpoints}


def without_paths(payload: Any) -> Any:
    """Return a document with the names of files in place of their paths."""
    if isinstance(payload, str):
        return _FOLDERS.sub("", payload) if "/" in payload else payload
    if isinstance(payload, dict):
        return {key: without_paths(value) for key, value in payload.items()}
    if isinstance(payload, list):
        return [without_paths(value) for value in payload]
    return payload
