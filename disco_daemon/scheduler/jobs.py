"""What a token scheduler decides on: jobs, the room for them, and the protocol of a rule that chooses. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .timeline import Timeline

HIGH_WATER = 0.9  # share of the cells filled by newcomers; Andes triggers at high memory use, too


@dataclass(slots=True, eq=False)
class Job:
    """A request as the scheduler sees it; the engine keeps it up to date, the scheduler only reads it.

    `n_context` KV cells are needed now (prompt and answer so far); `n_missing` of them are not computed yet and have to
    be prefilled or recomputed. `resume_s` is what coming back costs beyond that: the swap-in, s; 0 while `resident`,
    that is while its cells are in the KV cache and it runs on for free. It was preempted `n_preempted` times, and has
    waited since `waiting_since`, s by the scheduler's clock; None while it runs. A `hurried` job's reader takes tokens
    as fast as they come, and the pace of its timeline is a guess at a pace that will do. So many tokens are
    still to come as `expected_rest` says; 0 where nothing is known of that. Jobs compare by identity.
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
    expected_rest: float = 0.0

    @property
    def running(self) -> bool:
        """Whether it was chosen last time."""
        return self.waiting_since is None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room in the engine: KV cells and sequences that may run side by side."""

    n_cells: int
    n_seqs: int


class TokenScheduler(Protocol):
    """A rule that chooses which jobs run."""

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        """Return the jobs that run until the next call, in the order of admission; `now` in s by the jobs' clock.

        `jobs` are all that want tokens now, in any order; a job that is not among them any more has ended.
        """


def checked_high_water(share: float) -> float:
    """Return a high-water mark. Raises ValueError unless it is a share of the cells."""
    if not 0 < share <= 1:
        msg = f"the high-water mark is a share of the cells, in (0, 1], not {share!r}"
        raise ValueError(msg)
    return share
