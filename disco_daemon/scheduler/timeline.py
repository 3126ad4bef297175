"""How a reader digests an answer so far, and how it would go on: Eq. 1 of Andes for an answer that is being generated.

    QoE(t) = integral_0^t A / integral_0^t E,  cut to [0, 1]         (Liu et al. 2024, arXiv 2404.16283, Eq. 1, §4)

A(t) are the tokens digested by t: the reader takes at most `pace_tps` tokens/s and cannot begin a token before it has
come. E(t) = pace_tps * (t - expected_ttft_s), from 0 on: the length of the answer is not known yet, so unlike in
`delivery.qoe`, which judges ended answers, E goes on rising (unless `n_total` says where it ends).

Reading is a queue with one server: a token begins at b = max(its arrival, the end of the token before), takes a step of
1 / pace_tps, and has added (t - b - step / 2) to the area under A once it is read. So a reader is three numbers: n
tokens, the sum of b + step / 2 over them, and `free`, the time when all of them are read. Between the last token and
`free` the reader never pauses, hence, for any t after the last token,

    area(t) = n * t - sum + pace * max(free - t, 0)**2 / 2

Tokens to come every tbt from a start are such a queue in closed form (Lindley): faster than the pace they are read
without a pause; slower, without one until the stock is used up, and then as they come. Pure; all times in s.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray

ARRIVED, TTFT, PACE, N, SUM, FREE = range(6)  # the columns of a reader; SUM and FREE in s since ARRIVED
N_COLUMNS = 6
HAIR = 1e-9  # s
TRIFLE = 1e-12  # token * s


class Timeline:
    """One reader's digestion so far; a token costs O(1), a prediction too.

    `arrived_s` is when the request came by the caller's clock; the first token is expected `expected_ttft_s` later, and
    `pace_tps` tokens/s from there on. Raises ValueError unless the expectation is finite and >= 0, the pace finite and
    positive, and the arrival finite. State lies in one row of numbers, so that a table of readers is made in one step.
    """

    __slots__ = ("row",)

    def __init__(self, arrived_s: float, expected_ttft_s: float, pace_tps: float) -> None:
        if not (math.isfinite(arrived_s) and 0 <= expected_ttft_s < math.inf and 0 < pace_tps < math.inf):
            msg = f"no reader: arrived {arrived_s!r} s, expects {expected_ttft_s!r} s and {pace_tps!r} token/s"
            raise ValueError(msg)
        self.row = array("d", (arrived_s, expected_ttft_s, pace_tps, 0.0, 0.0, 0.0))

    def __repr__(self) -> str:
        return f"<Timeline {self.n_tokens} tok since {self.arrived_s:.3f} s, {self.pace_tps:g} tok/s>"

    @property
    def arrived_s(self) -> float:
        """When the request came, s."""
        return self.row[ARRIVED]

    @property
    def expected_ttft_s(self) -> float:
        """When the reader expects the first token, s after the arrival."""
        return self.row[TTFT]

    @property
    def pace_tps(self) -> float:
        """How fast the reader reads, tokens/s."""
        return self.row[PACE]

    @property
    def n_tokens(self) -> int:
        """The number of tokens that have come."""
        return int(self.row[N])

    def token(self, now: float, n: int = 1) -> None:
        """Record that `n` tokens have come at `now`; times must not descend from call to call."""
        row = self.row
        step = 1.0 / row[PACE]
        begun = max(now - row[ARRIVED], row[FREE])
        row[N] += n
        row[SUM] += n * (begun + n * step / 2)
        row[FREE] = begun + n * step

    def stock_s(self, now: float) -> float:
        """Return how long the reader can go on reading the tokens in hand, s."""
        return max(self.row[FREE] - (now - self.row[ARRIVED]), 0.0)

    def qoe(self, now: float, n_total: float = math.inf) -> float:
        """QoE up to `now`, which is not before the last token; 1 while nothing was expected yet.

        With `n_total`, the length of the answer in tokens, no more than these are expected. At the end of the
        digestion of an ended answer that is `delivery.qoe.qoe`.
        """
        arrived, _, pace, n, total, free = self.row
        t = now - arrived
        return self._ratio(n * t - total + pace * max(free - t, 0.0) ** 2 / 2, t, n_total)

    def predicted(self, now: float, until: float, start_s: float, tbt_s: float) -> float:
        """QoE at `until` if a token comes at `start_s` and each `tbt_s` > 0 after it; `start_s` = inf: none comes.

        `start_s` and `until` are by the same clock as `now`, and none of the three lies before the last token; what
        would come before `now` comes at `now`'s side of the line, hence later.
        """
        arrived, _, pace, n, total, free = self.row
        t, start, step = until - arrived, max(start_s, now) - arrived, 1.0 / pace
        # A token due at `until` itself has no area yet, so a rounding of the count does no harm.
        m = math.floor((t - start) / tbt_s) + 1 if start <= t else 0
        if m:
            begun = max(free, start)
            slack = tbt_s - step
            # This many of them find the reader busy with the tokens before.
            j = min(max(math.ceil((free - start) / slack), 0), m) if slack > 0 else m
            # j tokens without a pause, the others as they come.
            total += j * begun + step * j * (j - 1) / 2 + (m - j) * start + tbt_s * (m * (m - 1) - j * (j - 1)) / 2
            total += m * step / 2
            free = begun + m * step if j == m else start + (m - 1) * tbt_s + step
            n += m
        return self._ratio(n * t - total + pace * max(free - t, 0.0) ** 2 / 2, t, math.inf)

    def _ratio(self, area: float, t: float, n_total: float) -> float:
        read, pace = max(t - self.row[TTFT], 0.0), self.row[PACE]
        ramp = min(read, n_total / pace)
        expected = pace * ramp * ramp / 2
        if read > ramp:
            expected += n_total * (read - ramp)
        return 1.0 if area >= expected or expected <= 0 else max(area / expected, 0.0)


class Readers:
    """A table of n readers: the answers of `Timeline`, for all of them and for k speeds at once."""

    __slots__ = ("_columns", "_known", "arrived", "fastest", "free", "half_pace", "n_tokens", "pace", "total", "ttft")

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        rows = np.frombuffer(b"".join([t.row for t in timelines]), np.float64).reshape(-1, N_COLUMNS)
        self._set(rows.T.copy())

    def _set(self, columns: FloatArray) -> None:
        self._columns = columns
        self.arrived, self.ttft, self.pace, self.n_tokens, self.total, self.free = columns
        self.half_pace: FloatArray = self.pace / 2
        self._known: tuple[float, tuple[FloatArray, FloatArray, FloatArray]] | None = None
        self.fastest = float(np.maximum.reduce(self.pace))  # the most stringent pace, tokens/s

    def only(self, chosen: NDArray[np.int64]) -> Readers:
        """Return the table of some of the readers."""
        table = Readers.__new__(Readers)
        table._set(self._columns.take(chosen, axis=1))
        return table

    def qoe(self, now: float) -> FloatArray:
        """Return QoE [n] up to `now`; for a later time, what it will be if no further token comes."""
        t, area, expected = self._by(now)
        left = np.maximum(self.free - t, 0.0)
        return _ratio(self.half_pace * left * left, area, expected)

    def predicted(self, now: float, until: float, delay_s: FloatArray, tbt_s: Sequence[float]) -> FloatArray:
        """QoE [k, n] at `until` if reader i gets a token at now + delay_s[i] + tbt_s[j], and each tbt_s[j] after it.

        `delay_s` [n] >= 0 and `tbt_s` [k] > 0, both finite; a tbt beyond `until` is that no token comes.
        """
        ahead, (t, area, expected) = until - now, self._by(until)
        # One speed alone is a number: numpy takes thrice as long to broadcast as to multiply arrays this small.
        less: Any = np.array([[-s] for s in tbt_s]) if len(tbt_s) > 1 else -tbt_s[0]
        # Times are in s since `until` from here on: what has not begun by 0 does not count.
        delay = np.minimum(delay_s - ahead, 0.0)
        m = np.floor(delay / less)  # tokens that come
        start = delay - less
        np.minimum(start, 0.0, out=start)
        begun = np.maximum(start, self.free - t)
        half = m * (0.5 / self.pace)
        middle = begun + half
        missed = m * middle  # the area under A that these tokens add, negative
        end = middle + half
        if max([s for s in tbt_s if s <= ahead], default=0.0) > 1.0 / self.fastest:
            step = 1.0 / self.pace
            busy, slack = begun - start, -less - step
            # Token i begins at max(begun + i * step, its arrival): the first j of them find the reader busy with what
            # came before. A hair more than `busy` makes that all where they come as fast as they are read.
            j = np.minimum(np.ceil((busy + HAIR) / np.maximum(slack, HAIR * HAIR)), m)
            missed += (m - j) * (slack * ((j + m - 1) / 2) - busy)  # the delays of the others, in all
            np.maximum(end, (delay + step) - m * less, out=end, where=m > 0)
        np.maximum(end, 0.0, out=end)  # what is left to read then
        end *= end
        end *= self.half_pace
        end -= missed
        return _ratio(end, area, expected).reshape(len(tbt_s), -1)

    def _by(self, when: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Each [n]: the time since the arrival, the area under A but for what is left to read then, and that under E.

        A trifle is on top of both areas, so that the ratio is 1 while nothing is expected. Two calls with the same
        time follow each other.
        """
        if self._known is None or self._known[0] != when:
            t = when - self.arrived
            read = np.maximum(t - self.ttft, 0.0)
            self._known = when, (t, self.n_tokens * t - self.total + TRIFLE, self.half_pace * read * read + TRIFLE)
        return self._known[1]


def _ratio(more: FloatArray, area: FloatArray, expected: FloatArray) -> FloatArray:
    """QoE, at most 1; `more` is overwritten."""
    more += area
    more /= expected
    return np.minimum(more, 1.0, out=more)
