"""Which replica of a leg gets a new sequence, and which sequences are in a flight together. Pure.

Sequences are whole, shares are not. The quota method of apportionment (Balinski and Young) keeps the number at each
replica less than one from its share of them all, however many come; where sequences end, whoever comes next makes up
for it as far as one can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Route = tuple[int, ...]  # of a sequence: the replica that has it, of each leg that has several

RECENT = 256  # flights: a sequence without rows in so many is no paused answer, but a prefix that is kept of one


def next_replica(shares: Sequence[float], counts: Sequence[int]) -> int:
    """Return the replica for one sequence more, by the replicas' shares and the sequences that each has.

    Among those that stay below their share of all sequences, rounded up, that is the one that waits longest for its
    next. Without shares all are alike. Raises ValueError where there are other shares than replicas.
    """
    if not any(shares):
        shares = [1.0] * len(counts)
    if len(shares) != len(counts):
        raise ValueError(f"{len(shares)} shares for {len(counts)} replicas")
    n, total = sum(counts) + 1, sum(shares)
    below = [at for at, share in enumerate(shares) if counts[at] < n * share / total]
    return min(below, key=lambda at: (counts[at] + 1) / shares[at])


def next_flight(routes: Sequence[Route], is_here: Sequence[bool], n_flights: int) -> list[int]:
    """Return which of the sequences that are `is_here` depart together, by their numbers; the others are in flights.

    In the long run all go in `n_flights` of one size, each by as few routes as can be: rows that two replicas share
    cost each of them a batch of its own. One whose companions are in a flight waits for them, unless all that are here
    do, so that flights that have come to be mixed become alike.
    """
    order = sorted(range(len(routes)), key=lambda number: routes[number])
    size = max(1, -(-len(order) // n_flights))
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    there = [[number for number in group if is_here[number]] for group in groups]
    complete = [group for group in groups if all(is_here[number] for number in group)]
    return complete[0] if complete else max(there, key=len, default=[])


@dataclass(eq=False, slots=True)
class SequencesAtWork:
    """Which sequences are drawn: all but those that had rows once and none of late. All mutable state: these two."""

    _flight: int = 0
    _latest: dict[int, int] = field(default_factory=dict)  # the flight of each sequence's latest rows

    def observe(self, flight: int, seqs: Iterable[int]) -> None:
        """Note whose rows are in a flight."""
        self._flight = max(self._flight, flight)
        for seq in seqs:
            self._latest[seq] = flight

    def __contains__(self, seq: int) -> bool:
        """Whether a sequence is drawn, or is to be."""
        return self._flight - self._latest.get(seq, self._flight) < RECENT

    def forget(self, seq: int) -> None:
        """Forget a sequence, whose number is another's from now on."""
        self._latest.pop(seq, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._latest.clear()
