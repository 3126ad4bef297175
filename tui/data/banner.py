"""The banner: one line about what is wrong and the next step, made of the daemon's state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disco_daemon.client.amounts import amount_of
from disco_daemon.client.offers import fetch_words, stand_in_words
from disco_daemon.client.once import NOT_OURS, NOT_RUNNING, REFUSED_KEY, DaemonError
from disco_daemon.client.side_health import LASTING, side_health
from disco_daemon.plain import one_line

Json = Mapping[str, Any]
MAX_TEXT = 500  # characters; three lines of a wide window


@dataclass(frozen=True, slots=True)
class Banner:
    """One line of plain text; `startable` if this machine could run the daemon."""

    text: str
    startable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", one_line(self.text, MAX_TEXT))


def of_error(error: DaemonError, root: str, *, here: bool) -> Banner:
    """Say why the daemon does not answer. `here`: it would run on this machine."""
    if error.code == REFUSED_KEY:
        return Banner(
            f"The daemon at {root} refuses the key: `disco config set api.key KEY` sets it, then start again."
        )
    if error.code == NOT_OURS:
        return Banner(f"Somebody else is at {root}: {error}")
    if error.code != NOT_RUNNING:
        return Banner(f"The daemon at {root} is in trouble: {error}")
    step = "F9 starts one for as long as this window is open." if here else "start it there with `disco up`."
    return Banner(f"No daemon at {root}: {step}", startable=here)


def of_state(state: Json) -> Banner | None:
    """Say the worst that is wrong with a daemon that answers; None if all is well."""
    endpoints, caps = state.get("endpoints") or {}, (state.get("money") or {}).get("caps") or {}
    if state.get("private"):  # no question goes to the server, whatever its state
        endpoints = {side: state for side, state in endpoints.items() if side == "device"}
        caps = {name: cap for name, cap in caps.items() if not name.startswith("usd")}
    split = state.get("split") or {}
    found = _cap(caps, alone=len(endpoints) == 1) or _device(endpoints) or _partner(split, endpoints)
    found = found or _server(endpoints) or _fetch(state.get("fetch"))
    return None if found is None else Banner(found)


def welcome(state: Json) -> Banner | None:
    """Return the first steps if nothing is configured; None if a server takes part."""
    if "server" in (state.get("endpoints") or {}):
        return None
    if words := stand_in_words(state):
        return Banner(f"{words} F5 gets a real model, or a server; F1 shows all keys; Escape hides this.")
    who = "This machine and its partner answer without a server" if state.get("split") else "This machine answers alone"
    return Banner(f"{who} so far. F5 adds a server; F1 shows all keys; Escape hides this.")


def _cap(caps: Json, *, alone: bool) -> str | None:
    for name, cap in caps.items():
        if cap["limit"] is not None and cap["spent"] >= cap["limit"]:
            used = " of ".join(amount_of(cap[name], cap["unit"]) for name in ("spent", "limit"))
            then = "nobody is left to answer" if alone else "the other side answers"
            return f"Cap {name} is reached ({used}): {then}. F3 changes caps."
    return None


def _device(endpoints: Json) -> str | None:
    device = endpoints.get("device")
    if device is None:
        return None
    alone = "" if "server" in endpoints else " Questions wait for it."
    state = device.get("state")
    if state == "loading":
        return f"The model {device.get('model', '')} is being loaded.{alone}"
    if state in ("failed", "restarting"):
        why = f" ({_short(device['last_error'])})" if device.get("last_error") else ""
        other = "the server answers." if "server" in endpoints else "`disco doctor` looks for the cause."
        return f"This machine's model {'has failed' if state == 'failed' else 'is restarting'}{why}: {other}"
    return None


def _partner(split: Json, endpoints: Json) -> str | None:
    if not split or split.get("state") == "up":
        return None
    why = f" ({_short(split['error'])})" if split.get("error") else ""
    other = "the server answers." if "server" in endpoints else "`disco doctor` looks for the cause."
    return f"No link to {split.get('partner', 'the partner')}, which has the upper layers{why}: {other}"


def _server(endpoints: Json) -> str | None:
    server = endpoints.get("server")
    if server is None:
        return None
    why = f" ({_short(server['last_error'])})" if server.get("last_error") else ""
    other = "this machine answers." if "device" in endpoints else "`disco doctor` looks for the cause."
    if (server.get("failing") or {}).get("reason") in LASTING:
        return f"The server: {side_health(server).lasting}; {other} F5 sets it up anew."
    return f"The server: {side_health(server).lasting}{why}; {other}" if server.get("down_s") else None


def _fetch(fetch: Json | None) -> str | None:
    return fetch_words(fetch) if fetch and fetch["state"] in ("fetching", "loading") else None


def _short(text: str, limit: int = 80) -> str:
    return one_line(str(text), limit - 1)
