"""Judge joined texts: what is lost, doubled or changed against the two endpoints' own, and how they flowed. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHORTEST = 3  # characters; a repetition shorter than this across a seam is chance ("ee", "  ")
CONTEXT = 24  # characters either side of a difference, in a note
PACE_TPS = 4.8  # a reader, as in the paper
GAP_SLACK_S = 0.02  # a token later than the pace by more than this is a delayed one
BURST_S = 0.005  # tokens this close together at the end are the flush of a finished answer


@dataclass(slots=True)
class Heard:
    """One streamed answer: its text, when each piece came (s), and what the daemon says of it."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    disco: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    @property
    def move(self) -> dict[str, Any] | None:
        """The handoff that took place, if one did."""
        return next((m for m in self.disco.get("moves", []) if m["dropped"] is None), None)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces, s, without the flush at the end."""
        times = list(self.times)
        while len(times) > 1 and times[-1] - times[-2] < BURST_S:
            times.pop()
        return [b - a for a, b in itertools.pairwise(times[:-1])]


@dataclass(frozen=True, slots=True)
class Compared:
    """One joined text. `explained`: it is the source's beginning and the target's own continuation of that, exactly."""

    identical: bool
    lost: int = 0
    doubled: int = 0
    explained: bool = True
    note: str = ""


def compare(joined: str, at: int, whole: str, rest: str) -> Compared:
    """Judge `joined`, moved after `at` characters.

    `whole` is the source's unbroken answer, `rest` what the target says after `joined[:at]` when it is asked for no
    more than that. Text of the source that is not in its answer, or of the target that is not in its continuation, is
    lost or doubled.
    """
    if joined == whole:
        return Compared(identical=True)
    before, after = joined[:at], joined[at:]
    parted = _n_agreeing(joined, whole)
    note = f"after {parted} of {len(whole)}: {whole[max(0, parted - CONTEXT) : parted + CONTEXT]!r} became "
    note += f"{joined[max(0, parted - CONTEXT) : parted + CONTEXT]!r}, seam at {at}"
    if rest.startswith(after) or after.startswith(rest):
        # The target goes on from the very text before the seam: between the two nothing is missing or said twice,
        # however often the text itself repeats something. A server that rounds differently from time to time does not
        # begin two answers alike: then it remains unexplained.
        return Compared(identical=False, explained=whole.startswith(before), note=note)
    doubled = _n_doubled(before, after)
    lost = _n_skipped(after, rest) if not doubled else 0
    return Compared(False, lost, doubled, explained=False, note=note)


def _n_agreeing(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _n_doubled(before: str, after: str) -> int:
    """Count the characters at the end of `before` that are said again at the beginning of `after`."""
    longest = min(len(before), len(after))
    return next((n for n in range(longest, SHORTEST - 1, -1) if before.endswith(after[:n])), 0)


def _n_skipped(after: str, rest: str) -> int:
    """Count the characters at the beginning of `rest` that are missing in `after`."""
    head = after[: 4 * SHORTEST]
    at = rest.find(head) if len(head) == 4 * SHORTEST else -1
    return max(0, at)


def figures_of(heard: Sequence[Heard], compared: Sequence[Compared]) -> dict[str, Any]:
    """Return the figures of the answers that were to move, and of the tokens of those that did."""
    moved = [h for h in heard if h.move]
    gaps = np.array([gap for h in moved for gap in h.gaps] or [0.0])
    late = np.array([sum(gap > 1 / PACE_TPS + GAP_SLACK_S for gap in h.gaps) for h in moved] or [0])
    moves = [h.move for h in moved if h.move]
    dropped = [m["dropped"] for h in heard for m in h.disco.get("moves", []) if m["dropped"] is not None]
    return {
        "answers": len(heard),
        "handoffs": len(moved),
        "identical": sum(c.identical for c in compared),
        "lost_chars": sum(c.lost for c in compared),
        "doubled_chars": sum(c.doubled for c in compared),
        "unexplained": sum(not c.explained for c in compared),
        "tbt_p99_s": round(float(np.quantile(gaps, 0.99)), 4),
        "tbt_p50_s": round(float(np.quantile(gaps, 0.5)), 4),
        "n_gaps": len(gaps),
        "delayed_tokens_mean": round(float(late.mean()), 4),
        "delayed_tokens_p99": float(np.quantile(late, 0.99)),
        "largest_gap_s": round(float(gaps.max()), 4),
        "took_s_p50": round(float(np.median([m["took_s"] for m in moves] or [0.0])), 4),
        "overlap_tokens_mean": round(float(np.mean([m["overlap"] for m in moves] or [0.0])), 2),
        "dropped": {why: dropped.count(why) for why in sorted(set(dropped))},
        "different": [c.note for c in compared if not c.identical][:10],
    }
