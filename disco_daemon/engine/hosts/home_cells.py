"""What a sequence has in all ranges of a model whose inner layers are at hosts, taken out and put back as the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..llama.layer_states import StateFormatError
from ..llama.refusals import ModelError
from ..llama.sequences import CellSpan
from ..llama.state import State
from .joining_legs import Span
from .kept_rows import KeptRows
from .pool import leg_parts
from .range_states import RangeStates, by_range, cut_whole, parse_ranges, whole
from .recut import Recut
from .remote import RemoteHost
from .view import HomeView


class HomeCells(HomeView):
    """The last range as a model, whose sequences are saved with what they have in all others."""

    _mend: Callable[[RemoteHost], None]  # replaces the process of a host that is lost
    _move: Recut | None  # that is under way
    _spans: list[Span]  # that a move copies; none where cells have changed since they were told

    def save(self, seq: int) -> memoryview:
        """Copy the KV cache's content of a sequence: as the whole model's."""
        return self.part(seq, 0, self.n_ctx)

    def part(self, seq: int, start: int, end: int) -> memoryview:
        """Copy the KV cache's content of a sequence's positions from `start` to `end`: as the whole model's.

        Where cells cannot be cut by layers it is of these ranges, and has the rows that are kept.
        """
        assert self._first is not None
        parts = [self._first.part(seq, start, end), *leg_parts(self._legs, seq, start, end, self._mend)]
        parts.append(super().part(seq, start, end))
        if self.moves_states:
            return whole(self._ranges, parts)
        kept = [leg.place(seq).kept or KeptRows() for leg in self._legs]
        n = min(end, max(rows.length(seq) for rows in kept))
        rows = [b"" if (found := each.rows_of(seq, start, n)) is None else found.tobytes() for each in kept]
        return by_range(n, self._ranges, parts, rows)

    def compact(self, spans: Iterable[CellSpan]) -> int:
        """Put these spans of cells to the front in all ranges, each where it is: no cell passes between processes.

        Hosts do so beside home. Returns 0: what is swapped passes between processes, so this says nothing of a swap.
        """
        assert self._first is not None
        self._spans, kept = [], list(spans)
        for leg in self._legs:
            leg.compact(kept)
        self._first.compact(kept)
        super().compact(kept)
        if self._move is not None:
            self._move.clear()
        return 0

    def restore(self, seq: int, data: State) -> bool:
        """Put the content from `save` back into the KV cache; return False if there is no room."""
        try:
            found = self._by_range(data)
            self._put(found, (seq,), 0, found.n)
        except (ModelError, StateFormatError):
            return False
        return True

    def put(self, data: State, owners: Iterable[int], start: int, end: int) -> None:
        """Put the content from `part` into new cells, for several sequences. Raises ModelError if there are none."""
        self._put(self._by_range(data), tuple(owners), start, end)

    def _by_range(self, data: State) -> RangeStates:
        return (cut_whole if self.moves_states else parse_ranges)(data, self._ranges)

    def _put(self, found: RangeStates, owners: tuple[int, ...], start: int, end: int) -> None:
        assert self._first is not None
        self._spans = []
        self._first.put(found.parts[0], owners, start, end)
        super().put(found.parts[-1], owners, start, end)
        for leg, part, behind in zip(self._legs, found.parts[1:-1], found.rows, strict=True):
            rows = np.frombuffer(behind, np.float32).reshape(-1, self.n_embd) if behind else None
            leg.put(owners, start, end, part, rows)
