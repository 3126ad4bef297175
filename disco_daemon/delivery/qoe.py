"""Quality of experience of streamed text: Eq. 1 of Andes (Liu et al. 2024, arXiv 2404.16283). Pure.

    QoE = integral_0^H A(t) dt / integral_0^H min(E(t), n) dt, cut to [0, 1]

n tokens make the answer. A(t) are the tokens digested by t: the reader takes at most `pace_tps` tokens/s and cannot
begin a token before it has arrived. E(t) = pace_tps * (t - expected_ttft_s), from 0 on, is what the reader expected.
Token i (from 0) arriving at expected_ttft_s + i / pace_tps is exactly 1. More than expected is not better than 1, but
being early makes up for being late thereafter.

The horizon H, "time to the last token" in the paper, is taken on the reader's side: the end of the digestion of the
last token. Counted to its arrival instead, an answer that comes as a whole after a long wait would have A = 0, QoE 0.

H moves with the answer, and that is a weakness of Eq. 1 to know of: while a reader waits for the last few tokens, A is
almost n, and a long such wait makes the ratio better than a late start had made it. Delaying the whole answer never
raises the QoE, nor does delaying tokens while the last one is digested at the same time; a stall at the end may. So the
largest gap is always to be told beside it.
"""

from __future__ import annotations

import math

import numpy as np

from ..arrays import FloatArray
from ..types import Reading

# A token that comes this much later than the reader wanted it is a stall, s. Releases at the reader's very pace come
# late by a timer's jitter, each of them; a fiftieth of a second is a frame or two on a screen.
NOTICED_S = 0.02


def qoe(arrivals_s: FloatArray, expected_ttft_s: float, pace_tps: float) -> float:
    """QoE in [0, 1] of an answer whose tokens arrived at `arrivals_s` [n], ascending, in s since the request.

    Raises ValueError on an empty answer, times that descend, are negative or not finite, and a pace that is not
    positive.
    """
    _check_arrivals(arrivals_s)
    _check_expected(expected_ttft_s, pace_tps)
    return _qoe(_begun(arrivals_s, 1.0 / pace_tps), expected_ttft_s, pace_tps)


def reading(arrivals_s: FloatArray, expected_ttft_s: float, pace_tps: float) -> Reading:
    """Return all measures of how an answer was to read; arguments and ValueError as of `qoe`."""
    _check_arrivals(arrivals_s)
    _check_expected(expected_ttft_s, pace_tps)
    step = 1.0 / pace_tps
    begun = _begun(arrivals_s, step)
    waits = begun[1:] - begun[:-1] - step
    gaps = np.sort(arrivals_s[1:] - arrivals_s[:-1])
    return Reading(
        qoe=_qoe(begun, expected_ttft_s, pace_tps),
        ttlt_s=float(begun[-1]) + step,
        largest_gap_s=float(gaps[-1]) if len(gaps) else 0.0,
        stalled=int(np.count_nonzero(waits > NOTICED_S)),
        tbt_p50_s=_quantile(gaps, 0.5),
        tbt_p99_s=_quantile(gaps, 0.99),
    )


def _begun(arrivals_s: FloatArray, step: float) -> FloatArray:
    """When each token's digestion begins: when it is there and the one before is done."""
    paced: FloatArray = np.multiply(np.arange(len(arrivals_s)), step, dtype=np.float64)
    return paced + np.maximum.accumulate(arrivals_s - paced)


def _qoe(begun: FloatArray, expected_ttft_s: float, pace_tps: float) -> float:
    n, step = len(begun), 1.0 / pace_tps
    horizon = float(begun[-1]) + step
    # A token adds a ramp of one step's width, then 1 up to the horizon.
    actual = n * (horizon - step / 2) - float(begun.sum())
    # A ramp, then the whole answer. Plain numbers take a tenth of an array's time.
    read = max(horizon - expected_ttft_s, 0.0)
    ramp = min(read, n * step)
    expected = pace_tps * ramp * ramp / 2 + n * (read - ramp)
    return 1.0 if actual >= expected else max(0.0, actual / expected)


def _quantile(ordered: FloatArray, q: float) -> float:
    """Quantile `q` of ascending numbers, between neighbours in a straight line; 0 of none."""
    if not len(ordered):
        return 0.0
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (at - low) * (ordered[high] - ordered[low]))


def _check_arrivals(arrivals_s: FloatArray) -> None:
    if arrivals_s.ndim != 1 or not len(arrivals_s):
        raise ValueError("an answer without tokens has no QoE")
    # NaN fails every comparison. Counting takes a fifth of the time of numpy's `all`.
    n_ascend = np.count_nonzero(arrivals_s[1:] >= arrivals_s[:-1])
    if not (arrivals_s[0] >= 0 and arrivals_s[-1] < np.inf and n_ascend == len(arrivals_s) - 1):
        raise ValueError("arrival times must ascend from >= 0 and be finite")


def _check_expected(expected_ttft_s: float, pace_tps: float) -> None:
    if not (0 <= expected_ttft_s < math.inf and 0 < pace_tps < math.inf):
        raise ValueError("the expected TTFT must be finite and >= 0, the pace finite and positive")
