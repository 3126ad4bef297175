"""What a lent host hears from the program that lends it; it asks that for files by a SegmentFact. Pure."""

from __future__ import annotations

import msgspec


class HostTerms(msgspec.Struct, tag=True, frozen=True):
    """What the owner allows from now on; `memory_bytes` 0 = as much as there is."""

    n_threads: int
    memory_bytes: int = 0


class FileAnswer(msgspec.Struct, tag=True, frozen=True):
    """The file that was asked for is there, or why it is `missing`."""

    missing: str = ""


from_lender = msgspec.msgpack.Decoder(HostTerms | FileAnswer)
