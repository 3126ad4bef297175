"""The keys with names of a running daemon: their file, who is let in by them, their caps, and what runs for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..clock import Clock
from ..conductor import Conductor
from ..errors import ConfigError
from ..keys.key_file import KeyFile, Keys
from ..keys.keyring import Keyring
from ..keys.named_key import KeyTerms
from ..money.caps import Caps
from ..store import History
from .money import limits_of_key, make_key_caps

T = TypeVar("T")
log = logging.getLogger("disco.daemon")


class NamedKeys:
    """Owns the `ring`. `caps` are those of the whole, in which each key's stand; `path` is where config.toml is.

    A key that comes in the place of one with its name has what that one has spent: to make another changes no cap.
    """

    def __init__(
        self, path: Path, history: History, clock: Clock, caps: Callable[[], Caps], conductor: Callable[[], Conductor]
    ) -> None:
        self.ring = Keyring()
        self._file, self._history, self._clock = KeyFile(path), history, clock
        self._caps, self._conductor = caps, conductor
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Take up the keys of the file; where it cannot be read the log says so, and nobody is let in by it."""
        try:
            async with self._changing:
                await self._use(await asyncio.to_thread(self._file.read))
        except ConfigError as e:
            log.warning("no key with a name is let in: %s", e)

    async def reload_with(self, other: Callable[[], Awaitable[T]]) -> T:
        """Carry `other` out, and take up what is in the file. Raises ConfigError, and then neither has changed."""
        return await self._whole(self._reload_with(other))

    async def add(self, name: str, terms: KeyTerms) -> dict[str, Any]:
        """Make a key. Raises ConfigError."""
        return await self._whole(self._add(name, terms))

    async def change(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Give a key other terms. Raises ConfigError."""
        return await self._whole(self._change(name, changes))

    async def revoke(self, name: str) -> dict[str, Any]:
        """Forget a key, and end what runs for it; it is let in no more, also where the file cannot be written.

        Raises ConfigError where there is none of that name, or the file may still have it.
        """
        return await self._whole(self._revoke(name))

    async def document(self) -> list[dict[str, Any]]:
        """Return the keys in force, with what each has spent; for the loop, to which the caps belong.

        Raises ConfigError where there is none because the file cannot be read.
        """
        if not len(self.ring):
            await asyncio.to_thread(self._file.read)
        return self.in_force()

    def in_force(self) -> list[dict[str, Any]]:
        """Return the keys in force, with what each has spent, $, and may; quick, and for the loop alone."""
        found, now = [], self._clock.wall()
        for key in self.ring:
            caps = self._caps().keys.get(key.name)
            spent = None if caps is None else caps.spent(now)
            usd = (None, None) if spent is None else (spent.usd_today, spent.usd_this_month)
            found.append(key.document() | {"usd_today": usd[0], "usd_this_month": usd[1]})
        return found

    async def _reload_with(self, other: Callable[[], Awaitable[T]]) -> T:
        async with self._changing:
            keys = await asyncio.to_thread(self._file.read)
            found = await other()
            await self._use(keys)
        return found

    async def _add(self, name: str, terms: KeyTerms) -> dict[str, Any]:
        async with self._changing:
            keys, text = await asyncio.to_thread(self._file.add, name, terms, self._clock.wall())
            await self._use(keys)
        return keys[-1].document() | {"key": text}

    async def _change(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        async with self._changing:
            keys = await asyncio.to_thread(self._file.change, name, changes)
            await self._use(keys)
        return next(key.document() for key in keys if key.name == name)

    async def _revoke(self, name: str) -> dict[str, Any]:
        async with self._changing:
            try:
                n_ended = await self._use(await asyncio.to_thread(self._file.revoke, name))
            except ConfigError as e:
                left = tuple(key for key in self.ring if key.name != name)
                if len(left) == len(self.ring):
                    raise
                n_ended = await self._use(left)
                if self._file.path.exists() and not await asyncio.to_thread(self._lacks, name):
                    msg = f"the key '{name}' is let in no more by this daemon, but the next one may let it in: {e}"
                    raise ConfigError(msg) from e
        return {"revoked": name, "ended": n_ended}

    def _lacks(self, name: str) -> bool:
        """Whether the file can be read, and has no key of that name. Blocks on disk."""
        try:
            return all(key.name != name for key in self._file.read())
        except ConfigError:
            return False

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Carry a change out to its end, also when the client that asked for it leaves: half of one is none."""
        task = asyncio.create_task(change, name="keys")
        self._changes.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait([task])
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # raised in `_whole`, if the client is still there

    async def _use(self, keys: Keys) -> int:
        """Let in by these from now on; return how many requests of others were ended."""
        of_keys = self._caps().keys
        for key in keys:
            if key.name not in of_keys:
                of_keys[key.name] = await asyncio.to_thread(make_key_caps, key, self._history, self._clock)
            of_keys[key.name].set_limits(limits_of_key(key))
        in_flight = self._conductor().in_flight
        gone = self.ring.use(keys)  # in the same turn as the first step of each `revoke`, so that none slips through
        return sum(await asyncio.gather(*(in_flight.revoke(key.caller) for key in gone)))
