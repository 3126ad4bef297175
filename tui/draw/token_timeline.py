"""When the tokens of one answer were generated and when they were shown: as curves, and in words. Pure.

Out of /disco/v1/trace. Token i was generated at `put_s[i]` and shown at `shown_s[i]`; what lies between is in the
daemon's buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..data.model import Json
from ..data.scale import seconds

Points = list[tuple[float, float]]
NOTICED_S = 0.02  # so much later than it was to be read is late, as in the daemon's own count


@dataclass(frozen=True, slots=True)
class Trace:
    """Times in s from the request on, ascending; of a very long answer only those of the first tokens.

    `n_put` and `n_shown` count all tokens. `pace_tps` and `expected_s` are the reader's pace, token/s, and the TTFT
    that was expected, s.
    """

    put_s: Sequence[float]
    shown_s: Sequence[float]
    n_put: int
    n_shown: int
    pace_tps: float
    expected_s: float

    @classmethod
    def of(cls, said: Json) -> Trace:
        """Out of the document."""
        return cls(
            said["put_s"], said["released_s"], said["put"], said["released"], said["pace_tps"], said["expected_ttft_s"]
        )

    @property
    def cut(self) -> bool:
        """Whether times are missing at the end."""
        return self.n_put > len(self.put_s)

    def due_s(self, i: int) -> float:
        """When token `i` (from 0) is to be read, s."""
        return self.expected_s + i / self.pace_tps


def counted(times: Sequence[float], until_s: float, columns: int, before: int = 0) -> Points:
    """How many of the times have passed by when: the first, the last, and at most one point a column between them.

    A column is one of `columns` equal parts of 0 to `until_s`, as wide as a character of the picture. `before` tokens
    came earlier.
    """
    if not times:
        return []
    steps = (until_s * i / columns for i in range(columns + 1))
    between = [(t, float(before + bisect_right(times, t))) for t in steps if times[0] < t < times[-1]]
    return [(times[0], before + 1.0), *between, (times[-1], float(before + len(times)))]


def levels(trace: Trace) -> list[tuple[float, int]]:
    """(s, tokens) after each change of what the buffer holds, up to where the times end. Never below 0."""
    put, shown = trace.put_s, trace.shown_s
    found: list[tuple[float, int]] = []
    i = j = 0
    while i < len(put) or (j < len(shown) and not trace.cut):
        came = j >= len(shown) or (i < len(put) and put[i] <= shown[j])
        time = put[i] if came else shown[j]
        i, j = (i + 1, j) if came else (i, j + 1)
        if found and found[-1][0] == time:
            found.pop()  # a token that passes is not held
        found.append((time, i - j))
    return found


def peaks(trace: Trace, until_s: float, columns: int) -> Points:
    """The most that the buffer held in each of `columns` equal parts of 0 to `until_s`, (s, tokens)."""
    tops, at, level = [0] * columns, 0, 0
    for time, after in levels(trace):
        column = min(columns - 1, int(time / until_s * columns))
        for c in range(at, column + 1):
            tops[c] = max(tops[c], level)
        tops[column] = max(tops[column], after)
        at, level = column, after
    return [(until_s * (c + 0.5) / columns, float(top)) for c, top in enumerate(tops)]


def fullest(trace: Trace) -> tuple[float, int]:
    """When the buffer held the most, s, and how many tokens that were."""
    return max(levels(trace), key=lambda found: found[1], default=(0.0, 0))


def latest(trace: Trace) -> tuple[int, float]:
    """Which token (from 0) came the most behind the reader, and by how much, s; below 0 it was early."""
    behind = [shown - trace.due_s(i) for i, shown in enumerate(trace.shown_s)]
    worst = max(range(len(behind)), key=behind.__getitem__)
    return worst, behind[worst]


def words(trace: Trace) -> list[str]:
    """What the pictures show."""
    if not trace.put_s:
        return ["no token was generated"]
    lines = [f"generated from {_span(trace.put_s)}, shown {_shown(trace)}"]
    when, held = fullest(trace)
    lasting = seconds(held / trace.pace_tps)
    most = f"{held} tokens at most, {lasting} of reading, at {seconds(when)}" if held else "nothing"
    lines.append(f"the buffer held {most}")
    if trace.shown_s:
        worst, behind = latest(trace)
        late = f"token {worst + 1} was the latest, {seconds(behind)} after its time"
        never = "no token was later than the reader wanted it"
        lines.append(f"{late if behind > NOTICED_S else never} ({_wish(trace)})")
    if trace.cut:
        lines.append(f"times are kept of the first {len(trace.put_s)} of {trace.n_put} tokens")
    return lines


def _span(times: Sequence[float]) -> str:
    return f"{seconds(times[0])} to {seconds(times[-1])}"


def _shown(trace: Trace) -> str:
    missing = trace.n_put - trace.n_shown
    if not trace.shown_s:
        return "none of it"
    return f"from {_span(trace.shown_s)}" + (f" ({missing} of {trace.n_put} tokens never)" if missing else "")


def _wish(trace: Trace) -> str:
    return f"expected: the first at {seconds(trace.expected_s)}, then {trace.pace_tps:g} a second"
