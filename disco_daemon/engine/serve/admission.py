"""Which sequences run, and which have cells in the KV cache: the scheduler decides, and this carries it out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ...scheduler.andes import Andes
from ...scheduler.baselines import Fcfs, RoundRobin
from ...scheduler.jobs import Capacity, TokenScheduler
from ...scheduler.latency import IterationLatency
from ..kv.cells import Cells
from .next_turn import NextTurns
from .sequence import ENDED, HELD, MOVES, PAUSED, RUNNING, SWAPPED, WAITING, Sequence, SequenceStatus

QUANTUM_S = 0.1  # between two decisions, unless a sequence comes, goes or changes
GROWTH = 8  # cells kept free for each running answer, so that it does not end up without one within a quantum
MAX_GROWTH = 0.125  # of all cells

SCHEDULERS: dict[str, Callable[[IterationLatency], TokenScheduler]] = {
    "andes": Andes,
    "andes-paper": lambda latency: Andes(latency, stall_share=1.0),
    "fcfs": lambda _: Fcfs(),
    "round-robin": lambda _: RoundRobin(),
}


@dataclass(slots=True)
class Admission:
    """All sequences, in the order of their arrival, and the only place where their status is set.

    A sequence that wants to generate and is not chosen is *paused*: it keeps its cells until another one needs them,
    and is then *preempted*. A held one only prefills; it has cells as long as no running one needs them.
    """

    cells: Cells
    scheduler: TokenScheduler
    latency: IterationLatency
    sequences: dict[str, Sequence] = field(default_factory=dict)
    n_preempted: int = 0
    limit: int = 0  # of answers that generate at a time; 0 = as many as there is room for
    offloads: bool = False  # whether those that wait leave the KV cache, also while nobody needs their cells
    next_turns: NextTurns = field(default_factory=NextTurns)
    _decided_at: float = -1.0
    _changed: bool = True

    @property
    def resident(self) -> list[Sequence]:
        """The sequences with cells, chosen or not."""
        return [s for s in self.sequences.values() if s.slot >= 0]

    @property
    def n_movable(self) -> int:
        """The number of sequences that may lose their cells to another one now."""
        return sum(not s.is_away for s in self.resident)

    @property
    def without_cells(self) -> list[Sequence]:
        """The sequences without cells."""
        return [s for s in self.sequences.values() if s.slot < 0]

    # --- a sequence's life ---------------------------------------------------------------------------------------

    def add(self, s: Sequence) -> None:
        """Queue a sequence; it waits to be chosen."""
        self.sequences[s.request.id] = s
        self._changed = True

    def hold(self, s: Sequence, now: float) -> None:
        """Let a sequence wait for an order."""
        self._set(s, HELD)
        s.held_at = now
        self._changed = True

    def release(self, s: Sequence, now: float) -> None:
        """Let a held sequence compete for the device again."""
        self._set(s, _status_unchosen(s))
        s.waiting_since = now
        self._changed = True

    def send_away(self, s: Sequence, status: SequenceStatus) -> None:
        """Let a running sequence wait for what becomes of its rows, at a partner or in a flight."""
        self._set(s, status)

    def bring_back(self, s: Sequence) -> None:
        """Let a sequence run on that was away."""
        self._set(s, RUNNING)

    def cut(self, s: Sequence, n: int) -> None:
        """Forget what is computed beyond `n` tokens, and the last token: its logits are wanted again."""
        s.prefill.n_counted = min(s.prefill.n_counted, n)
        n = min(n, len(s.tokens) - 1)
        if s.saved is not None and s.saved.n_past > n:
            self.cells.forget(s.saved)
            s.saved, s.n_past = None, 0
        if s.n_past > n:
            self.cells.cut(s, n)

    def may_abort(self, request_id: str) -> bool:
        """Whether the decode in flight may be ended for one request that leaves; asked by another thread.

        States that cannot be cut would go back, those of others too: these go on, and it is not long to the next.
        """
        return self.cells.retracts or self.sequences.keys() <= {request_id}

    def undo(self, sequences: list[Sequence], *, has_begun: bool) -> None:
        """Take back what a decode has done to these sequences before it was broken off, if it `has_begun`.

        Recurrent states are half carried on then, and those of sequences without a row in it may be half
        moved: all of them go back to where a copy was taken.
        """
        if self.cells.retracts or not has_begun:
            for s in sequences:
                self.cells.cut(s, s.n_past)
        else:
            for s in self.resident:
                self.cells.go_back(s, s.n_past)

    def reconsider(self) -> None:
        """Decide again before the quantum is over."""
        self._changed = True

    def remove(self, s: Sequence, *, is_whole: bool = False) -> None:
        """End a sequence; what it has computed stays as a cached prefix, to which a whole answer's next turn comes."""
        del self.sequences[s.request.id]
        if is_whole:
            self.next_turns.note(s)
        if s.slot >= 0:
            self.cells.leave(s.slot)
            s.slot = -1
        if s.saved is not None:
            self.cells.forget(s.saved)
            s.saved = None
        self._set(s, ENDED)
        self._changed = True

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> bool:
        """Let the scheduler choose, if it is time; give cells to the chosen ones, then to the held ones."""
        if not self._changed and now - self._decided_at < QUANTUM_S:
            return False
        self._decided_at, self._changed = now, False  # what is preempted below may run again soon
        chosen = self._choose(now)
        for s in self.resident:
            if not (s.is_held or s.is_away):
                self._set(s, RUNNING if s in chosen else PAUSED)
        for s in chosen:
            if not s.is_away and (s.slot >= 0 or self._enter(s)):
                self._set(s, RUNNING)
        if self.offloads:
            for s in [s for s in self.resident if s.status is PAUSED]:
                self.preempt(s)
        for s in self.without_cells:
            if s.is_held:
                self._enter(s)
        for s in self.sequences.values():
            s.waiting_since = (
                None if s.is_running or s.is_away else (now if s.waiting_since is None else s.waiting_since)
            )
        return True

    def preempt(self, s: Sequence) -> None:
        """Take a sequence out of the KV cache; it is swapped in again, or computed again, token for token."""
        if s.is_held:
            self.cells.leave(s.slot)
        else:
            s.saved = self.cells.swap_out(s.slot, self.latency.predict(0, s.n_past))
            self.n_preempted += 1
            s.n_preempted += 1
        s.slot, s.idle_sent = -1, False
        s.n_past = 0 if s.saved is None else s.saved.n_past
        self._set(s, HELD if s.is_held else _status_unchosen(s))
        self._changed = True

    def give_way(self) -> None:
        """Preempt one of several sequences: there was no cell where there should have been one.

        A held one goes first, the one held longest; then one that is paused; then the one that came last.
        """
        self.preempt(
            min(
                (s for s in self.resident if not s.is_away),
                key=lambda s: (not s.is_held, s.is_running, s.held_at if s.is_held else -s.timeline.arrived_s),
            )
        )

    def _set(self, s: Sequence, status: SequenceStatus) -> None:
        assert status is s.status or status in MOVES[s.status], f"{s.status} -> {status}"
        s.status = status

    def _choose(self, now: float) -> dict[Sequence, None]:
        ready = [s for s in self.sequences.values() if not s.is_held]
        if not ready:
            return {}
        jobs = [s.job(self.cells.swap_s(s.saved) if s.saved is not None else 0.0) for s in ready]
        margin = min(GROWTH * min(len(jobs), self.cells.n_seqs), int(MAX_GROWTH * self.cells.n_cells))
        n_seqs = min(self.limit or self.cells.n_seqs, self.cells.n_seqs)
        chosen = self.scheduler.choose(jobs, Capacity(self.cells.n_cells - margin, n_seqs), now)
        # One answer always fits: none must stand still because the margin for growth is not there.
        by_key: dict[Hashable, Sequence] = {s.request.id: s for s in ready}
        return dict.fromkeys(by_key[job.key] for job in chosen) or {ready[0]: None}

    def _enter(self, s: Sequence) -> bool:
        """Give a sequence its cells, if there are any; held ones and paused ones make room for one that runs."""
        while not self._place(s):
            others = [r for r in self.resident if not (r.is_running or r.is_away or r is s)]
            if s.is_held or not others:
                return False
            self.preempt(min(others, key=lambda r: (not r.is_held, r.held_at if r.is_held else -len(r.tokens))))
        return True

    def _place(self, s: Sequence) -> bool:
        """Put a sequence into the KV cache; False if there is no room."""
        if s.saved is not None:
            slot = self.cells.swap_in(s.saved, s.key(), private=s.request.private)
            if slot is None:
                return False
            s.saved, s.slot, s.n_past, s.idle_sent = None, slot, self.cells.n_of(slot), False
            return True
        taken = self.cells.take(s.key(), private=s.request.private)
        if taken is None:
            return False
        (s.slot, s.n_past), s.idle_sent = taken, False
        s.prefill.count_cached(s.n_past)
        return True


def _status_unchosen(s: Sequence) -> SequenceStatus:
    """Return the status of a sequence that may generate, and is not chosen."""
    if s.slot >= 0:
        return PAUSED
    return WAITING if s.saved is None else SWAPPED
