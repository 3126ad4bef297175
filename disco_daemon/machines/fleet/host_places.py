"""Where a fleet's hosts are: this machine, or another one that lends a host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...link.relay.handshake import SegmentFact, TellLoad
from ...types import LayerRange

RangePath = tuple[LayerRange, Path]


@dataclass(eq=False, slots=True)
class LentLife:
    """One life of a host that another machine lends: its socket is the engine's once it is taken."""

    machine: str
    number: int
    llama: str
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        """Whether its connection is known to have ended."""
        return self.over.is_set()


@dataclass(frozen=True, slots=True)
class LentMachine:
    """What is known of a machine that lends a host: what its owner allows, and what it has said of itself of late.

    `memory_bytes` 0 = as much as it has. While it is `stood_in` for, a process of this machine computes its layers.
    """

    name: str
    n_threads: int
    memory_bytes: int
    said: TellLoad | None = None
    stood_in: bool = False


class Borrower(Protocol):
    """The hosts of one engine, as those who lend some need them."""

    def files_of(self, place: int) -> Sequence[RangePath]:
        """Return the layers that the machine at a place has, and those that are to come to it, with their files."""
        ...

    def keeps(self, place: int) -> bool:
        """Whether the machine at a place has layers, also when the move that is under way has ended."""
        ...

    def stay_here(self) -> None:
        """Borrow nothing any more: what this engine computes from now on is private."""
        ...

    def machine_is_there(self, place: int) -> None:
        """Take a host of another machine from now on, where a process of this one stands in for it."""
        ...


class Lenders(Protocol):
    """The other machines, as the hosts of an engine need them."""

    def borrow_for(self, borrower: Borrower) -> None:
        """Lend hosts to an engine that is being started. Idempotent."""
        ...

    def end(self, borrower: Borrower) -> None:
        """The engine has gone; idempotent."""
        ...

    async def take(self, place: int, names: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        """Return a host of the machine at a place, if it is there and has the files; waits for a moment."""
        ...

    async def stage(self, place: int, names: Collection[str]) -> None:
        """Let the machine at a place fetch these files; return when it has them. Raises OSError if it does not."""
        ...

    def machine_at(self, place: int) -> LentMachine | None:
        """Return what is known of the machine at a place; None if it is not there."""
        ...

    def name_of(self, place: int) -> str:
        """Return the name of the machine at a place; "" if there is none."""
        ...

    def is_there(self, place: int) -> bool:
        """Whether the machine at a place would lend a host now."""
        ...


def files_of(borrowers: Sequence[Borrower], place: int | None) -> dict[SegmentFact, Path]:
    """Return the layers of a machine in whichever engine runs, in order, with their files."""
    found = {
        SegmentFact(layers.first, layers.last, path.name): path
        for borrower in (borrowers if place is not None else ())
        for layers, path in borrower.files_of(place or 0)
    }
    return dict(sorted(found.items(), key=lambda one: (one[0].first, one[0].last, one[0].name)))
