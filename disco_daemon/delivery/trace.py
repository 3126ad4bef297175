"""When each token of one answer came and when it was shown, kept for a picture of its delivery. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Outcome
from .buffer import TokenBuffer

MAX_TRACED = 4096  # tokens of one answer, its first ones: a quarter of an hour of reading, 32 KiB of memory
Times = NDArray[np.float32]  # s, good to 0.1 ms in the first half hour


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One answer that has ended; times in s from its request on, ascending.

    Token i was put into the buffer at `put_s[i]` and shown at `released_s[i]`. Only the first MAX_TRACED are known of
    `n_put` and `n_released`; a reader who went away leaves some that were put and never shown. `pace_tps` is the
    reader's pace in token/s and `expected_ttft_s` the expected TTFT, both as they were in force at the end.
    """

    outcome: Outcome
    put_s: Times
    released_s: Times
    n_put: int
    n_released: int
    pace_tps: float
    expected_ttft_s: float

    @classmethod
    def of(
        cls, outcome: Outcome, buffer: TokenBuffer, began: float, *, pace_tps: float, expected_ttft_s: float
    ) -> Trace:
        """Out of the buffer that delivered the answer; `began` is the time of the request on the buffer's clock, s."""
        puts, arrivals = buffer.puts, buffer.arrivals
        return cls(
            outcome, _since(began, puts), _since(began, arrivals), len(puts), len(arrivals), pace_tps, expected_ttft_s
        )

    def to_json(self) -> dict[str, Any]:
        """The document of /disco/v1/trace; times rounded to ms. `cut` says that tokens are missing at the end."""
        outcome = self.outcome
        return {
            "request_id": outcome.request_id,
            "created": outcome.created,
            "model": outcome.model,
            "finish_reason": outcome.finish_reason,
            "error": outcome.error,
            "duration_s": round(outcome.duration_s, 3),
            "pace_tps": self.pace_tps,
            "expected_ttft_s": self.expected_ttft_s,
            "put": self.n_put,
            "released": self.n_released,
            "cut": self.n_put > len(self.put_s),
            "put_s": _in_ms(self.put_s),
            "released_s": _in_ms(self.released_s),
            "disco": outcome.to_json(),
        }


def _since(began: float, times: Sequence[float]) -> Times:
    """The first MAX_TRACED times, counted from `began` on."""
    return (np.array(times[:MAX_TRACED], dtype=np.float64) - began).astype(np.float32)


def _in_ms(times: Times) -> list[float]:
    """Rounded to ms; whole ms, divided in Python, are written with three digits and not as floats of 32 bits."""
    return [ms / 1000 for ms in np.rint(times.astype(np.float64) * 1000).astype(np.int64).tolist()]
