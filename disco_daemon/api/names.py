"""The names that a request may ask for: the daemon's own, the endpoints', and aliases that the settings give."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..conductor import Conductor
from ..errors import RequestError
from ..keys.named_key import NamedKey
from ..plain import ANY, is_like, which
from ..types import BOTH, Side, together

OWN = "disco"  # the daemon decides; the endpoints' own names for it begin so
ADAPTER = f"{OWN}/{Side.DEVICE}:"  # before an adapter's name
LATEST = ":latest"  # the tag that clients of Ollama put behind a name that has none


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model behind a name: `target` is the name that an alias stands for, `sides` may serve it.

    `local` is the one of several models of this machine that it names, "" for the device of the race; `servers` are the
    models of several servers that it names, each `SERVER/MODEL`, () for those that answer for the server side.
    """

    target: str
    sides: frozenset[Side]
    local: str = ""
    servers: tuple[str, ...] = ()

    @property
    def adapter(self) -> str:
        """The adapter that it asks for; "" if it asks for none."""
        return self.target.removeprefix(ADAPTER) if self.target.startswith(ADAPTER) else ""


class ModelNames:
    """All names of a daemon as its present endpoints have them; `aliases` are names and patterns to names.

    A `key` with a name has those alone that it may ask for.
    """

    def __init__(self, conductor: Conductor, aliases: Mapping[str, str], key: NamedKey | None = None) -> None:
        self._conductor, self._aliases, self._key = conductor, aliases, key

    def find(self, name: str) -> NamedModel:
        """Return what a name stands for; an alias goes before an endpoint's own name. Raises RequestError.

        Ollama's `:latest` changes nothing, unless there is a model that is called so.
        """
        target = self._aliased(name)
        sides = _sides(target, self._conductor)
        if not sides and name.endswith(LATEST):
            target = self._aliased(name.removesuffix(LATEST))
            sides = _sides(target, self._conductor)
        if not self._allows(name, target):
            raise self.not_allowed(name)
        if not sides:
            alias = "" if target == name else f" (api.aliases has it for '{name}')"
            near = which(target, self, "GET /v1/models lists all")
            msg = f"The model '{target}' does not exist{alias}{self._why_not(target)}: {near}"
            raise RequestError(msg, status=404, param="model", code="model_not_found")
        return NamedModel(target, sides, _local(target, self._conductor), _servers(target, self._conductor))

    def __iter__(self) -> Iterator[str]:
        """All names, and the patterns as they are set: each can be asked for as it stands."""
        own = _own_names(self._conductor)
        for name in own:
            if self._allows(name, self._aliased(name)):
                yield name
        for alias, target in self._aliases.items():
            is_there = alias not in own and (target in own or _servers(target, self._conductor))
            if is_there and self._allows(alias, target):
                yield alias

    def not_allowed(self, name: str) -> RequestError:
        """Return the error for a model that the key may not ask for."""
        key = self._key.name if self._key is not None else ""
        may = ", ".join(self) or "none that is here now"
        msg = (
            f"The key '{key}' may not ask for the model '{name}', but for: {may}. `disco keys change {key} --models …` "
            "on the machine of the daemon allows others."
        )
        return RequestError(msg, status=403, param="model", code="model_not_allowed")

    def card(self, name: str) -> dict[str, Any]:
        """Return the document of a model. Raises RequestError.

        `created` is the date of the newest model that may answer; lengths and `capabilities` are those of all that may
        together, as far as they are known.
        """
        found, servers = self.find(name), self._conductor.context.servers
        if found.servers and servers is not None and Side.DEVICE not in found.sides & self._here:
            told = {"id": name, "object": "model", "created": 0, "owned_by": found.servers[0].partition("/")[0]}
            alias = {"alias_of": found.target} if found.target != name else {}
            return told | alias | dict(servers.card(found.target)) | {"id": name}
        sides = found.sides & self._here or found.sides
        local = self._conductor.local if found.local else None
        here = self._conductor.endpoints if local is None else local.context(found.local).endpoints
        endpoints = [e for side, e in here.items() if side in sides]
        able = together(endpoint.capabilities for endpoint in endpoints)
        card = {
            "id": name,
            "object": "model",
            "created": int(max((endpoint.known_since for endpoint in endpoints), default=0)),
            "owned_by": "disco",
        }
        if found.target != name:
            card["alias_of"] = found.target
        if local is not None:
            card |= local.about(found.local)
        lengths = {"context_length": able.context_length, "max_output": able.max_output}
        known = {name: length for name, length in lengths.items() if length is not None}
        return card | known | {"capabilities": able.to_json()}

    async def cards(self) -> list[dict[str, Any]]:
        """Return the documents of the models that may be asked for now.

        Those of a key are picked beside the loop: servers have thousands, and a key many patterns.
        """
        cards = [self.card(name) for name in self if self.find(name).sides & self._here]
        servers = self._conductor.context.servers
        if servers is None or Side.SERVER not in self._here:
            return cards
        told = {card["id"] for card in cards}
        offered = [card for card in servers.cards() if card["id"] not in told]
        if self._key is None or not self._key.terms.models:
            return cards + offered
        return cards + await asyncio.to_thread(
            lambda: [card for card in offered if self._allows(card["id"], card["id"])]
        )

    @property
    def _here(self) -> frozenset[Side]:
        """The sides that may be asked now."""
        is_private = self._conductor.context.private or (self._key is not None and self._key.terms.private)
        return frozenset({Side.DEVICE}) if is_private else BOTH

    def _allows(self, name: str, target: str) -> bool:
        """Whether the key may ask for a name, as it stands or by what it stands for."""
        return self._key is None or self._key.terms.allow(name, name.removesuffix(LATEST), target)

    def _aliased(self, name: str) -> str:
        """Return what an alias stands for: the name itself, or the most exact pattern; else the name."""
        if name in self._aliases:
            return self._aliases[name]
        if name == OWN or name.startswith(f"{OWN}/"):
            return name
        fitting = [alias for alias in self._aliases if ANY in alias and is_like(name, alias)]
        best = max(fitting, key=lambda alias: len(alias.replace(ANY, "")), default=None)
        return name if best is None else self._aliases[best]

    def _why_not(self, name: str) -> str:
        device = self._conductor.endpoints.get(Side.DEVICE)
        why = device.adapters.get(name.removeprefix(ADAPTER)) if device is not None else None
        return f" (its adapter was not loaded: {why})" if why else ""


