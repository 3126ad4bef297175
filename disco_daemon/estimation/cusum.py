"""A test that finds out online that what is measured has changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Cusum:
    """A two-sided CUSUM (Page, Biometrika 41, 1954) of numbers that are uniform on [0, 1] as long as nothing changes.

    `sums` are the evidence for smaller and for larger numbers, `since` the samples since each was last 0, which is
    where the change began if there is one.
    """

    # Simulated through ServerTtft, 2,000 requests a stream: one false alarm in 8,700 requests of an i.i.d. lognormal
    # TTFT (sigma 0.4), in 9,000 to 12,000 where it is Pareto, bimodal or rounded, and fewer where half is censored. A
    # doubled scale is found after 11 requests (99 %: 17), one and a half after 18 (99 %: 55). Real traces, shuffled:
    # none in 22,500. In their own order: one in 230, and cutting there lowers the quantile loss by 2 to 4 %.
    DRIFT = 0.1
    THRESHOLD = 3.0

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    since: list[int] = field(default_factory=lambda: [0, 0])

    def update(self, u: float) -> int | None:
        """Take the next number; on alarm return the samples since the change began and start afresh."""
        for side, step in enumerate((0.5 - u, u - 0.5)):
            self.sums[side] = max(0.0, self.sums[side] + step - self.DRIFT)
            self.since[side] = self.since[side] + 1 if self.sums[side] > 0 else 0
        side = 0 if self.sums[0] >= self.sums[1] else 1
        if self.sums[side] <= self.THRESHOLD:
            return None
        began = self.since[side]
        self.sums, self.since = [0.0, 0.0], [0, 0]
        return began
