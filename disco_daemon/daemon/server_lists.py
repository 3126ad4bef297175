"""The lists of models that several servers tell: asked for in the background, kept, and refreshed now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any

import msgspec

from ..clock import Clock
from ..endpoints import model_facts
from ..endpoints.server_client import ServerClient
from ..endpoints.server_errors import ServerErrors
from ..errors import EndpointError
from ..system.tasks import cancel_all
from ..types import Capabilities, Side

log = logging.getLogger("disco.servers")

REFRESH_S = 21_600.0  # models come and go within days; four looks a day cost nobody anything
RETRY_S = 600.0  # a server that did not tell: it may be away
MAX_NAME = 512  # characters of a model's name; the longest that we know of has 70
MOST_LISTED = 1000  # of one server; the longest list that we know of has some hundred

Told = dict[str, Capabilities]  # what each of a server's models can do, as far as it tells


class ServerLists:
    """Owns the lists of all servers. `clients` gives the connections to one; while it `is_private` none is asked."""

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, str]],
        clients: Callable[[str], ServerClient],
        clock: Clock,
        is_private: Callable[[], bool],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`changed` is awaited when a list has become another one."""
        self._addresses, self._clients, self._clock, self._is_private = addresses, clients, clock, is_private
        self._told: dict[str, Told] = {}
        self._due: dict[str, float] = dict.fromkeys(addresses, -1.0)
        self._asking: asyncio.Task[Told | None] | None = None
        self._changed = changed

    def of(self, server: str) -> Told:
        """Return what a server has told last; nothing before it has."""
        return self._told.get(server, {})

    def take_over(self, before: ServerLists) -> None:
        """Go on with the lists of servers that are the same."""
        for name, address in self._addresses.items():
            if before._addresses.get(name) == address and name in before._told:
                self._told[name], self._due[name] = before._told[name], before._due[name]

    async def run(self) -> None:
        """Ask each server for its list when that is due, until cancelled; one at a time, since nobody waits for it."""
        while True:
            now = self._clock.now()
            for name in [name for name, due in self._due.items() if due <= now]:
                if not self._is_private():
                    await self._ask(name)
            waiting = min(self._due.values(), default=now + REFRESH_S)
            await asyncio.sleep(max(RETRY_S if self._is_private() else 1.0, waiting - self._clock.now()))

    async def stop(self) -> None:
        """End a question that is under way: when this returns, nothing more is sent."""
        if self._asking is not None:
            await cancel_all(self._asking)

    async def _ask(self, name: str) -> None:
        self._asking = asyncio.create_task(self._fetch(name), name=f"models of {name}")
        try:
            await asyncio.wait([self._asking])  # it bounds its own time
        finally:
            await cancel_all(self._asking)
        told = None if self._asking.cancelled() else self._asking.result()
        self._due[name] = self._clock.now() + (RETRY_S if told is None else REFRESH_S)
        if told is not None and told != self._told.get(name):
            self._told[name] = told
            await self._changed()

    async def _fetch(self, name: str) -> Told | None:
        base_url, key = self._addresses[name]
        errors = ServerErrors(Side.SERVER, base_url, key, self._clock)
        try:
            with errors.translate():
                page = await self._clients(name).get(f"{base_url.rstrip('/')}/models")
                return await asyncio.to_thread(listed, page)
        except EndpointError as e:
            log.info("%s does not tell its models: %s", name, e)
            return None


def listed(page: bytes) -> Told:
    """Return the models of a server's list with what it tells of each. Raises msgspec.MsgspecError.

    A name that nobody could type, or that is longer than any, is none.
    """
    found = msgspec.json.decode(page)
    entries: Any = found.get("data") if isinstance(found, dict) else found
    named = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    kept = list(islice((e for e in named if _is_name(e.get("id"))), MOST_LISTED))
    return {e["id"]: model_facts.of_entry(e) for e in kept}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and len(name) <= MAX_NAME and name.isprintable()