def _sides(name: str, conductor: Conductor) -> frozenset[Side]:
    """Return the endpoints that may serve a name of the daemon's or of an endpoint; none where there is no such name.

    Each request asks for one name, so no table of all is made. `disco/device` means this machine even if the server is
    another disco, whose model has that name. With an adapter's name behind it, it is the device's model with that
    adapter.
    """
    if name == OWN:
        return BOTH
    if _local(name, conductor):
        return frozenset({Side.DEVICE})
    endpoints, here = conductor.endpoints, conductor.endpoints.get(Side.DEVICE)
    if _servers(name, conductor):  # the device keeps its own name, and both may race
        return BOTH if here is not None and here.model == name else frozenset({Side.SERVER})
    for side, endpoint in endpoints.items():
        ours, _, adapter = name.partition(":")
        if ours == f"{OWN}/{side}" and (name == ours or endpoint.adapters.get(adapter) == ""):
            return frozenset({side})
    return frozenset(side for side, endpoint in endpoints.items() if endpoint.model == name)


def _local(name: str, conductor: Conductor) -> str:
    """Return which of several models of this machine a name of ours stands for; "" for none."""
    if conductor.local is None:
        return ""
    ours, _, local = name.partition("/")
    return local if ours == OWN and local in conductor.local.names else ""


def _servers(name: str, conductor: Conductor) -> tuple[str, ...]:
    """Return the models of several servers that a name stands for; () for none."""
    servers = conductor.context.servers
    return () if servers is None or name == OWN or name.startswith(f"{OWN}/") else servers.find(name)


def _own_names(conductor: Conductor) -> list[str]:
    """Return the daemon's names and the endpoints' own, each once."""
    endpoints = conductor.endpoints
    adapters = [f"{OWN}/{side}:{name}" for side, e in endpoints.items() for name, why in e.adapters.items() if not why]
    several = [] if conductor.local is None else [f"{OWN}/{name}" for name in conductor.local.names]
    ours = [OWN, *(f"{OWN}/{side}" for side in endpoints), *adapters, *several]
    return list(dict.fromkeys([*ours, *(endpoint.model for endpoint in endpoints.values())]))
