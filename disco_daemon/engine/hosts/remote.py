"""A host as home sees it: a process that may be lost and replaced, and the segments that it has.

A host that is gone is replaced by a new one, which gets the cells of the lost one from the rows that are kept here, and
then the flights that were under way; nothing is drawn there, so no token is lost or doubled.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...types import LayerRange
from ..llama.hidden import FloatRows
from ..llama.sequences import CellSpan
from ..wire import Load
from .cell_memory import CellMemory, SavedCells, SharedCells, bytes_of
from .kept_rows import KeptRows, PutAgain, RowsAgain, ShareAgain
from .link import ASK_S, HostGoneError, HostLink
from .messages import ClearCells, CompactCells, ForgetCells, PutCells, ReleaseSegment, ShareCells, ToHost

OpenHost = Callable[[], socket.socket]  # starts a host's process, and returns the socket to it
MAX_LOST = 3  # processes in a row of one host that are lost with the same flight; then it has failed

Places = Sequence[tuple[int, int]]  # of rows: their positions and sequences


@dataclass(eq=False, slots=True)
class RemoteHost:
    """One host, whichever process it is at present."""

    number: int
    open: OpenHost
    folders: tuple[str, ...]  # of the files of all segments that it will ever have
    n_embd: int
    segments: dict[int, RemoteSegment] = field(default_factory=dict)
    link: HostLink | None = None
    moves_states: bool = True  # what sequences have can be cut by layers, as far as is known
    tried: dict[str, bool] = field(default_factory=dict)  # what our processes of a build have said of that, for all
    beat: Callable[[], None] = lambda: None  # called while home waits for it, and it gets on
    n_lost: int = 0
    n_lost_in_a_row: int = 0  # since it last sent rows
    replaced_s: float = 0.0  # that it took to replace the latest process that was lost
    n_rows: int = 0  # that it computed for flights, in all its lives but the present one
    busy_s: float = 0.0  # that it took to compute them

    @property
    def pid(self) -> int:
        """The present process; 0 if there is none."""
        return 0 if self.link is None else self.link.pid

    @property
    def is_awaited(self) -> bool:
        """Whether a flight is there."""
        return any(segment.air for segment in self.segments.values())

    @property
    def shares_memory(self) -> bool:
        """Whether cells may go to its present process through a common memory."""
        return self.link is not None and self.link.shares_memory

    def computed(self) -> tuple[int, float]:
        """Return how many rows it has computed for flights, and how long that took, s."""
        link = self.link
        return (self.n_rows, self.busy_s) if link is None else (self.n_rows + link.n_rows, self.busy_s + link.busy_s)

    def connect(self) -> HostLink:
        """Start a process for it, without segments. Raises HostGoneError."""
        try:
            sock = self.open()
        except OSError as e:
            raise HostGoneError(f"no process of a host can be started: {e}") from e
        try:
            return HostLink(sock, self.folders, self.n_embd, epoch=self.n_lost + 1, beat=self.beat)
        except HostGoneError:
            sock.close()
            raise

    def load(self, segment: RemoteSegment) -> None:
        """Let its process load a segment. Raises HostGoneError."""
        assert self.link is not None
        self.link.load(segment.number, segment.load, self.tried.get(self.link.build))

    def loaded(self, moves_states: bool) -> None:
        """Note what its process says of a segment that it has loaded."""
        assert self.link is not None
        if not self.link.is_lent:  # another machine's word holds for its own processes
            self.tried[self.link.build] = moves_states
        self.moves_states = self.moves_states and moves_states

    def begin(self) -> None:
        """Start its process, with all its segments and their cells. Raises HostGoneError."""
        began = time.perf_counter()
        link = self.link = self.connect()
        for segment in self.segments.values():
            self.load(segment)
        for segment in self.segments.values():
            segment.begin(link)
        self.replaced_s = time.perf_counter() - began

    def replace(self) -> None:
        """Let a new process take the place of one that was lost, unless too many were; `link` is None then."""
        while self.link is None and self.n_lost_in_a_row < MAX_LOST:
            try:
                self.begin()
            except HostGoneError as e:
                self.lose(e)

    def lose(self, error: HostGoneError) -> None:
        """Note that its process is gone."""
        os.write(2, f"the host of {', '.join(map(str, self.segments.values()))} is lost: {error}\n".encode())
        self.n_lost += 1
        self.n_lost_in_a_row += 1
        self.end()

    def end(self) -> None:
        """Let its process go."""
        if self.link is not None:
            self.n_rows, self.busy_s = self.computed()
            self.link.close()
        self.link = None

    def tell(self, message: ToHost, behind: bytes | memoryview = b"") -> None:
        """Send an order; a lost host's successor has what is kept here, where it is carried out already."""
        if self.link is None:
            return
        try:
            self.link.tell(message, behind)
        except HostGoneError as e:
            self.lose(e)

    def put(self, order: PutCells, saved: SavedCells) -> None:
        """Send cells, through a common memory if they are in one."""
        link = self.link
        if link is None or not isinstance(saved, SharedCells) or not link.shares_memory:
            self.tell(order, bytes_of(saved))
            return
        try:
            link.share(saved.memory)
            link.tell(replace(order, memory=saved.memory.number, at=saved.at, n_shared=len(saved)))
        except HostGoneError as e:
            self.lose(e)

    def unshare(self, memory: CellMemory) -> None:
        """Let the host close a common memory, if it has it."""
        if self.link is not None:
            try:
                self.link.unshare(memory)
            except HostGoneError as e:
                self.lose(e)

    def release(self, segment: RemoteSegment) -> None:
        """Let the host free a segment."""
        del self.segments[segment.number]
        self.tell(ReleaseSegment(segment=segment.number))


