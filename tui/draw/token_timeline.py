"""The times at which the tokens of one answer were generated and shown: as curves, and in words. Pure.

They come from /disco/v1/trace. Token i was generated at `put_s[i]` and shown at `shown_s[i]`; in between it was in the
daemon's buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..data.model import Json
from ..data.scale import seconds

Points = list[tuple[float, float]]
NOTICED_S = 0.02  # a token is late from this delay on, as in the daemon's own count


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times in s from the request on, ascending; a very long answer has those of its first tokens only.

    `n_put` and `n_shown` count all tokens. `pace_tps` is the reader's pace, token/s; `expected_s` the expected TTFT, s.
    """

    put_s: Sequence[float]
    shown_s: Sequence[float]
    n_put: int
    n_shown: int
    pace_tps: float
    expected_s: float

    @classmethod
    def of(cls, said: Json) -> TokenTimes:
        """Read the document."""
        return cls(
            said["put_s"], said["released_s"], said["put"], said["released"], said["pace_tps"], said["expected_ttft_s"]
        )

    @property
    def is_cut(self) -> bool:
        """Whether times are missing at the end."""
        return self.n_put > len(self.put_s)

    def due_s(self, i: int) -> float:
        """Return when the reader wants token `i` (from 0), s."""
        return self.expected_s + i / self.pace_tps


def count_curve(times: Sequence[float], until_s: float, columns: int, before: int = 0) -> Points:
    """Return the count of tokens over time: the first, the last, and at most one point a column between them.

    A column is one of `columns` equal parts of 0 to `until_s`, as wide as a character of the picture. `before` tokens
    came earlier.
    """
    if not times:
        return []
    steps = (until_s * i / columns for i in range(columns + 1))
    between = [(t, float(before + bisect_right(times, t))) for t in steps if times[0] < t < times[-1]]
    return [(times[0], before + 1.0), *between, (times[-1], float(before + len(times)))]


def levels(trace: TokenTimes) -> list[tuple[float, int]]:
    """Return (s, tokens) after each change of the buffer's content, up to the last known time. Never below 0."""
    put, shown = trace.put_s, trace.shown_s
    found: list[tuple[float, int]] = []
    i = j = 0
    while i < len(put) or (j < len(shown) and not trace.is_cut):
        came = j >= len(shown) or (i < len(put) and put[i] <= shown[j])
        time = put[i] if came else shown[j]
        i, j = (i + 1, j) if came else (i, j + 1)
        if found and found[-1][0] == time:
            found.pop()  # a token that passes straight through is not held
        found.append((time, i - j))
    return found


def peaks(trace: TokenTimes, until_s: float, columns: int) -> Points:
    """Return the maximum of the buffer in each of `columns` equal parts of 0 to `until_s`, (s, tokens)."""
    tops, at, level = [0] * columns, 0, 0
    for time, after in levels(trace):
        column = min(columns - 1, int(time / until_s * columns))
        for c in range(at, column + 1):
            tops[c] = max(tops[c], level)
        tops[column] = max(tops[column], after)
        at, level = column, after
    return [(until_s * (c + 0.5) / columns, float(top)) for c, top in enumerate(tops)]


def fullest(trace: TokenTimes) -> tuple[float, int]:
    """Return when the buffer was fullest, s, and its tokens then."""
    return max(levels(trace), key=lambda found: found[1], default=(0.0, 0))


def latest(trace: TokenTimes) -> tuple[int, float]:
    """Return the token (from 0) that was latest for the reader, and its delay, s; below 0 it was early."""
    behind = [shown - trace.due_s(i) for i, shown in enumerate(trace.shown_s)]
    worst = max(range(len(behind)), key=behind.__getitem__)
    return worst, behind[worst]


def words(trace: TokenTimes) -> list[str]:
    """Say what the pictures show."""
    if not trace.put_s:
        return ["no token was generated"]
    lines = [f"generated from {_span(trace.put_s)}, shown {_shown_text(trace)}"]
    when, held = fullest(trace)
    lasting = seconds(held / trace.pace_tps)
    most = f"{held} tokens at most, {lasting} of reading, at {seconds(when)}" if held else "nothing"
    lines.append(f"the buffer held {most}")
    if trace.shown_s:
        worst, behind = latest(trace)
        late = f"token {worst + 1} was the latest, {seconds(behind)} after its time"
        never = "no token was later than the reader wanted it"
        lines.append(f"{late if behind > NOTICED_S else never} ({_wish(trace)})")
    if trace.is_cut:
        lines.append(f"times are kept of the first {len(trace.put_s)} of {trace.n_put} tokens")
    return lines


def _span(times: Sequence[float]) -> str:
    return f"{seconds(times[0])} to {seconds(times[-1])}"


def _shown_text(trace: TokenTimes) -> str:
    missing = trace.n_put - trace.n_shown
    if not trace.shown_s:
        return "none of it"
    return f"from {_span(trace.shown_s)}" + (f" ({missing} of {trace.n_put} tokens never)" if missing else "")


def _wish(trace: TokenTimes) -> str:
    return f"expected: the first at {seconds(trace.expected_s)}, then {trace.pace_tps:g} a second"
