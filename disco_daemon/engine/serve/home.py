"""Batching where the inner layers are at a host: two flights are under way, so that neither it nor home waits long.

A sequence whose rows are in a flight is *away*. While the host computes one flight, home draws the tokens of the other
and sends it off again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .. import wire
from ..hosts.home import Ends, HomeLlama
from ..llama.rows import Row
from .batch import Batcher
from .iteration import Batch
from .sequence import Sequence

FLIGHTS = 2
LOOK_S = 0.005  # between two looks at a move of layers while nothing is computed


@dataclass(slots=True)
class HomeBatcher(Batcher):
    """A batcher whose batches depart and arrive. `_flights` are under way, with the time of their departure, s."""

    _flights: deque[tuple[Batch, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.admission.cells.before_move = self._land_all

    # --- moves of layers ------------------------------------------------------------------------------------------

    @property
    def _home(self) -> HomeLlama:
        llama = self.llama
        assert isinstance(llama, HomeLlama)
        return llama

    def begin_move(self, ends: Ends) -> None:
        """Begin to move layers, while answers go on; `HomeLlama.moves` has what came of it. Raises ModelError."""
        self._home.begin_move(ends)

    def break_off_move(self, reason: str) -> None:
        """End a move, if one is under way: all is as before."""
        self._home.break_off(reason)

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message at most before `look` is due, s; None while nothing is."""
        return LOOK_S if self._home.is_moving else None

    def look(self) -> bool:
        """Go on with a move of layers; there is nothing to compute."""
        if self._progress_move():
            self._switch()
        return False

    def _progress_move(self) -> bool:
        """Go on with a move of layers; return whether it is time to switch."""
        llama = self._home
        return llama.is_moving and llama.progress_move(self.admission.cells.spans())

    def _switch(self) -> None:
        """Let the flights land, but for one that is held, and finish a move of layers."""
        llama, began = self._home, self.clock()
        while len(self._flights) > llama.holds:
            self._land()
        llama.finish_move(self.admission.cells.spans())
        llama.send_held()
        if llama.moves:
            llama.moves[-1].pause_s = self.clock() - began

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
        is_time = self._progress_move()
        if self.admission.decide(self.clock()):
            self._send_pauses()
        batch = self._build()
        batch.apart = False
        if batch.rows:
            self._depart(batch)
        if is_time:
            self._switch()
            return True
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
        began = self.clock()
        rc = self._home.depart(rows)
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
        began = self.clock()
        rc = self._home.arrive()
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
