"""QoE of answers of which only the first token can be late, and the longest stall: what simulations ask for."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from disco_daemon.arrays import FloatArray

Numbers = float | NDArray[Any]


@overload
def qoe_steady(ttft_s: float, n_tokens: float, expected_ttft_s: float, pace_tps: float) -> float: ...
@overload
def qoe_steady(ttft_s: NDArray[Any], n_tokens: Numbers, expected_ttft_s: Numbers, pace_tps: Numbers) -> FloatArray: ...
def qoe_steady(ttft_s: Any, n_tokens: Any, expected_ttft_s: Any, pace_tps: Any) -> Any:
    """QoE of answers generated at least as fast as they are read, so that only the first token can be late.

    `ttft_s` and `expected_ttft_s` in s, `n_tokens` >= 1, `pace_tps` in tokens/s; of the (broadcast) shape of the four.
    The same as `delivery.qoe` on such arrivals. Raises ValueError as that does.
    """
    if not (_within(ttft_s, 0) and _within(n_tokens, 1)):
        raise ValueError("an answer has a TTFT >= 0 and at least one token")
    if not (_within(expected_ttft_s, 0) and _within(pace_tps, 0) and np.all(pace_tps)):
        raise ValueError("the expected TTFT must be finite and >= 0, the pace finite and positive")
    horizon = ttft_s + n_tokens / pace_tps
    actual = n_tokens * (n_tokens / pace_tps) / 2  # in this order whole numbers cannot overflow
    return _ratio(actual, _expected_area(horizon, n_tokens, expected_ttft_s, pace_tps))


def longest_stall_s(arrivals_s: FloatArray, pace_tps: float) -> float:
    """Return how long the reader stood still at most, s: had read all there was, and waited for the next token.

    `arrivals_s` [n] are ascending. The wait for the first token is none.
    """
    paced = np.arange(len(arrivals_s)) / pace_tps
    begun = paced + np.maximum.accumulate(arrivals_s - paced)
    return max(0.0, float((begun[1:] - begun[:-1]).max()) - 1.0 / pace_tps) if len(begun) > 1 else 0.0


def _expected_area(horizon_s: Any, n_tokens: Any, expected_ttft_s: Any, pace_tps: Any) -> Any:
    """Area under min(E, n) up to the horizon, token * s: a ramp, then the whole answer."""
    reading = np.maximum(horizon_s - expected_ttft_s, 0.0)
    ramp = np.minimum(reading, n_tokens / pace_tps)
    return pace_tps * ramp * ramp / 2 + n_tokens * (reading - ramp)


def _ratio(actual: Any, expected: Any) -> Any:
    """`actual` / `expected`, at most 1; 1 where nothing was expected yet."""
    return np.where(actual >= expected, 1.0, actual / np.where(expected > 0, expected, 1.0))[()]


def _within(x: Any, least: float) -> bool:
    if isinstance(x, int | float):  # of one answer: an array of one takes ten times as long
        return least <= x < math.inf
    return bool(np.all((x >= least) & (x < np.inf)))