@dataclass(eq=False, slots=True)
class RemoteSegment:
    """A range of layers at a host, with the rows that are kept for the next process of it.

    `air` has the flights that are there: their rows as they were sent.
    """

    host: RemoteHost
    number: int
    layers: LayerRange
    load: Load
    kept: KeptRows = field(default_factory=KeptRows)
    air: dict[int, tuple[Places, FloatRows]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"the layers {self.layers}"

    def begin(self, link: HostLink) -> None:
        """Wait until a new process has loaded it; then send all that is kept, and the flights. Raises HostGoneError."""
        link.wait(lambda: self.number in link.loaded)
        if isinstance(found := link.loaded[self.number], str):
            raise HostGoneError(found)
        self.host.loaded(found)
        for step in self.kept.replay(self.air):
            match step:
                case RowsAgain(places, rows):
                    link.send(self.number, -1, places, rows, answered=False)
                case ShareAgain(source, seq, n):
                    link.tell(ShareCells(segment=self.number, source=source, seq=seq, n=n))
                case PutAgain(owner, start, end, saved):
                    put = PutCells(segment=self.number, owners=(owner,), start=start, end=end)
                    link.tell(put, bytes_of(saved))
            self.host.beat()  # a slow line has taken it
        for flight, sent in self.air.items():
            link.send(self.number, flight, *sent)

    # --- flights ----------------------------------------------------------------------------------------------------

    def send(self, flight: int, places: Places, rows: FloatRows) -> None:
        """Send a flight's rows there."""
        self.air[flight] = places, rows
        self.kept.add(flight, places, rows)
        if self.host.link is not None:
            try:
                self.host.link.send(self.number, flight, places, rows)
            except HostGoneError as e:
                self.host.lose(e)

    def take(self, flight: int) -> FloatRows | None:
        """Return what has come of a flight's rows; None if it is not there yet."""
        link = self.host.link
        if link is None or (rows := link.rows.pop((self.number, flight), None)) is None:
            return None
        del self.air[flight]
        self.host.n_lost_in_a_row = 0
        return rows

    def drop(self, flight: int) -> None:
        """Forget a flight that has failed, also if its rows come yet."""
        if self.air.pop(flight, None) is not None and self.host.link is not None:
            self.host.link.drop(self.number, flight)
        self.host.n_lost_in_a_row = 0

    # --- cells ------------------------------------------------------------------------------------------------------

    def forget(self, seq: int, start: int) -> None:
        """Take a sequence's cells from position `start` on."""
        self.kept.forget(seq, start)
        self.host.tell(ForgetCells(segment=self.number, seq=seq, start=start))

    def share(self, source: int, seq: int, n: int, start: int = 0) -> None:
        """Let `seq` have the first `n` cells of `source`, or those from position `start` on."""
        self.kept.share(source, seq, n, start)
        self.host.tell(ShareCells(segment=self.number, source=source, seq=seq, n=n, start=start))

    def clear(self) -> None:
        """Free all cells."""
        self.kept.clear()
        self.host.tell(ClearCells(segment=self.number))

    def compact(self, spans: Sequence[CellSpan]) -> None:
        """Let the host put these spans of cells to the front, and free all others; home goes on meanwhile."""
        self.kept.compact({seq for _, _, owners in spans for seq in owners})
        told = tuple((start, end, tuple(owners)) for start, end, owners in spans)
        self.host.tell(CompactCells(segment=self.number, spans=told))

    def put(
        self, owners: Iterable[int], start: int, end: int, saved: SavedCells, rows: FloatRows | None = None
    ) -> None:
        """Put saved cells of these layers into new ones, for several sequences; with `rows` those are kept."""
        owners = tuple(owners)
        if rows is None:
            self.kept.put(owners, start, end, saved)
        else:
            self.kept.keep(owners, start, end, rows)
        self.host.put(PutCells(segment=self.number, owners=owners, start=start, end=end), saved)

    def release(self) -> None:
        """Free it."""
        for flight in list(self.air):
            self.drop(flight)
        self.host.release(self)

    def ask(self, seq: int, start: int, end: int, layers: LayerRange, memory: CellMemory | None = None) -> int:
        """Ask for a sequence's cells at these positions, of these layers; return the copy's number.

        They go to the `memory`, if there is one and the host shares memory.
        """
        assert self.host.link is not None
        numbers = None if layers == self.layers else (layers.first, layers.last, layers.of)
        return self.host.link.save(self.number, seq, (start, end), numbers, memory)


def wait_for(hosts: Iterable[RemoteHost], timeout_s: float = ASK_S) -> None:
    """Wait until something comes from one of the hosts, and take that; those that are gone are lost."""
    links = {host.link: host for host in hosts if host.link is not None}
    wait_s = min(timeout_s, *(link.wait_s() for link in links)) if links else timeout_s
    ready = select.select(links, [], [], wait_s)[0]
    for link, host in links.items():
        try:
            if link in ready:
                link.read()
            elif timeout_s:
                link.look()
        except HostGoneError as e:
            host.lose(e)
