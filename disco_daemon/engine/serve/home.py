"""Batching where the inner layers are at a host: two flights are under way, so that neither it nor home waits long.

A sequence whose rows are in a flight is *away*. While the host computes one flight, home draws the tokens of the other
and sends it off again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .. import wire
from ..hosts.home import HomeLlama
from ..llama.rows import Row
from .batch import Batcher
from .iteration import Batch
from .sequence import Sequence

FLIGHTS = 2


@dataclass(slots=True)
class HomeBatcher(Batcher):
    """A batcher whose batches depart and arrive. `_flights` are under way, with the time of their departure, s."""

    _flights: deque[tuple[Batch, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.admission.cells.before_move = self._land_all

    # --- orders: none of them finds a sequence in the air ---------------------------------------------------------

    def hold(self, request_id: str) -> None:
        """Cut a sequence back to what it was given, and let it wait."""
        self._land_all()
        Batcher.hold(self, request_id)

    def append(self, order: wire.AppendText) -> None:
        """Grow a held sequence by text from elsewhere."""
        self._land_all()
        Batcher.append(self, order)

    def cancel(self, request_id: str) -> None:
        """End a sequence."""
        self._land_all()
        Batcher.cancel(self, request_id)

    # --- iterations -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let a batch depart, and the one before it arrive; False if there was nothing to compute."""
        if self.admission.decide(self.clock()):
            self._send_pauses()
        batch = self._build()
        batch.apart = False
        if batch.rows:
            self._depart(batch)
        if len(self._flights) == FLIGHTS or (self._flights and not batch.rows):
            self._land()
            return True
        return bool(batch.rows)

    def _candidates(self) -> list[Sequence]:
        """Return half of the sequences: the others are in the air, or come next."""
        here = [s for s in self.admission.resident if not s.is_away]
        runnable = [s for s in self.admission.resident if s.is_running or s.is_away]
        half = {id(s) for s in [s for s in here if s.is_running][: -(-len(runnable) // FLIGHTS)]}
        return [s for s in here if not s.is_running or id(s) in half]

    def _depart(self, batch: Batch) -> None:
        rows: list[Row] = batch.next_rows()
        llama, began = self.llama, self.clock()
        assert isinstance(llama, HomeLlama)
        rc = llama.depart(rows)
        self.counters.busy_s += self.clock() - began
        if rc != 0:
            self._recover(rc, batch.part)
            return
        self._flights.append((batch, began))
        for s, _, _ in batch.shares:
            if s.is_running:
                self.admission.send_away(s)
        if not all(s.is_away for s, _, _ in batch.shares):  # one that is held may be changed by any order
            self._land_all()

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the first flight, and give each of its sequences what its rows have come to."""
        batch, departed = self._flights.popleft()
        llama, began = self.llama, self.clock()
        assert isinstance(llama, HomeLlama)
        rc = llama.arrive()
        batch.ended_at = self.clock()
        batch.took_s = batch.ended_at - departed
        self.counters.busy_s += batch.ended_at - began
        for s, n, _ in batch.shares:
            if s.is_away:
                self.admission.bring_back(s)
            s.busy_s += batch.took_s * n / len(batch.rows)
        if rc != 0:
            self._recover(rc, batch.shares)
            return
        batch.n_decoded = len(batch.shares)
        self._collect(batch)
        self._learn(batch)
