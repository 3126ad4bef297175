"""Who runs, and who has cells in the KV cache. The scheduler decides; what it takes to obey it is done here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ...scheduler.jobs import Capacity
from ...scheduler.latency import IterationLatency
from ...scheduler.policy import Andes, Fcfs, RoundRobin, TokenScheduler
from ..kv.cells import Cells
from .sequence import Sequence

QUANTUM_S = 0.1  # between two decisions on who runs, unless somebody comes or goes
GROWTH = 8  # cells kept free for each running answer, so that it does not end up without one within a quantum
MAX_GROWTH = 0.125  # of all cells

SCHEDULERS: dict[str, Callable[[IterationLatency], TokenScheduler]] = {
    "andes": Andes,
    "fcfs": lambda _: Fcfs(),
    "round-robin": lambda _: RoundRobin(),
}


@dataclass(slots=True)
class Admission:
    """All sequences, in the order of their arrival, and the right to run.

    A sequence that wants to generate and is not chosen is *paused*: it keeps its cells until somebody else needs them,
    and is then *preempted*. One that is held only prefills; it has cells as long as nobody who runs needs them.
    """

    cells: Cells
    scheduler: TokenScheduler
    latency: IterationLatency
    sequences: dict[str, Sequence] = field(default_factory=dict)
    n_preempted: int = 0
    _decided_at: float = -1.0
    _changed: bool = True

    @property
    def running(self) -> list[Sequence]:
        """Those with cells, chosen or not."""
        return [s for s in self.sequences.values() if s.slot >= 0]

    @property
    def waiting(self) -> list[Sequence]:
        """Those without."""
        return [s for s in self.sequences.values() if s.slot < 0]

    def changed(self) -> None:
        """Somebody came, went, or may go on: decide again before the quantum is over."""
        self._changed = True

    def decide(self, now: float) -> bool:
        """Let the scheduler choose, if it is time; bring those chosen into the KV cache, then the held ones."""
        if not self._changed and now - self._decided_at < QUANTUM_S:
            return False
        self._decided_at, self._changed = now, False
        chosen = self._chosen(now)
        for s in self.sequences.values():
            s.chosen = s in chosen
        for s in chosen:
            s.chosen = s.slot >= 0 or self._enter(s)
        for s in self.waiting:
            if s.held:
                self._enter(s)
        for s in self.sequences.values():
            s.waiting_since = None if s.chosen else (now if s.waiting_since is None else s.waiting_since)
        return True

    def preempt(self, s: Sequence) -> None:
        """Take a sequence out of the KV cache; it is swapped in again, or computed again, token for token."""
        if s.held:
            self.cells.leave(s.slot)
        else:
            s.saved = self.cells.swap_out(s.slot, self.latency.predict(0, s.n_past))
            self.n_preempted += 1
            s.n_preempted += 1
        s.slot, s.told, s.chosen = -1, False, False
        s.n_past = 0 if s.saved is None else s.saved.n_past
        self._changed = True

    def give_way(self) -> None:
        """There was no cell where there should have been: one of several sequences goes."""
        self.preempt(
            min(self.running, key=lambda s: (not s.held, s.chosen, s.held_at if s.held else -s.timeline.arrived_s))
        )

    def remove(self, s: Sequence) -> None:
        """A sequence has ended; what it has computed stays as a cached prefix."""
        del self.sequences[s.request.id]
        if s.slot >= 0:
            self.cells.leave(s.slot)
            s.slot = -1
        if s.saved is not None:
            self.cells.forget(s.saved)
            s.saved = None
        self._changed = True

    def _chosen(self, now: float) -> dict[Sequence, None]:
        ready = [s for s in self.sequences.values() if not s.held]
        if not ready:
            return {}
        jobs = [s.job(self.cells.swap_s(s.saved) if s.saved is not None else 0.0) for s in ready]
        margin = min(GROWTH * min(len(jobs), self.cells.n_seqs), int(MAX_GROWTH * self.cells.n_cells))
        chosen = self.scheduler.choose(jobs, Capacity(self.cells.n_cells - margin, self.cells.n_seqs), now)
        # One answer always fits: none must stand still because the margin for growth is not there.
        by_key: dict[Hashable, Sequence] = {s.request.id: s for s in ready}
        return dict.fromkeys(by_key[job.key] for job in chosen) or {ready[0]: None}

    def _enter(self, s: Sequence) -> bool:
        """Give a sequence its cells; held ones and paused ones make room for one that runs."""
        while not self._placed(s):
            others = [r for r in self.running if not r.chosen and r is not s]
            if s.held or not others:
                return False
            self.preempt(min(others, key=lambda r: (not r.held, r.held_at if r.held else -len(r.tokens))))
        return True

    def _placed(self, s: Sequence) -> bool:
        if s.saved is not None:
            slot = self.cells.swap_in(s.saved, s.key(), private=s.request.private)
            if slot is None:
                return False
            s.saved, s.slot, s.n_past, s.told = None, slot, self.cells.n_of(slot), False
            return True
        taken = self.cells.take(s.key(), private=s.request.private)
        if taken is None:
            return False
        (s.slot, s.n_past), s.told = taken, False
        n_new = min(s.n_past, s.n_prompt) - s.n_counted
        if n_new > 0:
            s.n_cached += n_new
            s.n_counted += n_new
        return True
