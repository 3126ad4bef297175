"""The part of the wire format that is about a fleet: where layers lie, moves of them, and what home and hosts computed.

It is below `wire`, which has all messages; their base is here.
"""

from __future__ import annotations

import msgspec

FLIGHTS = 2  # that home has under way: one is computed at hosts while it draws the tokens of the other


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages."""


class RangeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a model's layers from `first` up to `last` (exclusive) of `of`; `hosts` compute them, 0 is home.

    Where several do, `shares` says which share of the sequences each is to have; without it, all the same.
    """

    path: str
    first: int
    last: int
    of: int
    hosts: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = ()


# --- daemon -> engine ---------------------------------------------------------------------------------------------


class MoveLayers(Message, frozen=True, kw_only=True):
    """Let the layers lie as in `ranges`, whose files are there, while answers go on. Answered by LayersMoved.

    Home's own ranges, the first and the last one, are the present ones. One move is under way at a time.
    """

    id: str
    ranges: tuple[RangeFile, ...]


class BreakOffMove(Message, frozen=True, kw_only=True):
    """End the move that is under way, if there is one: layers lie as before. Its LayersMoved says why."""

    id: str
    reason: str


class LimitAnswers(Message, frozen=True, kw_only=True):
    """Let `n_answers` at most generate at a time; 0 = as many as there is room for. Not answered.

    With `offload` those that wait for that leave the KV cache for main memory.
    """

    id: str
    n_answers: int
    offload: bool = False


# --- engine -> daemon ---------------------------------------------------------------------------------------------


class LayersMoved(Message, frozen=True, kw_only=True):
    """A move has ended, after `seconds` in all; `error` says why nothing was moved, and is empty where it was.

    Loading took `load_s`, s, and from then on copying `copy_s`, s, until hardly more than the latest tokens were left;
    `n_bytes` of the KV cache were copied. For `pause_s`, s, what was to depart was held.
    """

    id: str
    error: str = ""
    seconds: float = 0.0
    load_s: float = 0.0
    copy_s: float = 0.0
    pause_s: float = 0.0
    n_bytes: int = 0


class HostUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A host by its number: rows that it computed since the engine began, for `busy_s`, s, and its lost processes.

    `confined` lists the rights that its present process has given up.
    """

    number: int
    rows: int
    busy_s: float
    lost: int
    confined: tuple[str, ...] = ()


class RunSample(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of a range of layers since the last Stats, `n` of them with `batch` rows each, which took `seconds` in all.

    `host` computed them, 0 is home.
    """

    host: int
    first: int
    last: int
    batch: int
    n: int
    seconds: float


class WaySample(msgspec.Struct, frozen=True, kw_only=True):
    """The quickest way of a flight with so many `rows` to a host and back since the last Stats, without its time there.

    An upper bound of what the way takes: home may have been busy when the rows came.
    """

    host: int
    rows: int
    seconds: float


class FleetUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What home and its hosts computed, and where the inner layers are: from, up to (exclusive), and at which hosts."""

    hosts: tuple[HostUsage, ...]
    samples: tuple[RunSample, ...]
    legs: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    ways: tuple[WaySample, ...] = ()
