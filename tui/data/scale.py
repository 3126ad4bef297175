"""The scales of the sliders: logarithmic for the exchange rate, linear for shares. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale from `low` to `high` in `steps` equal steps, of the logarithm if `log`. `marks` are values with a name.

    Values on a step have at most `digits` significant digits, so that users can read and repeat them.
    """

    low: float
    high: float
    steps: int
    log: bool = False
    digits: int = 2
    marks: tuple[tuple[float, str], ...] = ()

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.steps >= 1 and (self.low > 0 or not self.log)):
            msg = f"a scale goes upward, a logarithmic one from above 0: {self}"
            raise ValueError(msg)

    def clamp(self, value: float) -> float:
        """Return the nearest value within the scale."""
        return min(self.high, max(self.low, value))

    def share(self, value: float) -> float:
        """Return how far along the scale a value is, 0 to 1."""
        low, at, high = (math.log10(x) if self.log else x for x in (self.low, self.clamp(value), self.high))
        return (at - low) / (high - low)

    def at(self, share: float) -> float:
        """Return the value of the step nearest to a share of the scale, 0 to 1."""
        return self._step(round(min(1.0, max(0.0, share)) * self.steps))

    def step(self, value: float, by: int) -> float:
        """Return the value `by` steps further. From between two steps, the next one counts as the first."""
        values = [self._step(i) for i in range(self.steps + 1)]
        slack = 1e-9 * abs(value)  # a value that lost a bit on its way through JSON is still on its step
        begin = bisect_right(values, value + slack) - 1 if by > 0 else bisect_left(values, value - slack)
        return values[min(self.steps, max(0, begin + by))]

    def _step(self, i: int) -> float:
        share = i / self.steps
        if not self.log:
            return _round(self.low + share * (self.high - self.low), self.digits)
        low, high = math.log10(self.low), math.log10(self.high)
        return _round(10 ** (low + share * (high - low)), self.digits)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


# The range in which the daemon tells rates apart (`money.exchange`). A full battery is worth what the mains is;
# the last of one ten times that, and ten times more below the charge that the user wants to keep: hence the marks.
RATE = Scale(
    0.01, 1000.0, 100, log=True,
    marks=((0.3, "mains price"), (3.0, "battery precious"), (30.0, "battery sacred")),
)  # fmt: skip
BUDGET = Scale(0.0, 1.0, 20, digits=2)


def in_force(rate: float, factor: float) -> float:
    """Return the rate that counts, $/kWh: the one set, within the range, times the factor of battery and heat."""
    return RATE.clamp(rate) * factor


def factor_of(money_rate: float, effective: float) -> float:
    """Return the factor of battery and heat, from the rate set and the rate in force."""
    return effective / RATE.clamp(money_rate)


def seconds(time: float | None) -> str:
    """Write a time in s or ms."""
    if time is None:
        return "-"
    return f"{1000 * time:.0f} ms" if time < 0.1 else f"{time:.2f} s" if time < 100 else f"{time:.0f} s"
