"""Where the layers of one fleet's model lie, and the files of their ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...engine import wire
from ...fleet.layout import FleetLayout
from ...models.segment_files import SegmentFiles
from .host_places import RangePath

Shares = tuple[tuple[float, ...], ...]  # of the sequences, for each inner range those of its hosts


class FleetLayers:
    """The present `layout` of a model, whose ranges are in `files`.

    All mutable state: the layout, which changes when a move has been carried out, and the one to which a move leads.
    """

    def __init__(self, model: Path, files: SegmentFiles, layout: FleetLayout) -> None:
        self._model, self._files = model, files
        self.layout = layout
        self._coming: FleetLayout | None = None

    def range_files(self, layout: FleetLayout, shares: Shares = ()) -> tuple[wire.RangeFile, ...]:
        """Return the ranges with their files as the engine takes them; `shares` are those of each inner one's hosts.

        Raises OSError if the model is gone.
        """
        paths = self._files.paths(self._model, [layers for layers, _ in layout.ranges])
        of_all = ((), *(shares or ((),) * len(layout.inner)), ())
        return tuple(
            wire.RangeFile(path=str(path), first=layers.first, last=layers.last, of=layers.of, hosts=hosts, shares=of)
            for path, (layers, hosts), of in zip(paths, layout.ranges, of_all, strict=True)
        )

    def files_of(self, number: int) -> list[RangePath]:
        """Return the present layers of a host, by its number, with their files."""
        return self._files_in(self.layout, number)

    def coming_to(self, number: int) -> list[RangePath] | None:
        """Return the layers that a host will have after the move that is under way; None while nothing moves."""
        return None if self._coming is None else self._files_in(self._coming, number)

    @contextmanager
    def moving_to(self, layout: FleetLayout) -> Iterator[None]:
        """Let hosts have the files of another layout as well, until the move there has ended, either way."""
        self._coming = layout
        try:
            yield
        finally:
            self._coming = None

    def write(self) -> None:
        """Write the present ranges' files, if they are missing. Raises ConfigError, OSError."""
        ranges = [layers for layers, _ in self.layout.ranges]
        if not all(path.exists() for path in self._files.paths(self._model, ranges)):
            self._files.clean()
            self._files.write(self._model, ranges)

    def stage(self, layout: FleetLayout, shares: Shares = ()) -> tuple[wire.RangeFile, ...]:
        """Write the files of another layout, beside the present ones; return its ranges, with the hosts' shares.

        Raises ConfigError, with the reason, if the model cannot be cut there, or if there is no room. Blocks on disk.
        """
        present = [layers for layers, _ in self.layout.ranges]
        self._files.write(self._model, [*present, *(layers for layers, _ in layout.ranges if layers not in present)])
        return self.range_files(layout, shares)

    def _files_in(self, layout: FleetLayout, number: int) -> list[RangePath]:
        found = layout.on(number)
        return list(zip(found, self._files.paths(self._model, found), strict=True))


def differ(one: Shares, other: Shares, least: float) -> bool:
    """Whether shares of the same ranges differ by `least` or more somewhere, or are of other ones."""
    if [len(of) for of in one] != [len(of) for of in other]:
        return True
    changes = (abs(a - b) for of, before in zip(one, other, strict=True) for a, b in zip(of, before, strict=True))
    return max(changes, default=0.0) >= least
