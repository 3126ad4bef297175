"""How soon the choice follows where a server becomes another one: the same model, months apart (LLMDrift). Pure.

A server plays what was recorded of a model in March 2023, and from one request on what was recorded of the same in June
2023, or the other way round. Its rival is any other trace without a long tail, scaled so that its median lies in the
middle of the two: one with a tail is not plainly better.
Before the shift one of them is the better, after it the other. The choice has followed with the first request from
which on MOSTLY of the next LOOKED_AT go to that one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.simulate.server_player import Played, PoolRule, serve

from .servers import Draw, teach
from .traces import LatencyTrace

SOURCE = "llmdrift"
LONG_TAIL = 4.0  # P99 over the median, as in `servers_report`
APART = 1.5  # between the medians before and after: what lies nearer is no shift
BEFORE = 60  # requests before the shift, and …
AFTER = 100  # … behind it
LOOKED_AT = 20  # requests that say whom is chosen now
MOSTLY = 0.8  # of them
WITHIN = 20  # requests after which the choice should have followed


@dataclass(frozen=True, slots=True)
class Shift:
    """One shift: whether the chosen server became slower (else another one quicker), and when the choice followed."""

    slows: bool
    followed: int | None


def of_traces(traces: Sequence[LatencyTrace]) -> dict[str, Any] | None:
    """Return how the pool follows, for both kinds of shifts; None without traces of such."""
    shifts = [shift for draw, after_s in _scenes(traces) if (shift := _play(draw, after_s)) is not None]
    if not shifts:
        return None
    return {
        "slower": _figures([s.followed for s in shifts if s.slows]),
        "quicker": _figures([s.followed for s in shifts if not s.slows]),
    }


def _figures(followed: Sequence[int | None]) -> dict[str, Any]:
    counts = [AFTER if n is None else n for n in followed]
    return {
        "n": len(counts),
        "median": statistics.median(counts) if counts else None,
        "most": max(counts, default=None),
        "within_20": sum(n <= WITHIN for n in counts) / len(counts) if counts else None,
    }


def _scenes(traces: Sequence[LatencyTrace]) -> Iterator[tuple[Draw, FloatArray]]:
    """Each pair of the same model with each rival; the shifting server is the first of the draw. Tested halves only."""
    drifting = [trace for trace in traces if trace.source == SOURCE]
    for old in drifting:
        for new in drifting:
            if old is new or old.name.rpartition("-")[0] != new.name.rpartition("-")[0]:
                continue
            old_s, new_s = _half(old, 1)[:BEFORE], _half(new, 1)[:AFTER]
            medians = sorted((float(np.median(old_s)), float(np.median(new_s))))
            for rival in traces:
                if rival in (old, new) or not _is_even(rival) or medians[1] < APART * medians[0]:
                    continue
                scale = math.sqrt(medians[0] * medians[1]) / float(np.median(_half(rival, 1)[: BEFORE + AFTER]))
                known_s, played_s = _half(rival, 0) * scale, _half(rival, 1)[: BEFORE + AFTER] * scale
                yield Draw((old.name, rival.name), (_half(old, 0), known_s), (old_s, played_s)), new_s


def _is_even(rival: LatencyTrace) -> bool:
    """Whether it is long enough, and has no long tail."""
    tested_s = _half(rival, 1)
    if len(tested_s) < BEFORE + AFTER:
        return False
    return float(np.quantile(tested_s, 0.99)) <= LONG_TAIL * float(np.median(tested_s))


def _half(trace: LatencyTrace, which: int) -> FloatArray:
    middle = len(trace.ttft_s) // 2
    return trace.ttft_s[middle:] if which else trace.ttft_s[:middle]


def _play(draw: Draw, after_s: FloatArray) -> Shift | None:
    """Play one shift; None where the pool did not ask the one with the lower median before it."""
    rule, played = PoolRule(2), Played()
    teach(rule, draw)
    times_s = np.concatenate([draw.played_s[0], after_s])
    for i in range(BEFORE + AFTER):
        serve(rule, [float(times_s[i]), float(draw.played_s[1][i])], i, played)
    slows = bool(np.median(draw.played_s[0]) < np.median(after_s))
    before, after = (0, 1) if slows else (1, 0)
    if played.asked[BEFORE - LOOKED_AT : BEFORE].count(before) < MOSTLY * LOOKED_AT:
        return None
    asked = [server == after for server in played.asked[BEFORE:]]
    for n in range(AFTER - LOOKED_AT):
        if asked[n] and sum(asked[n : n + LOOKED_AT]) >= MOSTLY * LOOKED_AT:
            return Shift(slows, n)
    return Shift(slows, None)
