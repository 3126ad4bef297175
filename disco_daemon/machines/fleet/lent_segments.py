"""The segments on a machine that lends hosts: fetched from home as it names them, the oldest removed for room."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from pathlib import Path

from ...link.relay.handshake import SegmentFact, is_segment_name
from ...link.relay.join import fetch
from ...link.trust.pairing import PairedPartner
from ...link.trust.pairing_code import PairingError

CACHE_BYTES = 64 << 30  # of segments on disk, as at home; those that home named last are kept


class LentSegments:
    """The files in `folder`, of which those in `needed` stay; `say` gets a line for the user."""

    def __init__(self, home: PairedPartner, folder: Path, say: Callable[[str], None]) -> None:
        self._home, self._folder, self._say = home, folder, say
        self._fetching = asyncio.Lock()
        self.needed = frozenset[str]()  # those that home named last

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that are there."""
        return tuple(sorted(path.name for path in self._folder.glob("*.gguf")))

    async def have(self, fact: SegmentFact) -> None:
        """Fetch a segment that is not there. Raises PairingError."""
        if not is_segment_name(fact.name):
            raise PairingError("no_file", f"{fact.name[:60]!r} is no name of a segment's file")
        path = self._folder / fact.name
        async with self._fetching:
            if path.is_file():
                os.utime(path)
                return
            self._say(f"fetching layers {fact.first}-{fact.last} from {self._home.name}")
            needed = self.needed | {fact.name}
            self.prune(needed)
            most = max(0, CACHE_BYTES - sum(_used(path) for path in self._all() if path.name in needed))
            await fetch(self._home, fact.last, path, first=fact.first, most_bytes=most)  # whatever home says of it

    def prune(self, needed: Collection[str]) -> None:
        """Remove segments that were not used for longest, beyond what may be kept, and parts of unneeded ones."""
        for path in (*self._folder.glob(".*.part"), *self._folder.glob(".*.sum")):
            if path.stem.removeprefix(".") not in needed:
                path.unlink(missing_ok=True)
        kept = sorted(self._all(), key=lambda path: path.stat().st_mtime)
        used = sum(map(_used, kept))
        for path in kept:
            if used <= CACHE_BYTES:
                break
            if path.name not in needed:
                used -= _used(path)
                path.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        return list(self._folder.glob("*.gguf"))


def _used(path: Path) -> int:
    """Return the bytes that a file takes on disk."""
    return path.stat().st_blocks * 512
