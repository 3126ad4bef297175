"""Checks of the daemon's port: whether it is free or a daemon's, and which users may connect."""

from __future__ import annotations

import errno
import http.client
import socket
import sys
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ...client import once as client
from ...config.schema import Api
from ...errors import DiscoError
from ...onboarding.asking import within
from ...plain import reason_of
from ...system.net import is_loopback
from .finding import Finding, ok, warn, wrong

DAEMON_TIMEOUT_S = 5.0  # the running daemon's answer to one check of `disco doctor`


@dataclass(frozen=True, slots=True)
class Listener:
    """The holder of the daemon's port: none (`free`), a daemon (its `state`), or another program (`problem`)."""

    free: bool = False
    state: dict[str, Any] | None = None
    problem: str = ""


def listener(api: Api) -> Listener:
    """Try to listen; if the port is taken, ask the program that has it. No other machine is asked."""
    try:
        # A name would be looked up in the network; "localhost" is known here.
        flags = 0 if is_loopback(api.host) else socket.AI_NUMERICHOST
        family, kind, _, _, address = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM, flags=flags)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
        return Listener(free=True)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            return Listener(problem=reason_of(e))
    root = client.base_url(client.reachable(api.host), api.port)
    try:
        state = within(DAEMON_TIMEOUT_S, lambda: client.get(root, "/disco/v1/state", api.control_key or api.key))
    except (DiscoError, OSError, ValueError, http.client.HTTPException) as e:
        return Listener(problem=reason_of(e))
    is_ours = isinstance(state, dict) and "version" in state and "endpoints" in state
    return Listener(state=state) if is_ours else Listener(problem="it is no disco daemon")


def port(api: Api, found: Listener) -> Finding:
    """Check whether the daemon can listen, or does."""
    name, where = "port", f"{api.host}:{api.port}"
    if found.state is not None:
        text = f"a disco daemon {found.state['version']} listens on {where}"
        if found.state["version"] != __version__:
            return warn(name, f"{text}; this is {__version__}", "restart it")
        return ok(name, text)
    if found.free:
        return ok(name, f"{where} is free, no daemon runs" if api.port else "a free one is taken at each start")
    mend = "`disco config set api.port N` with another one, or stop what listens there"
    return wrong(name, f"{where} cannot be used: {found.problem}", mend)


def users(api: Api, *, is_reported: bool, platform: str = sys.platform) -> Finding:
    """Check which other users may ask; `is_reported`: whether the system reports the owner of a connection."""
    name = "other users"
    if api.key:
        return ok(name, "need api.key, as everybody")
    if api.any_user:
        return ok(name, "may ask without a key (api.any_user)", "`disco config set api.any_user false` keeps them out")
    if is_reported:
        return ok(name, "are kept out", "`disco config set api.key SECRET` lets those in who send it")
    if platform.startswith("linux"):
        found = "this system does not say whose a connection is: nobody is let in, you included"
        return wrong(name, found, "`disco config set api.key SECRET`, or `disco config set api.any_user true`")
    mend = "`disco config set api.key SECRET`, if others use it and should be kept out"
    return ok(name, "may ask: this system does not say whose a connection is", mend)
