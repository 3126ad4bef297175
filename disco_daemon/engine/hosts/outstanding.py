"""What home has asked of a host: nothing else is taken from it, and of that no more than it can be. Pure.

A host of another machine says what it likes. What nobody asked for is not kept, so it fills no memory; what is longer
than its answer can be is not read; and of saved cells each number is checked that llama.cpp would go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...types import LayerRange
from ..llama.foreign_states import check_state
from ..llama.layer_states import StateFormatError, unpacked
from ..llama.state import State
from .cell_memory import CellMemory
from .messages import CellsSaved, FromHost, RowsComputed

NUMBER_BYTES = 4  # of a number of a row
CELL_NUMBERS = 4  # that a cell of a layer has for each of a row, at most: keys and values, twice as wide
CELL_BYTES = 64  # of a cell of a layer beside them: its position, and where each is a piece of its own, that one's head
LAYER_BYTES = 1 << 12  # of a layer that do not depend on its cells; one with a state is in no segment
UNKNOWN_LAYERS = 1 << 10  # of a segment whose layers are not told: more than any model has

Flight = tuple[int, int]  # the numbers of a segment and of a flight


class UnaskedError(Exception):
    """A host says what it was not asked, or what cannot be an answer to that."""


@dataclass(frozen=True, slots=True)
class SentFlight:
    """Rows that were sent, and when, s; their answer may be of no use any more."""

    n_rows: int
    sent_at: float
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class AskedCells:
    """Cells that were asked for: of these layers, at the positions from `start` to `end`.

    They come behind their message, or go to the `slot` of a memory, which is not held where nobody wants them any more.
    """

    layers: LayerRange | None
    start: int
    end: int
    in_memory: bool = False
    slot: tuple[CellMemory, int] | None = None
    is_wanted: bool = True


@dataclass(slots=True)
class AskedOfHost:
    """What is awaited of one life of a host, whose rows have `n_embd` numbers."""

    n_embd: int
    flights: dict[Flight, SentFlight] = field(default_factory=dict)
    copies: dict[int, AskedCells] = field(default_factory=dict)
    _layers: dict[int, LayerRange | None] = field(default_factory=dict)  # of all segments that were ordered
    _loading: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether neither rows nor cells are awaited."""
        return not (self.flights or self.copies)

    @property
    def is_loading(self) -> bool:
        """Whether a segment is awaited."""
        return bool(self._loading)

    def load(self, segment: int, layers: Sequence[int] | None) -> None:
        """A segment is ordered."""
        self._layers[segment] = LayerRange(*layers) if layers else None
        self._loading.add(segment)

    def loaded(self, segment: int) -> None:
        """Take note that it has been loaded, or refused. Raises UnaskedError."""
        if segment not in self._loading:
            raise UnaskedError(f"it has loaded the segment {segment}, which is not what it was told to load")
        self._loading.discard(segment)

    def save(self, copy: int, segment: int, span: tuple[int, int], layers: Sequence[int] | None) -> None:
        """Cells of a segment are asked for, of these layers or of all."""
        of = LayerRange(*layers) if layers else self._layers.get(segment)
        self.copies[copy] = AskedCells(of, *span)

    def place(self, copy: int, slot: tuple[CellMemory, int]) -> None:
        """Cells that were asked for go to a common memory."""
        self.copies[copy] = replace(self.copies[copy], in_memory=True, slot=slot)

    def drop_copy(self, copy: int) -> None:
        """Nobody wants those cells any more."""
        if (asked := self.copies.get(copy)) is not None:
            self.copies[copy] = replace(asked, slot=None, is_wanted=False)

    def drop_flight(self, flight: Flight) -> None:
        """Nobody wants those rows any more."""
        if (sent := self.flights.get(flight)) is not None:
            self.flights[flight] = replace(sent, is_wanted=False)

    def most_behind(self, message: FromHost) -> int:
        """Return how many bytes may be behind a message at most."""
        match message:
            case RowsComputed(segment=segment, flight=flight):
                sent = self.flights.get((segment, flight))
                return 0 if sent is None else NUMBER_BYTES * self.n_embd * sent.n_rows
            case CellsSaved(copy=copy) if (asked := self.copies.get(copy)) is not None and not asked.in_memory:
                return self._most_cells(asked)
        return 0

    def rows(self, message: RowsComputed, n_bytes: int) -> SentFlight:
        """Return what was sent of the rows that have come. Raises UnaskedError."""
        sent = self.flights.pop((message.segment, message.flight), None)
        if sent is None:
            raise UnaskedError(f"it sent rows of flight {message.flight}, which it was not to compute")
        if n_bytes != NUMBER_BYTES * self.n_embd * sent.n_rows:
            raise UnaskedError(f"it sent {n_bytes} bytes for the {sent.n_rows} rows of flight {message.flight}")
        if message.n_batch < sent.n_rows:
            raise UnaskedError(f"it computed {sent.n_rows} rows in a batch of {message.n_batch}")
        return sent

    def cells(self, message: CellsSaved, n_bytes: int) -> AskedCells:
        """Return what was asked of the cells that have come, behind the message or in memory. Raises UnaskedError."""
        asked = self.copies.pop(message.copy, None)
        if asked is None:
            raise UnaskedError(f"it sent cells {message.copy}, for which it was not asked")
        here, there = (0, message.n_shared) if asked.in_memory else (n_bytes, 0)
        if (n_bytes, message.n_shared) != (here, there) or there > self._most_cells(asked):
            raise UnaskedError(f"it sent cells with {n_bytes} bytes behind them and {message.n_shared} in memory")
        return asked

    def _most_cells(self, asked: AskedCells) -> int:
        n_layers = UNKNOWN_LAYERS if asked.layers is None else asked.layers.n_layers + 1
        of_cells = (NUMBER_BYTES * CELL_NUMBERS * self.n_embd + CELL_BYTES) * max(0, asked.end - asked.start)
        return n_layers * (LAYER_BYTES + of_cells)


def check_cells(data: State, asked: AskedCells, *, are_joined: bool = True) -> None:
    """Check that saved cells are those that were asked for, to their last byte. Raises UnaskedError.

    Fewer may be there, up to some position: a text has an end. `are_joined`: cells can be cut by layers; else they may
    be in a form that only llama.cpp puts together, and of that the counts, positions, types and lengths.
    """
    if asked.layers is None:
        raise UnaskedError("it sent cells of layers that are not known")
    try:
        if are_joined:
            unpacked(data, asked.layers)
        check_state(data, asked.layers, asked.start, asked.end)
    except StateFormatError as e:
        raise UnaskedError(f"it sent other cells than those from {asked.start} to {asked.end}: {e}") from e
