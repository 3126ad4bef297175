"""What the token scheduler knows of a request, and of the engine's room. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from .timeline import Timeline


@dataclass(slots=True, eq=False)
class Job:
    """A request as the scheduler sees it; the engine keeps it up to date, the scheduler only reads it.

    `n_context` KV cells are needed now (prompt and answer so far); `n_missing` of them are not computed yet and have to
    be prefilled or recomputed. `resume_s` is what coming back costs beyond that: the swap-in, s; 0 while `resident`,
    that is while its cells are in the KV cache and it runs on for free. It was taken off `n_preempted` times, and waits
    since `waiting_since`, s by the scheduler's clock; None while it runs. Who is `hurried` takes tokens as fast as they
    come: the pace of its timeline is a guess at what it is content with. A job compares by identity.
    """

    key: Hashable
    timeline: Timeline
    n_context: int
    n_missing: int
    resume_s: float = 0.0
    resident: bool = False
    n_preempted: int = 0
    waiting_since: float | None = None
    hurried: bool = False

    @property
    def running(self) -> bool:
        """Whether it was chosen last time."""
        return self.waiting_since is None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room in the engine: KV cells and sequences that may run side by side."""

    n_cells: int
    n_seqs: int
