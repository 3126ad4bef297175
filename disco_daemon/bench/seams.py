"""What a joined text lost, doubled or changed, held against what its two endpoints say alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 3  # characters; a repetition shorter than this across a seam is chance ("ee", "  ")
CONTEXT = 24  # characters either side of a difference, in a note


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
    parted = _agreed(joined, whole)
    note = f"after {parted} of {len(whole)}: {whole[max(0, parted - CONTEXT) : parted + CONTEXT]!r} became "
    note += f"{joined[max(0, parted - CONTEXT) : parted + CONTEXT]!r}, seam at {at}"
    if rest.startswith(after) or after.startswith(rest):
        # The target goes on from the very text before the seam: between the two nothing is missing or said twice,
        # however often the text itself repeats something. A server that rounds differently from time to time does not
        # begin two answers alike: then it remains unexplained.
        return Compared(identical=False, explained=whole.startswith(before), note=note)
    doubled = _doubled(before, after)
    lost = _skipped(after, rest) if not doubled else 0
    return Compared(False, lost, doubled, explained=False, note=note)


def _agreed(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _doubled(before: str, after: str) -> int:
    """How much of the end of `before` is said again at the beginning of `after`."""
    longest = min(len(before), len(after))
    return next((n for n in range(longest, SHORTEST - 1, -1) if before.endswith(after[:n])), 0)


def _skipped(after: str, rest: str) -> int:
    """How many characters at the beginning of `rest` are missing in `after`."""
    head = after[: 4 * SHORTEST]
    at = rest.find(head) if len(head) == 4 * SHORTEST else -1
    return max(0, at)
