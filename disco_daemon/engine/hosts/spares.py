"""Copies of the layers that hosts have, at home: where a host is lost and no other can be had, home computes them.

A copy is loaded beside what is computed, and has no cells. When it is needed, it gets them from the rows that are kept,
as another host would. So losing every host costs speed and no answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...types import LayerRange
from ..llama.refusals import ModelError
from ..llama.rows import Row
from ..wire import Load
from .ends import Ends
from .kept_rows import PutAgain, RowsAgain, ShareAgain
from .legs import HomeSegment, Leg
from .link import ASK_S, LOAD_S
from .loading import BrokenOffError, HomeLoading
from .remote import RemoteHost, RemoteSegment


@dataclass(eq=False, slots=True)
class Spares:
    """A copy for each leg that is at hosts alone; `load` says how a range is loaded from its file.

    Unless they are `wanted` there are none.
    """

    load: Callable[[LayerRange, str], Load]
    wanted: bool
    beat: Callable[[], None] = lambda: None  # called while one is loaded, or gets its cells
    _paths: dict[LayerRange, str] = field(default_factory=dict)  # of all ranges that there ever were
    _found: dict[LayerRange, HomeLoading] = field(default_factory=dict)

    def learn(self, ends: Ends) -> None:
        """Learn the files of ranges."""
        self._paths |= {plan.layers: plan.path for plan in ends.legs}

    def follow(self, legs: Iterable[Leg]) -> None:
        """Begin to load the copies of these legs that are missing, and free those of others."""
        if not self.wanted:
            return
        wanted = {leg.layers for leg in legs if all(isinstance(one, RemoteSegment) for one in leg.replicas)}
        for layers in self._found.keys() - wanted:
            _free(self._found.pop(layers))
        for layers in wanted - self._found.keys():
            self._found[layers] = HomeLoading(self.load(layers, self._paths[layers]), layers)
            self._found[layers].begin()

    def take(self, layers: LayerRange) -> HomeSegment:
        """Return the copy of a leg, which is used from now on. Raises ModelError if there is no memory for it."""
        loading = self._found.pop(layers, None) or HomeLoading(self.load(layers, self._paths[layers]), layers)
        until = time.monotonic() + LOAD_S
        try:
            while (found := loading.progress()) is None:
                loading.wait(ASK_S)
                if time.monotonic() < until:
                    self.beat()
        except BrokenOffError as e:
            raise ModelError(str(e)) from e
        return found

    def close(self) -> None:
        """Free all."""
        self.follow(())

    def replace(self, host: RemoteHost, legs: Iterable[Leg]) -> bool:
        """Compute a lost host's layers at home from now on: cells, and flights that were there.

        Returns whether that is so: else copies are not wanted, or there is no memory for one.
        """
        if not self.wanted:
            return False
        for leg in legs:
            for lost in [one for one in leg.replicas if isinstance(one, RemoteSegment) and one.host is host]:
                try:
                    spare = self.take(leg.layers)
                    self._put_cells(lost, spare)
                except ModelError as e:
                    os.write(2, f"home cannot take {lost} over: {e}\n".encode())
                    return False
                leg.replace(lost, spare)
                for flight, sent in lost.air.items():
                    spare.send(flight, *sent)
                lost.air.clear()
                host.segments.pop(lost.number, None)
                os.write(2, f"home computes {lost} itself from now on\n".encode())
        host.n_lost_in_a_row = 0
        return True

    def _put_cells(self, lost: RemoteSegment, spare: HomeSegment) -> None:
        """Give a copy the cells of a lost segment. Raises ModelError."""
        for step in lost.kept.replay(lost.air):
            match step:
                case RowsAgain(places, rows):
                    given: list[Row] = [(0, position, seq, False) for position, seq in places]
                    spare.model.run(given, rows)
                case ShareAgain(source, seq, n):
                    spare.share(source, seq, n)
                case PutAgain(owner, start, end, saved):
                    spare.put((owner,), start, end, saved)
            self.beat()


def _free(loading: HomeLoading) -> None:
    """Free a copy, also if it comes only now."""
    try:
        found = loading.progress()
    except BrokenOffError:
        return
    loading.undo()
    if found is not None:
        found.release()
